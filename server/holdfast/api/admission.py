"""Who may come in now, who waits, and who is turned away? By the state, the line and the key."""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Protocol

from starlette.types import Scope

from holdfast.api.line import Line, Ticket
from holdfast.lifecycle.states import SERVING, State
from holdfast.records import RefusalReason
from holdfast.settings import OverloadSettings
from holdfast.telemetry.refusals import Refusals
from holdfast.telemetry.waits import Waits

PROBE_HEADER = "x-holdfast-probe"
PROBE_HEADER_BYTES = PROBE_HEADER.encode()
RETRY_AFTER_UNKNOWN_SECONDS = 5
RETRY_AFTER_MOST_SECONDS = 120

_REFUSAL_OF = MappingProxyType[State, RefusalReason](
    {State.DRAINING: "draining", State.STOPPED: "draining", State.FAILED: "failed"}
)


class GateView(Protocol):
    """What the gate reads at each request; plain attributes, since it is the hot path."""

    @property
    def state(self) -> State:
        """Where the server stands now."""

    @property
    def reason(self) -> str:
        """Why it stands there."""

    @property
    def eta_seconds(self) -> float | None:
        """Time until READY, if anything is known of it."""

    @property
    def is_recovering(self) -> bool:
        """Whether an engine that was lost is being replaced, so that it is worth to wait."""

    async def until_moved(self) -> None:
        """Return when the state has changed."""


class Admission:
    """Decides by the state, the line and the key, and counts. Belongs to one event loop."""

    def __init__(  # noqa: PLR0913 - the composition root names each collaborator
        self,
        view: GateView,
        *,
        probe_token: str,
        refusals: Refusals,
        hold_timeout_seconds: float = 0.0,
        overload: OverloadSettings | None = None,
        places: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.view = view
        self._overload = overload or OverloadSettings()
        self._hold_timeout_seconds = hold_timeout_seconds
        self._places = places
        self._line = Line(self._places_now, most_waiting=self._overload.max_waiting)
        self._is_moving = False
        self._follower: asyncio.Task[None] | None = None
        self._probe_token = probe_token.encode()
        self._refusals = refusals
        self.waits = Waits()
        """How long the requests that were called had waited for it."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Requests let in and not yet answered whole, the probe's own left out."""
        return self._line.inside

    @property
    def held(self) -> int:
        """Requests that wait for a place in the engine, or for its next generation."""
        return self._line.waiting

    @property
    def is_busy(self) -> bool:
        """Whether anybody waits or is in flight."""
        return bool(self._line.inside or self._line.waiting)

    def is_open(self, *, is_probe: bool) -> bool:
        """Whether a request that comes now may enter."""
        state = self.view.state
        # While draining an engine may be lost, and proven anew for those who are still in.
        return state in SERVING or (is_probe and state in {State.PROBING, State.DRAINING})

    def is_probe_token(self, given: bytes) -> bool:
        """Whether this is the token of this start; an empty token opens nothing."""
        return bool(self._probe_token) and hmac.compare_digest(given, self._probe_token)

    def is_probe(self, scope: Scope) -> bool:
        """Whether the request carries the token of this start."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        return any(
            name == PROBE_HEADER_BYTES and self.is_probe_token(value) for name, value in headers
        )

    def join(self, key: str, *, needs_place: bool) -> Ticket:
        """A ticket for a request that comes now: called, waiting or refused. It must `leave`.

        A lost engine is worth to wait for while its next generation is expected within the hold
        time-out.
        """
        self._look()
        most = self._overload.max_requests_per_key
        if not self.is_open(is_probe=False) and not self._is_worth_to_wait(self._hold_deadline()):
            ticket = Ticket(key, standing="refused", refusal=self._refusal_of_state())
        elif key and most and needs_place and self._line.count(key) >= most:
            ticket = Ticket(key, standing="refused", refusal="key_concurrency")
        else:
            ticket = self._line.join(key, needs_place=needs_place)
            self._idle.clear()
        if ticket.standing == "waiting" and (self._follower is None or self._follower.done()):
            self._follower = asyncio.create_task(self._follow(), name="line")
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Take a request out, wherever it stands."""
        self._line.leave(ticket)
        if not self.is_busy:
            self._idle.set()

    def count_refusal(self, reason: RefusalReason) -> None:
        """Count a request that is turned away."""
        self._refusals.count(reason)

    async def until_settled(self, ticket: Ticket) -> bool:
        """Return True when a ticket waits no longer.

        For a place it waits as long as it takes; while the gate is closed, for the hold time-out.
        A drain goes on to call those whom it found waiting for a place.
        """
        hold_ends: float | None = None
        while ticket.standing == "waiting":
            if self.view.state in SERVING or (self._is_moving and hold_ends is None):
                hold_ends = None
            else:
                hold_ends = hold_ends or self._hold_deadline()
            if hold_ends is not None and not self._is_worth_to_wait(hold_ends):
                break
            try:
                async with asyncio.timeout_at(hold_ends):
                    await ticket.until_stirred()
            except TimeoutError:
                break
        self._line.refuse(ticket, self._refusal_of_state())  # if it waits still
        return True

    def retry_after_seconds(self) -> int:
        """Whole seconds until who is refused now would not be, between 1 and 120."""
        eta_seconds = None if self.view.state in SERVING else self.view.eta_seconds
        rate = self._line.rate.per_second
        if not rate:
            return retry_after_seconds(eta_seconds)
        return retry_after_seconds((self._line.waiting + 1) / rate + (eta_seconds or 0.0))

    async def until_idle(self, deadline_seconds: float) -> bool:
        """Wait until nothing waits or is in flight; False if not so after `deadline_seconds`."""
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _hold_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._hold_timeout_seconds

    def _is_worth_to_wait(self, deadline: float) -> bool:
        left_seconds = deadline - asyncio.get_running_loop().time()
        may_wait = self.view.is_recovering and self._overload.max_waiting > 0
        return may_wait and (self.view.eta_seconds or 0.0) <= left_seconds

    def _refusal_of_state(self) -> RefusalReason:
        return _REFUSAL_OF.get(self.view.state, "not_ready")

    def _places_now(self) -> float:
        return self._places() if self._is_moving else 0

    def _look(self) -> None:
        """See whether the line moves: in READY, and in a drain if it moved before."""
        state = self.view.state
        self._is_moving = state in SERVING or (self._is_moving and state is State.DRAINING)

    async def _follow(self) -> None:
        """While somebody waits, have the line follow the state."""
        while self._line.waiting:
            self._look()
            self._line.advance()
            self._line.stir()
            await self.view.until_moved()


def retry_after_seconds(eta_seconds: float | None) -> int:
    """Whole seconds until it is worth to ask again, between 1 and 120.

    OpenAI's clients do not retry at all when they are told to wait longer than that.
    """
    if eta_seconds is None:
        return RETRY_AFTER_UNKNOWN_SECONDS
    return math.ceil(min(RETRY_AFTER_MOST_SECONDS, max(1.0, eta_seconds)))
