"""Remembers requests whose callers left while the engine had them: one may yet end the engine.

A prompt is kept for seconds, in which a trial may need it, and as long as a step with it runs; a
digest is kept for minutes, in which a stall is detected. Belongs to one event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from holdfast.engine.requests.request import EngineOutputs, EngineRequest

TRIABLE_SECONDS = 10.0
"""How long the prompt of a request in no step is kept for a trial after its client has left."""
TRIABLE_BYTES = 256 << 20
"""How much all these prompts may take together; the oldest are dropped first."""
KEPT_SECONDS = 900.0
"""How long a departed request is remembered: longer than a stall takes to detect."""
KEPT = 256
"""How many departed requests are remembered."""


@dataclass(frozen=True, slots=True)
class Leavers:
    """The requests that left between two deaths."""

    recent: Sequence[EngineRequest]
    """The requests that left within `TRIABLE_SECONDS` before the later death."""
    earlier: Sequence[EngineRequest]
    is_complete: bool
    """Whether all that left are remembered."""


class Departed:
    """The requests that have left since the last death."""

    def __init__(
        self,
        outputs: EngineOutputs,
        in_step: Callable[[], Iterable[str]],
        clock: Callable[[], float],
    ) -> None:
        """Take `in_step`, which returns vLLM's internal IDs of the requests in running steps."""
        self._outputs = outputs
        self._in_step = in_step
        self._clock = clock
        self._kept: deque[tuple[float, EngineRequest]] = deque()
        self._triable: deque[tuple[float, EngineRequest]] = deque()
        """The requests whose prompts are kept."""
        self._has_dropped_some = False

    def add(self, request: EngineRequest) -> None:
        """Remember a request whose caller leaves now."""
        self._forget_requests()
        if len(self._kept) == KEPT:
            self._forget_one()
        self._kept.append((self._clock(), request))
        request.size_bytes = self._outputs.size_bytes(request.arguments)
        self._triable.append((self._clock(), request))
        self._forget_prompts()

    def take(self) -> Leavers:
        """Return all at a death, and forget them."""
        self._forget_requests()
        since = self._clock() - TRIABLE_SECONDS
        leavers = Leavers(
            [request for at, request in self._kept if at >= since],
            [request for at, request in self._kept if at < since],
            is_complete=not self._has_dropped_some,
        )
        self._kept.clear()
        self._triable.clear()
        self._has_dropped_some = False
        return leavers

    def forget_old(self) -> None:
        """Drop what is too old to be remembered."""
        self._forget_requests()
        if self._triable and self._triable[0][0] < self._clock() - TRIABLE_SECONDS:
            self._forget_prompts()

    def _forget_requests(self) -> None:
        since = self._clock() - KEPT_SECONDS
        while self._kept and self._kept[0][0] < since:
            self._kept.popleft()

    def _forget_one(self) -> None:
        """Drop the oldest in no running step: a flood must not hide what hangs the engine."""
        running = self.running()
        ids = [request.request_id for _, request in self._kept]
        del self._kept[next((at for at, one in enumerate(ids) if one not in running), 0)]
        self._has_dropped_some = True

    def _forget_prompts(self) -> None:
        """Drop the oldest prompts, except those in a running step: the engine may hang in one."""
        since, kept_bytes = self._clock() - TRIABLE_SECONDS, 0
        kept, over = deque[tuple[float, EngineRequest]](), list[tuple[float, EngineRequest]]()
        for at, request in reversed(self._triable):
            has_room = kept_bytes + request.size_bytes <= TRIABLE_BYTES and len(kept) < KEPT
            if at >= since and has_room:
                kept_bytes += request.size_bytes
                kept.appendleft((at, request))
            else:
                over.append((at, request))
        running = self.running() if over else frozenset()
        for at, request in over:
            if request.request_id in running:
                kept.appendleft((at, request))
            else:
                request.forget_prompt()
        self._triable = kept

    def running(self) -> frozenset[str]:
        """Return the IDs that the requests in running steps may have."""
        return frozenset(chain.from_iterable(map(self._outputs.request_ids, self._in_step())))
