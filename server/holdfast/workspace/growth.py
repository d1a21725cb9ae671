"""May a workspace grow, and by how much? The rules of growth, and the words of their refusals.

Knows neither vLLM nor torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NoReturn

from holdfast.records import GrowthPhase, Rejection
from holdfast.workspace.accounting import Books
from holdfast.workspace.plan import MIB, RESERVE_GRANULE_BYTES, GrowthPolicy, round_up

DENIED: Final = "the growth policy is deny"


@dataclass(slots=True)
class GrowthRule:
    """The policy after the lock and its limit: above what was held at the lock, once sealed."""

    policy: GrowthPolicy = "deny"
    limit_bytes: int = 0
    locked_bytes: int = 0
    """Held at the lock: current, retired and persistent."""

    def reason_against(
        self, held_bytes: int, *, is_locked: bool, is_sealed: bool, is_capturing: bool
    ) -> str:
        """Why `held_bytes` in all may not be reached now; empty if it may."""
        if is_locked and self.policy == "deny":
            return DENIED
        if is_capturing:
            return "the stream is being captured into a graph"
        # Before the seal the old buffer is freed, so that growth is no more than vLLM's own.
        if is_locked and is_sealed and not self.is_within_limit(held_bytes):
            return (
                f"it would hold {(held_bytes - self.locked_bytes) / MIB:.2f} MB more than at the "
                f"lock, but the growth limit is {self.limit_bytes / MIB:.2f} MB"
            )
        return ""

    def is_within_limit(self, held_bytes: int) -> bool:
        """Whether a rank may hold `held_bytes` in all."""
        return held_bytes - self.locked_bytes <= self.limit_bytes

    def size_bytes(self, required_bytes: int, held_bytes: int, *, is_limited: bool) -> int:
        """Rounded up to 2 MiB, so that not every new size grows again, if the limit allows that."""
        rounded_bytes = round_up(required_bytes, RESERVE_GRANULE_BYTES)
        if is_limited and not self.is_within_limit(held_bytes + rounded_bytes):
            return required_bytes
        return rounded_bytes


class GrowthGate:
    """What every growth passes: the rule, applied to how things stand by the books."""

    def __init__(self, books: Books, is_capturing: Callable[[], bool]) -> None:
        self.rule = GrowthRule()
        self.is_capturing = is_capturing
        """Whether the stream of this thread is being captured into a graph."""
        # Ubatches run in threads of their own. Reentrant: an allocation may end in a callback.
        self.changing = threading.RLock()
        """Held by whoever changes what the manager holds, or how far it is closed."""
        self.books = books
        self._own_thread = threading.get_ident()

    def reason_against(self, more_bytes: int) -> str:
        """Why `more_bytes` may not be allocated now; empty if they may."""
        return self.rule.reason_against(
            self.books.held_bytes + more_bytes,
            is_locked=self.books.is_locked,
            is_sealed=self.books.is_sealed,
            is_capturing=self.is_capturing(),
        )

    def size_bytes(self, required_bytes: int) -> int:
        """How large a buffer is made for `required_bytes`; in the warm-up no larger, as in vLLM."""
        books = self.books
        if books.phase == "warmup":
            return required_bytes
        is_limited = books.is_locked and books.is_sealed
        return self.rule.size_bytes(required_bytes, books.held_bytes, is_limited=is_limited)

    def refuse(self, rejection: Rejection, message: str) -> NoReturn:
        """Write the refusal to the stats, then raise what vLLM raises, with `message`.

        In the thread of a ubatch the rank is lost with it. vLLM raises there that a microbatch
        failed, or loses the exception, or waits for the other ubatch without end (`run_ubatch`
        and `_run_ubatches`, 0.32).
        """
        self.books.refused(rejection)
        if threading.get_ident() != self._own_thread:
            self.books.lost(f"{AssertionError.__name__}: {message}")
        raise AssertionError(message)


def scratch_message(rejection: Rejection, phase: GrowthPhase) -> str:
    """What is raised when scratch may not grow; under `deny` vLLM's own text, to the letter."""
    return (
        f"Workspace is {_STATES[phase]} but allocation from '{rejection.caller}' requires "
        f"{rejection.needed_bytes / MIB:.2f} MB, current size is "
        f"{rejection.held_bytes / MIB:.2f} MB. {_verdict('Workspace', rejection.reason)}"
    )


def resource_message(key: Hashable, reason: str) -> str:
    """What is raised when a persistent resource is missing; under `deny` vLLM's own text."""
    message = (
        f"Workspace is locked but {key!r} was not allocated during warmup for the current "
        "ubatch and lane."
    )
    return message if reason == DENIED else f"{message} Refused: {reason}."


def permute_message(rows: int, held_rows: int, phase: GrowthPhase, reason: str) -> str:
    """What is raised when MoE permute scratch may not grow; under `deny` vLLM's own text."""
    return (
        f"Workspace is {_STATES[phase]} but MoE permute scratch requires {rows} rows, current "
        f"capacity is {held_rows} rows. {_verdict('Scratch', reason)}"
    )


_STATES: Mapping[GrowthPhase, str] = MappingProxyType(
    {"warmup": "being captured", "sealed": "sealed", "locked": "locked"}
)


def _verdict(what: str, reason: str) -> str:
    if reason == DENIED:
        return f"{what} growth is not allowed after locking."
    return f"Growth was refused: {reason}."
