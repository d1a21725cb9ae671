"""Memory that layers keep beside scratch: persistent resources, and MoE permute scratch among them.

vLLM refuses a resource that is missing after the lock. Under `alongside` it is made then, within
the limit; what it needs is known once its factory ran for any slot, or where it is a plain tensor.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn, TypeVar, cast

import torch

from holdfast.records import GrowthPhase, Rejection
from holdfast.workspace import moe_permute
from holdfast.workspace.accounting import Holdings, tensor_bytes
from holdfast.workspace.buffers import asking_frame
from holdfast.workspace.growth import GrowthGate, resource_message

Resource = TypeVar("Resource")
logger = logging.getLogger(__name__)


class Resources:
    """Makes the resources of one manager, and is the owner that permute scratch asks to grow."""

    def __init__(
        self,
        gate: GrowthGate,
        holdings: Holdings,
        owner_of: Callable[[], moe_permute.Owner | None],
    ) -> None:
        """`owner_of` finds the owner of this process at the time of a growth."""
        self._books = gate.books
        self._gate = gate
        self._holdings = holdings
        self._owner_of = owner_of
        self._known_bytes: dict[Hashable, int] = {}
        self._admitted_thread: int | None = None

    @property
    def phase(self) -> GrowthPhase:
        """How far the manager is closed to change."""
        return self._books.phase

    def is_admitted(self) -> bool:
        """Whether the growth of this thread is admitted, see `growing`."""
        return self._admitted_thread == threading.get_ident()

    def will_need(self, key: Hashable, size_bytes: int) -> None:
        """Say what the resource will hold, where that is known before it is made."""
        self._known_bytes[key] = size_bytes

    def get(
        self, of_slot: dict[Hashable, object], key: Hashable, factory: Callable[[], Resource]
    ) -> Resource:
        """What the slot has under `key`, made if it is missing and may be made.

        The factory runs outside of our lock, because it is foreign code.
        """
        if key not in of_slot:
            if self._books.is_locked:
                self._check_late(key)
            try:
                made = factory()
            except torch.OutOfMemoryError as error:
                if self._books.is_locked:
                    self._refuse(key, f"out of memory: {error}")
                raise
            moe_permute.follow(made, self._owner_of)
            self._keep(of_slot, key, made)
        return cast("Resource", of_slot[key])

    @contextmanager
    def growing(self, request: Rejection, message: Callable[[str], str]) -> Iterator[None]:
        """Entered around growth outside of the slots; refused if what `request` needs may not be.

        `request` becomes the rejection: its reason names what is needed, and why not is added.
        `message` makes of the latter what is raised.
        """
        with self._gate.changing:
            reason = self._gate.reason_against(request.needed_bytes)
            if reason:
                self._gate.refuse(_because(request, reason), message(reason))
            self._admitted_thread = threading.get_ident()
            try:
                yield
            except RuntimeError as error:  # the allocator's, torch.OutOfMemoryError among them
                if not self._books.is_locked:
                    raise
                reason = f"out of memory: {error}"
                self._gate.refuse(_because(request, reason), message(reason))
            finally:
                self._admitted_thread = None
                self._holdings.weigh()

    def replaced(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count a growth outside of the slots; once sealed, `tensors` are kept alive."""
        with self._gate.changing:
            self._holdings.retire(tensors)
            self._books.grew(self._books.phase)

    def _keep(self, of_slot: dict[Hashable, object], key: Hashable, made: object) -> None:
        with self._gate.changing:
            of_slot[key] = made
            self._known_bytes[key] = tensor_bytes([made])
            self._holdings.weigh()
            if self._books.is_locked:
                self._books.grew("locked")

    def _check_late(self, key: Hashable) -> None:
        # Where the need is unknown one byte: refused as soon as the limit is reached.
        with self._gate.changing:
            reason = self._gate.reason_against(self._known_bytes.get(key, 1))
        if reason:
            self._refuse(key, reason)
        caller = asking_frame()
        logger.warning("Persistent workspace %r is created after the lock for '%s'", key, caller)

    def _refuse(self, key: Hashable, reason: str) -> NoReturn:
        needed_bytes = self._known_bytes.get(key, 0)
        held_bytes = self._books.persistent_bytes
        rejection = Rejection("persistent", asking_frame(), needed_bytes, held_bytes, reason)
        self._gate.refuse(rejection, resource_message(key, reason))


def _because(request: Rejection, reason: str) -> Rejection:
    return replace(request, reason=f"{request.reason}: {reason}")
