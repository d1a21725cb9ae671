"""May a workspace grow, and by how much? The rules of growth, and the messages of refusals.

Knows neither vLLM nor torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NoReturn

from holdfast.labels import GrowthPhase
from holdfast.records import Rejection
from holdfast.workspace.accounting import WorkspaceAccounting
from holdfast.workspace.plan import MIB, RESERVE_GRANULE_BYTES, GrowthPolicy, round_up

DENIED: Final = "the growth policy is deny"
_STATES: Mapping[GrowthPhase, str] = MappingProxyType(
    {"warmup": "being captured", "sealed": "sealed", "locked": "locked"}
)


@dataclass(slots=True)
class GrowthRule:
    """The policy after the lock, and once sealed, the limit above what was held at the lock."""

    policy: GrowthPolicy = "deny"
    limit_bytes: int = 0
    locked_bytes: int = 0
    """Held at the lock: current and retired buffers, and persistent resources."""

    def reason_against(
        self, held_bytes: int, *, is_locked: bool, is_sealed: bool, is_capturing: bool
    ) -> str:
        """Return why the rank may not hold `held_bytes` in all; empty if it may."""
        if is_locked and self.policy == "deny":
            return DENIED
        if is_capturing:
            return "the stream is being captured into a graph"
        # Before the seal the old buffer is freed, so growth takes no more than vLLM's own.
        if is_locked and is_sealed and not self.is_within_limit(held_bytes):
            return (
                f"it would hold {(held_bytes - self.locked_bytes) / MIB:.2f} MB more than at the "
                f"lock, but the growth limit is {self.limit_bytes / MIB:.2f} MB"
            )
        return ""

    def is_within_limit(self, held_bytes: int) -> bool:
        """Return whether the rank may hold `held_bytes` in all."""
        return held_bytes - self.locked_bytes <= self.limit_bytes

    def size_bytes(self, required_bytes: int, held_bytes: int, *, is_limited: bool) -> int:
        """Return `required_bytes`, rounded up to 2 MiB against repeated growth if that may be."""
        rounded_bytes = round_up(required_bytes, RESERVE_GRANULE_BYTES)
        if is_limited and not self.is_within_limit(held_bytes + rounded_bytes):
            return required_bytes
        return rounded_bytes


class GrowthGate:
    """Decides about every growth, from the rule and what is held now."""

    def __init__(self, accounting: WorkspaceAccounting, is_capturing: Callable[[], bool]) -> None:
        self.rule = GrowthRule()
        self.is_bound = False
        """Whether the policy was chosen; otherwise all is refused that vLLM's manager refuses."""
        self.is_capturing = is_capturing
        """Whether the stream of this thread is being captured into a graph."""
        # Ubatches run in threads of their own. Reentrant: an allocation may end in a callback.
        self.changing = threading.RLock()
        """Held while the buffers, the seal or the lock change."""
        self.accounting = accounting
        self._own_thread = threading.get_ident()

    def reason_against(self, more_bytes: int, *, is_first_use: bool = False) -> str:
        """Return why `more_bytes` may not be allocated now; empty if they may.

        `is_first_use` says that they are for what nothing has asked for before. Without graphs,
        warm-up skips what only a real step uses, and no reservation can make it.
        """
        is_unrestricted = is_first_use and self.is_bound and not self.accounting.is_sealed
        return self.rule.reason_against(
            self.accounting.held_bytes + more_bytes,
            is_locked=self.accounting.is_locked and not is_unrestricted,
            is_sealed=self.accounting.is_sealed,
            is_capturing=self.is_capturing(),
        )

    def size_bytes(self, required_bytes: int) -> int:
        """Return the size of a buffer for `required_bytes`; during warm-up exactly that."""
        accounting = self.accounting
        if accounting.phase == "warmup":
            return required_bytes
        is_limited = accounting.is_locked and accounting.is_sealed
        return self.rule.size_bytes(required_bytes, accounting.held_bytes, is_limited=is_limited)

    def refuse(self, rejection: Rejection, message: str) -> NoReturn:
        """Write the refusal to the stats, then raise vLLM's AssertionError with `message`.

        In the thread of a ubatch, the rank is lost with it: vLLM raises that a microbatch failed,
        or loses the exception, or waits forever for the other ubatch (`run_ubatch` and
        `_run_ubatches`, 0.32).
        """
        self.accounting.record_rejection(rejection)
        if threading.get_ident() != self._own_thread:
            self.accounting.record_fatal_error(f"{AssertionError.__name__}: {message}")
        raise AssertionError(message)


def scratch_message(rejection: Rejection, phase: GrowthPhase) -> str:
    """Return the message for scratch that may not grow; with `deny`, exactly vLLM's own."""
    return (
        f"Workspace is {_STATES[phase]} but allocation from '{rejection.caller}' requires "
        f"{rejection.needed_bytes / MIB:.2f} MB, current size is "
        f"{rejection.held_bytes / MIB:.2f} MB. {_verdict('Workspace', rejection.reason)}"
    )


def resource_message(key: Hashable, reason: str) -> str:
    """Return the message for a missing persistent resource; with `deny`, vLLM's own."""
    message = (
        f"Workspace is locked but {key!r} was not allocated during warmup for the current "
        "ubatch and lane."
    )
    return message if reason == DENIED else f"{message} Refused: {reason}."


def permute_message(rows: int, held_rows: int, phase: GrowthPhase, reason: str) -> str:
    """Return the message for MoE permute scratch that may not grow; with `deny`, vLLM's own."""
    return (
        f"Workspace is {_STATES[phase]} but MoE permute scratch requires {rows} rows, current "
        f"capacity is {held_rows} rows. {_verdict('Scratch', reason)}"
    )


def _verdict(what: str, reason: str) -> str:
    if reason == DENIED:
        return f"{what} growth is not allowed after locking."
    return f"Growth was refused: {reason}."
