"""Memory that layers keep besides scratch: persistent resources, such as MoE permute scratch.

vLLM refuses a resource that is missing after the lock. With `alongside` it is created then, within
the limit; if no graph was captured, it always is. Its size is known if it is a plain tensor, or
once its factory has run for any slot.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn, TypeVar, cast

import torch

from holdfast.labels import GrowthPhase
from holdfast.records import Rejection
from holdfast.workspace import moe_permute
from holdfast.workspace.accounting import RetainedMemory, tensor_bytes
from holdfast.workspace.buffers import outside_caller
from holdfast.workspace.growth import GrowthGate, resource_message

Resource = TypeVar("Resource")
logger = logging.getLogger(__name__)


class Resources:
    """Creates the resources of one manager, and decides whether permute scratch may grow."""

    def __init__(
        self,
        gate: GrowthGate,
        retained: RetainedMemory,
        owner_of: Callable[[], moe_permute.Owner | None],
    ) -> None:
        """Create the resources; `owner_of` returns the owner at the time of a growth."""
        self._accounting = gate.accounting
        self._gate = gate
        self._retained = retained
        self._owner_of = owner_of
        self._known_bytes: dict[Hashable, int] = {}
        self._admitted_thread: int | None = None

    @property
    def phase(self) -> GrowthPhase:
        """Which rules of growth apply now."""
        return self._accounting.phase

    def is_admitted(self) -> bool:
        """Return whether this thread is inside `growing`."""
        return self._admitted_thread == threading.get_ident()

    def expect(self, key: Hashable, size_bytes: int) -> None:
        """Record the size of a resource that is known before it is created."""
        self._known_bytes[key] = size_bytes

    def get(
        self, of_slot: dict[Hashable, object], key: Hashable, factory: Callable[[], Resource]
    ) -> Resource:
        """Return the slot's resource under `key`, created if it is missing and may be created.

        The factory runs outside our lock, because it is foreign code.
        """
        if key not in of_slot:
            if self._accounting.is_locked:
                self._check_late(key)
            try:
                made = factory()
            except torch.OutOfMemoryError as error:
                if self._accounting.is_locked:
                    self._refuse(key, f"out of memory: {error}")
                raise
            moe_permute.guard(made, self._owner_of)
            self._keep(of_slot, key, made)
        return cast("Resource", of_slot[key])

    @contextmanager
    def growing(
        self, request: Rejection, message: Callable[[str], str], *, is_first_use: bool
    ) -> Iterator[None]:
        """Admit growth outside the slots while entered, or refuse what `request` needs.

        `request` becomes the rejection: its reason says what is needed, and the reason against it
        is appended. `message` turns that reason into the message of the error.
        """
        with self._gate.changing:
            reason = self._gate.reason_against(request.needed_bytes, is_first_use=is_first_use)
            if reason:
                self._gate.refuse(_because(request, reason), message(reason))
            self._admitted_thread = threading.get_ident()
            try:
                yield
            except RuntimeError as error:  # the allocator's, torch.OutOfMemoryError among them
                if not self._accounting.is_locked:
                    raise
                reason = f"out of memory: {error}"
                self._gate.refuse(_because(request, reason), message(reason))
            finally:
                self._admitted_thread = None
                self._retained.update()

    def record_replacement(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count a growth outside the slots; once sealed, keep the old `tensors` alive."""
        with self._gate.changing:
            self._retained.retire(tensors)
            self._accounting.record_growth(self._accounting.phase)

    def _keep(self, of_slot: dict[Hashable, object], key: Hashable, made: object) -> None:
        with self._gate.changing:
            of_slot[key] = made
            self._known_bytes[key] = tensor_bytes([made])
            self._retained.update()
            if self._accounting.is_locked:
                self._accounting.record_growth("locked")

    def _check_late(self, key: Hashable) -> None:
        # One byte if the size is unknown: refused as soon as the limit is reached.
        with self._gate.changing:
            more_bytes = self._known_bytes.get(key, 1)
            reason = self._gate.reason_against(more_bytes, is_first_use=True)
        if reason:
            self._refuse(key, reason)
        caller = outside_caller()
        logger.warning("Persistent workspace %r is created after the lock for '%s'", key, caller)

    def _refuse(self, key: Hashable, reason: str) -> NoReturn:
        needed_bytes = self._known_bytes.get(key, 0)
        held_bytes = self._accounting.persistent_bytes
        rejection = Rejection("persistent", outside_caller(), needed_bytes, held_bytes, reason)
        self._gate.refuse(rejection, resource_message(key, reason))


def _because(request: Rejection, reason: str) -> Rejection:
    return replace(request, reason=f"{request.reason}: {reason}")
