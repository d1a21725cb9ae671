"""What is held beside the current buffers, and how much is it?

How much the tensors of an object hold is best effort: resources have no interface.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch

from holdfast.workspace.books import Books

_DEEPEST = 4
_MOST_OBJECTS = 10_000


class Holdings:
    """What a manager keeps alive beside its current buffers."""

    def __init__(self, books: Books, resources: Sequence[Mapping[Hashable, object]]) -> None:
        self._books = books
        self._resources = resources
        self.retired: list[torch.Tensor] = []

    def retire(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep `tensors`, whose addresses graphs may hold, once the manager is sealed."""
        if self._books.is_sealed:
            self.retired.extend(tensors)
        self.weigh()

    def weigh(self) -> None:
        """Enter in the books what is held now; resources may have grown since."""
        self._books.holds(
            retired_bytes=sum(tensor.nbytes for tensor in self.retired),
            persistent_bytes=tensor_bytes(self._resources),
        )


def tensor_bytes(things: Iterable[object]) -> int:
    """Bytes of the distinct storages that `things` keep in attributes, slots and containers.

    Modules are left out: a resource that knows a layer does not own the weights of it. What lies
    deeper than a few levels, or outside of torch, is not seen.
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    level: list[object] = list(things)
    for _ in range(_DEEPEST):
        fresh = [thing for thing in level if id(thing) not in seen]
        seen.update(map(id, fresh))
        for thing in fresh:
            if isinstance(thing, torch.Tensor):
                storages.update(_storage(thing))
        level = [part for thing in fresh for part in _parts(thing)][:_MOST_OBJECTS]
    return sum(storages.values())


def _storage(tensor: torch.Tensor) -> Mapping[int, int]:
    """The storage of `tensor` by its address; nothing for a tensor that has none of its own."""
    try:
        storage = tensor.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    except (NotImplementedError, RuntimeError):
        return {}


def _parts(thing: object) -> Iterable[object]:
    if isinstance(thing, (torch.Tensor, torch.nn.Module, type, str, bytes)):
        return ()
    if isinstance(thing, Mapping):
        return tuple(thing.values())
    if isinstance(thing, (list, tuple, set, frozenset)):
        return tuple(thing)
    attributes = tuple(getattr(thing, "__dict__", {}).values())
    names = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
    return attributes + tuple(getattr(thing, name, None) for name in names)
