"""The one fake of our own seam: an engine that schedules as vLLM does and computes nothing.

`FakeEngine` stands behind `holdfast.engine.interface.Engine`: requests queue, a step takes tokens
up to `max_num_batched_tokens` from at most `max_num_seqs` requests, the KV cache hands out blocks,
prefixes are cached by whole blocks, and every rank notes every step. `Faults` break one thing each.
`fake_openai_app.openai_app` puts the routes of vLLM that the probe calls in front of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, Self

from holdfast.errors import EngineLostError
from holdfast.records import Death, EngineFacts, EngineStep, RankStats, Rejection
from holdfast.workspace.plan import GrowthPolicy
from holdfast.workspace.stats import RECENT_STEPS
from stub_engine import FACTS, FakeClock, StubEngine

Body = dict[str, Any]

ADAPTER = "adapter"
IMAGE_PROMPT = [6] * 40
"""The prompt that the fake makes of a chat with an image."""


@dataclass(eq=False, slots=True)
class FakeRequest:
    """One sequence. `ended` says why it is over: `length`, or the cause of a failure."""

    prompt: list[int]
    max_tokens: int
    computed_tokens: int = 0
    cached_tokens: int = 0
    ignores_cache: bool = False
    made_tokens: int = 0
    ended: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_prefilling(self) -> bool:
        return self.computed_tokens < len(self.prompt)

    async def until_made(self, tokens: int) -> None:
        """Return when this many tokens are made, or the request is over."""
        while self.made_tokens < tokens and not self.ended:
            self.changed.clear()
            await self.changed.wait()


@dataclass(frozen=True, slots=True)
class FakeStep:
    """What one step is about to compute: the tokens that it takes from each request."""

    taken: dict[FakeRequest, int]

    @property
    def tokens(self) -> int:
        return sum(self.taken.values())

    @property
    def prefilling(self) -> list[FakeRequest]:
        return [request for request in self.taken if request.is_prefilling]


@dataclass(slots=True)
class Faults:
    """The faults of the engine; none unless a test sets them."""

    kills: Callable[[FakeStep], bool] = lambda _: False
    """Whether the step ends the engine with a refused workspace."""
    hangs: Callable[[FakeStep], bool] = lambda _: False
    """Whether the engine never returns from the step."""
    longest_cut_tokens: int | None = None
    """The most tokens of one prompt that the scheduler takes into a step."""
    forgets_prefixes: bool = False
    refuses: Callable[[str, Body], int] = lambda _path, _body: 200
    """The HTTP status of a request."""
    prompt_logprob: Callable[[int], float | None] = lambda _position: -1.0
    """The log-prob of the token of a prompt at a position."""
    logprob: float | None = -1.5
    embedding: float | None = 0.25
    finish_reason: str = "length"
    streams_error: bool = False
    streams_done: bool = True
    blind_ranks: frozenset[tuple[int, int]] = frozenset()
    """The ranks that note no step."""
    late_ranks: frozenset[tuple[int, int]] = frozenset()
    """The ranks whose reports arrive a moment later, as from another node; only theirs grow."""
    grows_at_step: int | None = None
    compiles_seconds: float = 0.0
    """How much longer the first step takes."""
    forgetting_fails: bool = False
    is_deaf: bool = False
    """Whether audio is answered without a step of the engine."""
    adapters: tuple[str, ...] = (ADAPTER,)


LATE_SECONDS = 0.03
"""How long a report of another node is on its way."""


class _Lane:
    """The scheduler and the ranks of one engine of a data-parallel group."""

    def __init__(self) -> None:
        self.waiting: deque[FakeRequest] = deque()
        self.running: list[FakeRequest] = []
        self.cached: set[int] = set()
        self.steps: deque[EngineStep] = deque(maxlen=RECENT_STEPS)
        self.scheduled_tokens = 0
        self.growths = 0

    @property
    def requests(self) -> int:
        return len(self.waiting) + len(self.running)


class FakeEngine(StubEngine):
    """An `Engine` that a test sees and controls. It is a context manager, since it has a task."""

    generation = 1

    def __init__(
        self,
        facts: EngineFacts = FACTS,
        faults: Faults | None = None,
        clock: FakeClock | None = None,
        tokens_per_second: float = 1e6,
    ) -> None:
        self.facts = facts
        self.faults = faults or Faults()
        self.clock = clock or FakeClock()
        self.tokens_per_second = tokens_per_second
        self.steps: list[FakeStep] = []
        self.received: list[tuple[str, Body, int]] = []
        """The path, body and engine of every HTTP request."""
        self.forgotten = 0
        self.growth_policy: GrowthPolicy = "alongside"
        self.is_held = False
        self.pauses = 0
        self._lanes = {engine: _Lane() for engine, _ in facts.world}
        self._turns = cycle(self._lanes)
        self._sent: dict[tuple[int, int], deque[tuple[float, RankStats]]] = {}
        self._rejection: Rejection | None = None
        self._death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        self._work = asyncio.Event()
        self._stepped = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._death.done():
            self.kill("the test is over")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def ranks(self, *, reads_steps: bool = True) -> tuple[RankStats, ...]:
        found = (self._arrived(engine, rank) for engine, rank in self.facts.world)
        return tuple(rank if reads_steps else replace(rank, recent_steps=()) for rank in found)

    @asynccontextmanager
    async def scheduling_paused(self) -> AsyncIterator[None]:
        self.is_held = True
        self.pauses += 1
        try:
            yield
        finally:
            self.is_held = False
            self._work.set()

    async def queued_requests(self) -> int:
        return sum(lane.requests for lane in self._lanes.values())

    async def reset_prefix_cache(self) -> None:
        if self.faults.forgetting_fails or self._death.done():
            raise EngineLostError("the engine does not answer")
        self.forgotten += 1
        for lane in self._lanes.values():
            lane.cached.clear()

    async def set_growth(self, policy: GrowthPolicy) -> None:
        self.growth_policy = policy

    async def until_dead(self) -> Death:
        return await asyncio.shield(self._death)

    async def until_stepped(self, tokens: int) -> None:
        """Return once a step of exactly `tokens` tokens has begun."""
        while not any(step.tokens == tokens for step in self.steps):
            self._stepped.clear()
            await self._stepped.wait()

    def kill(self, cause: str) -> None:
        """End the engine as if one of its processes had died."""
        self._death.set_result(Death("unknown", cause))
        for lane in self._lanes.values():
            for request in (*lane.waiting, *lane.running):
                request.ended = cause
                request.changed.set()
            lane.waiting.clear()
            lane.running.clear()

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        engine: int | None = None,
        *,
        ignores_cache: bool = False,
    ) -> FakeRequest:
        """Queue a request at the given engine, or at the next one in turn."""
        lane = self._lanes[next(self._turns) if engine is None else engine]
        request = FakeRequest(prompt, max_tokens, ignores_cache=ignores_cache)
        lane.waiting.append(request)
        self._work.set()
        return request

    def abort(self, request: FakeRequest) -> None:
        """Drop a request after its client has gone."""
        for lane in self._lanes.values():
            if request in lane.waiting:
                lane.waiting.remove(request)
            if request in lane.running:
                lane.running.remove(request)

    async def _run(self) -> None:
        while not self._death.done():
            busy = [lane for lane in self._lanes.values() if lane.requests]
            if self.is_held or not busy:
                self._work.clear()
                await self._work.wait()
            for lane in busy:
                await self._step(lane)
            await asyncio.sleep(0)

    async def _step(self, lane: _Lane) -> None:
        if self.is_held or self._death.done():
            return
        step = self._schedule(lane)
        if not step.taken:
            return
        self.steps.append(step)
        self._stepped.set()
        if self.faults.hangs(step):
            await asyncio.Event().wait()
        if self.faults.kills(step):
            self._rejection = Rejection("scratch", "fake.py:7:forward", 2048, 1024, "locked")
            self.kill("a workspace was refused")
            return
        self._compute(lane, step)

    def _schedule(self, lane: _Lane) -> FakeStep:
        budget = self.facts.max_num_batched_tokens
        taken: dict[FakeRequest, int] = {}
        while lane.waiting and len(lane.running) < self.facts.max_num_seqs:
            if not self._has_blocks(lane, lane.waiting[0]):
                break
            request = lane.waiting.popleft()
            request.cached_tokens = request.computed_tokens = self._cached_tokens(lane, request)
            lane.running.append(request)
        for request in lane.running:
            wanted = len(request.prompt) - request.computed_tokens if request.is_prefilling else 1
            cut = self.faults.longest_cut_tokens or wanted
            if tokens := min(wanted, cut, budget):
                taken[request] = tokens
                budget -= tokens
        return FakeStep(taken)

    def _has_blocks(self, lane: _Lane, request: FakeRequest) -> bool:
        if not self.facts.kv_capacity_tokens:
            return True
        held = sum(map(self._blocks, lane.running)) + self._blocks(request)
        return held <= self.facts.kv_capacity_tokens // self.facts.kv_block_tokens - 1

    def _blocks(self, request: FakeRequest) -> int:
        tokens = len(request.prompt) + max(0, request.max_tokens - 1)
        return -(-tokens // self.facts.kv_block_tokens)

    def _cached_tokens(self, lane: _Lane, request: FakeRequest) -> int:
        is_off = not self.facts.has_prefix_caching or request.ignores_cache
        if is_off or self.faults.forgets_prefixes:
            return 0
        block = self.facts.kv_block_tokens
        edges = range(block, len(request.prompt), block)
        return max((e for e in edges if hash(tuple(request.prompt[:e])) in lane.cached), default=0)

    def _compute(self, lane: _Lane, step: FakeStep) -> None:
        started = self.clock.now_seconds
        self.clock.now_seconds += step.tokens / self.tokens_per_second
        if not lane.steps:
            self.clock.now_seconds += self.faults.compiles_seconds
        for request, tokens in step.taken.items():
            self._advance(lane, request, tokens)
        index = lane.steps[-1].index + 1 if lane.steps else 1
        duration = self.clock.now_seconds - started
        lane.steps.append(EngineStep(index, step.tokens, len(step.taken), started, duration))
        lane.scheduled_tokens += step.tokens
        lane.growths += index == self.faults.grows_at_step

    def _advance(self, lane: _Lane, request: FakeRequest, tokens: int) -> None:
        if request.is_prefilling:
            request.computed_tokens += tokens
            if request.computed_tokens < len(request.prompt):
                return
            block = self.facts.kv_block_tokens
            edges = range(block, len(request.prompt) + 1, block)
            lane.cached.update(hash(tuple(request.prompt[:edge])) for edge in edges)
        request.made_tokens += 1
        if request.made_tokens >= request.max_tokens:
            request.ended = "length"
            lane.running.remove(request)
        request.changed.set()

    def _arrived(self, engine: int, rank: int) -> RankStats:
        """What has arrived of the reports of a rank by now."""
        stats = self._stats(engine, rank)
        if (engine, rank) not in self.faults.late_ranks:
            return stats
        now = asyncio.get_running_loop().time()
        sent = self._sent.setdefault((engine, rank), deque())
        sent.append((now, stats))
        while len(sent) > 1 and sent[1][0] <= now - LATE_SECONDS:
            sent.popleft()
        return sent[0][1]

    def _stats(self, engine: int, rank: int) -> RankStats:
        lane = self._lanes[engine]
        is_blind = (engine, rank) in self.faults.blind_ranks
        grows = not self.faults.late_ranks or (engine, rank) in self.faults.late_ranks
        steps = () if is_blind else tuple(lane.steps)
        return RankStats(
            engine=engine,
            rank=rank,
            generation=1,
            pid=1,
            lamport_bytes=0,
            is_locked=True,
            is_sealed=True,
            growths={"warmup": 1, "sealed": 0, "locked": lane.growths * grows},
            rejections={},
            last_rejection=self._rejection,
            steps=steps[-1].index if steps else 0,
            scheduled_tokens=0 if is_blind else lane.scheduled_tokens,
            last_step_ended_seconds=_end_seconds(steps[-1]) if steps else None,
            recent_steps=steps,
            fatal_error=self._death.result().reason if self._death.done() else "",
        )


def _end_seconds(step: EngineStep) -> float:
    return step.started_seconds + step.duration_seconds
