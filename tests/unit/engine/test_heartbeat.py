"""Is it stalled? Each rule on its own, and what is not a stall."""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.engine.baseline import BaselineWatch, CanaryAnswer
from holdfast.engine.heartbeat import (
    BLOCKED_SECONDS,
    IDLE_SECONDS,
    MAX_COMPILE_SECONDS,
    Heartbeat,
    Snapshot,
    StallDetector,
)
from holdfast.engine.proxy import EngineProxy
from holdfast.engine.replay import ReplayManager
from holdfast.records import RankStats
from holdfast.verify.baseline import Baseline, FirstToken, RecordedSequence
from sample_status import a_rank
from scripted_llm import PlainOutputs
from stub_engine import FakeClock, StubEngine

TIMEOUT_SECONDS = 120.0
BUSY = Snapshot(
    now_seconds=0.0,
    busy_since_seconds=0.0,
    last_step_seconds={},
    running={},
    blocked_since_seconds={},
)


def _first_stall(snapshot: Snapshot, *, until: int = 1000, slowest: float = 0.0) -> int | None:
    """Return the second at which an unchanging engine is found stalled."""
    detector = StallDetector(TIMEOUT_SECONDS)
    for second in range(until):
        if detector.stall_reason(replace(snapshot, now_seconds=float(second)), slowest):
            return second
    return None


def test_no_step_for_the_time_out_is_a_stall() -> None:
    """With requests in the engine."""
    assert _first_stall(BUSY) == TIMEOUT_SECONDS


def test_an_idle_engine_makes_no_steps() -> None:
    """An idle engine ends no steps, and that is not a stall."""
    assert _first_stall(replace(BUSY, busy_since_seconds=None)) is None


def test_time_counts_from_when_there_was_something_to_do() -> None:
    """The time counts from the first request, and not from an earlier step."""
    snapshot = replace(BUSY, busy_since_seconds=50.0, last_step_seconds={0: 1.0})
    assert _first_stall(snapshot) == 50 + TIMEOUT_SECONDS


def test_a_prefill_in_chunks_is_progress() -> None:
    """Each step counts, even if it makes no token."""
    detector = StallDetector(TIMEOUT_SECONDS)
    for second in range(1000):
        now = float(second)
        snapshot = replace(BUSY, now_seconds=now, last_step_seconds={0: now - second % 100})
        assert not detector.stall_reason(snapshot, 0.0)


def test_a_model_with_slow_steps_gets_more_time() -> None:
    """The limit is at least three times the slowest step of the probe."""
    assert _first_stall(BUSY, slowest=100.0) == 300


def test_one_engine_of_several_can_stall_alone() -> None:
    """One engine is stalled although the other makes progress."""
    detector = StallDetector(TIMEOUT_SECONDS)
    found = [
        second
        for second in range(200)
        if detector.stall_reason(
            replace(
                BUSY,
                now_seconds=float(second),
                last_step_seconds={0: float(second), 1: 0.0},
                running={0: 3, 1: 2},
            ),
            0.0,
        )
    ]
    assert found[0] == TIMEOUT_SECONDS


def test_an_engine_of_several_without_requests_does_not_stall() -> None:
    """An engine without requests has nothing to do."""
    snapshot = replace(BUSY, running={0: 3, 1: 0})
    detector = StallDetector(TIMEOUT_SECONDS)
    for second in range(400):
        now = float(second)
        steps = {0: now, 1: 0.0}
        assert not detector.stall_reason(
            replace(snapshot, now_seconds=now, last_step_seconds=steps), 0.0
        )


def test_an_engine_of_several_that_was_idle_is_given_its_time() -> None:
    """It counts from its own first request, not from when the others got busy."""
    detector = StallDetector(TIMEOUT_SECONDS)
    for second in range(600):
        now = float(second)
        snapshot = replace(
            BUSY,
            now_seconds=now,
            last_step_seconds={0: now, 1: 0.0},
            running={0: 3, 1: int(second > 500)},
        )
        assert not detector.stall_reason(snapshot, 0.0)


def test_a_scheduler_that_runs_nothing_is_blocked() -> None:
    """Requests wait, nothing holds them back, and none runs for a minute."""
    snapshot = replace(BUSY, blocked_since_seconds={0: 5.0})
    assert _first_stall(snapshot) == 5 + BLOCKED_SECONDS


def test_an_engine_that_defers_all_it_has_does_not_stall() -> None:
    """A grammar that compiles for longer than the timeout delays no other request."""
    assert _first_stall(replace(BUSY, deferring=frozenset({0}))) is None


def test_time_counts_from_when_not_all_is_deferred_any_more() -> None:
    """A hang is found beside a deferred request, and so is a scheduler that fell silent."""
    detector = StallDetector(TIMEOUT_SECONDS)
    found = [
        second
        for second in range(1000)
        if detector.stall_reason(
            replace(
                BUSY, now_seconds=float(second), deferring=frozenset({0} if second < 300 else ())
            ),
            0.0,
        )
    ]
    assert found[0] == 299 + TIMEOUT_SECONDS


def test_an_engine_of_several_stalls_though_another_defers() -> None:
    """What one engine defers says nothing about the other."""
    snapshot = replace(
        BUSY,
        last_step_seconds={0: 0.0, 1: 0.0},
        running={0: 1, 1: 1},
        deferring=frozenset({1}),
    )
    assert _first_stall(snapshot) == TIMEOUT_SECONDS


def test_a_paused_engine_does_not_stall() -> None:
    """A paused engine runs no steps because it was told to."""
    assert _first_stall(replace(BUSY, is_paused=True)) is None


def test_a_compiler_gets_the_time_it_needs() -> None:
    """Compiling is excused only up to a limit."""
    compiling = replace(BUSY, is_compiling=True)
    assert _first_stall(compiling) is None
    assert _first_stall(compiling, until=3000) == MAX_COMPILE_SECONDS + TIMEOUT_SECONDS - 1


def test_time_in_which_this_process_did_not_run_does_not_count() -> None:
    """A laptop may have slept, or a container may have been frozen."""
    detector = StallDetector(TIMEOUT_SECONDS)
    assert not detector.stall_reason(replace(BUSY, now_seconds=1.0), 0.0)
    assert not detector.stall_reason(replace(BUSY, now_seconds=5000.0), 0.0)


class Patient(StubEngine):
    """An engine that was never busy, and whose canary can be made to hang."""

    def __init__(self, *, hangs: bool, says: CanaryAnswer | None = None) -> None:
        self.canaries = 0
        self.asked: Sequence[int] = ()
        self._hangs = hangs
        self._says = says or CanaryAnswer()
        self.sung = asyncio.Event()

    def ranks(self, *, reads_steps: bool = True) -> tuple[RankStats, ...]:
        del reads_steps
        return (a_rank(last_step_ended_seconds=None),)

    async def canary(self, prompt: Sequence[int] = ()) -> CanaryAnswer:
        self.canaries += 1
        self.asked = prompt
        self.sung.set()
        if self._hangs:
            await asyncio.Event().wait()
        return self._says

    async def dump_stacks(self) -> str:
        return "the stacks"


def _beat(
    engine: Patient,
    clock: FakeClock,
    *,
    may_try: bool = True,
    baseline: BaselineWatch | None = None,
    requests: ReplayManager | None = None,
) -> Heartbeat:
    return Heartbeat(
        engine,  # type: ignore[arg-type]  # what the heartbeat uses of an engine
        requests or ReplayManager(PlainOutputs()),
        stall_timeout_seconds=TIMEOUT_SECONDS,
        slowest_step_seconds=lambda: 0.0,
        may_try=lambda: may_try,
        baseline=baseline,
        clock=clock,
    )


def _looks(heartbeat: Heartbeat, clock: FakeClock, seconds: int) -> str:
    """Return the result of this many looks, one second apart."""
    for _ in range(seconds):
        clock.now_seconds += 1
        if reason := heartbeat._look():
            return reason
    return ""


def test_an_idle_engine_gets_a_canary_a_minute() -> None:
    """One at a time."""

    async def scene() -> None:
        clock = FakeClock()
        engine = Patient(hangs=False)
        heartbeat = _beat(engine, clock)
        assert not _looks(heartbeat, clock, int(IDLE_SECONDS))
        await engine.sung.wait()
        await asyncio.sleep(0)
        assert not _looks(heartbeat, clock, int(IDLE_SECONDS))
        assert engine.canaries == 1

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("says", "agrees", "logged"),
    [
        (CanaryAnswer(7, {7: -0.25, 9: -2.0}), True, ""),
        (CanaryAnswer(7, {7: -0.5, 9: -2.0}), False, "differ from the baseline by 0.25 nats"),
        (
            CanaryAnswer(9, {7: -0.25, 9: -2.0}),
            False,
            "chose token 9 instead of the recorded one",
        ),
        (CanaryAnswer(), None, ""),
    ],
)
def test_a_canary_is_compared_with_the_baseline(
    says: CanaryAnswer, agrees: bool | None, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A difference is logged and counted, and the engine serves on; a silence is not a verdict."""
    recorded = Baseline(
        sequences=(RecordedSequence((1, 2), (), (((2, -0.25),),)),),
        first_tokens=(FirstToken((5, 6), (((7, -0.25), (9, -2.0)),)),),
    )
    baseline = BaselineWatch(recorded)

    async def scene() -> None:
        clock = FakeClock()
        engine = Patient(hangs=False, says=says)
        heartbeat = _beat(engine, clock, baseline=baseline)
        assert not _looks(heartbeat, clock, int(IDLE_SECONDS))
        await engine.sung.wait()
        assert engine.asked == (5, 6)
        await asyncio.sleep(0)
        assert not _looks(heartbeat, clock, 10)

    asyncio.run(scene())
    compared = baseline.last().get("canary")
    assert (compared and compared.agrees) is agrees
    assert logged in caplog.text
    assert bool(caplog.text) is (agrees is False)


def test_a_canary_that_does_not_come_back_is_a_stall() -> None:
    """An idle engine that hangs is found before a user finds it; there is no second canary."""

    async def scene() -> None:
        clock = FakeClock()
        engine = Patient(hangs=True)
        heartbeat = _beat(engine, clock)
        assert not _looks(heartbeat, clock, int(IDLE_SECONDS))
        await engine.sung.wait()
        assert "finished no step" in _looks(heartbeat, clock, int(TIMEOUT_SECONDS) + 1)
        assert engine.canaries == 1
        await heartbeat._cancel_canary()

    asyncio.run(scene())


@pytest.mark.parametrize("minutes", [3])
def test_no_canary_is_sent_before_the_engine_is_proven(minutes: int) -> None:
    """No canary runs while the engine is drained or asleep."""

    async def scene() -> None:
        clock = FakeClock()
        engine = Patient(hangs=False)
        assert not _looks(_beat(engine, clock, may_try=False), clock, 60 * minutes)
        await asyncio.sleep(0)
        assert engine.canaries == 0

    asyncio.run(scene())


class Pausable:
    """Answers what vLLM's routes for pauses ask, unless it hangs."""

    def __init__(self) -> None:
        self.hangs = True
        self.answers_after_all = asyncio.Event()

    async def pause_generation(self, **_: str) -> None:
        await self._answer()

    async def resume_generation(self) -> None:
        await self._answer()

    async def sleep(self, _level: int) -> None:
        await self._answer()

    async def wake_up(self, _tags: Any) -> bool:
        await self._answer()
        return True

    async def is_sleeping(self) -> bool:
        return False

    async def _answer(self) -> None:
        if self.hangs:
            await self.answers_after_all.wait()


async def _reason_during(
    llm: Pausable, engine: Patient, calls: Sequence[Callable[[EngineProxy], Awaitable[Any]]]
) -> str:
    """Return why a busy engine is stalled during the last of these calls, or after it."""
    proxy, clock = EngineProxy(), FakeClock()
    proxy._current = llm
    proxy.requests._load.busy_since_seconds = clock.now_seconds
    heartbeat = _beat(engine, clock, requests=proxy.requests)
    *answered, last = calls
    llm_hangs, llm.hangs = llm.hangs, False
    for call in answered:
        await call(proxy)
    llm.hangs = llm_hangs
    pending = asyncio.ensure_future(last(proxy))
    await asyncio.sleep(0.05)
    reason = _looks(heartbeat, clock, int(2 * TIMEOUT_SECONDS))
    llm.answers_after_all.set()
    await pending
    assert proxy.requests.aborts.stops_steps == proxy.requests.aborts.is_paused
    return reason


def _pause(proxy: EngineProxy) -> Awaitable[None]:
    return proxy.pause_generation(mode="wait")


def _resume(proxy: EngineProxy) -> Awaitable[None]:
    return proxy.resume_generation()


def _sleep(proxy: EngineProxy) -> Awaitable[None]:
    return proxy.sleep(1)


def _wake(proxy: EngineProxy) -> Awaitable[bool]:
    return proxy.wake_up(None)


@pytest.mark.parametrize("calls", [(_pause,), (_pause, _resume)])
def test_an_engine_that_answers_no_pause_may_stall(
    calls: Sequence[Callable[[EngineProxy], Awaitable[Any]]],
) -> None:
    """It makes steps until it has paused, and again once it is told to go on."""
    reason = asyncio.run(_reason_during(Pausable(), Patient(hangs=False), calls))
    assert "finished no step" in reason


def test_a_call_that_is_refused_does_not_hide_a_pause_that_hangs() -> None:
    """As a resume that comes while the pause is in flight."""

    async def live() -> bool:
        aborts = EngineProxy().requests.aborts
        aborts.is_paused = True
        with aborts.steps_due_after(0.0):
            await asyncio.sleep(0.05)
            with aborts.steps_due_after(0.0):
                await asyncio.sleep(0.05)
            return aborts.stops_steps

    assert not asyncio.run(live())


@pytest.mark.parametrize("calls", [(_sleep,), (_sleep, _wake)])
def test_an_engine_that_moves_its_weights_gets_time(
    calls: Sequence[Callable[[EngineProxy], Awaitable[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes no step meanwhile, but the time that it gets is limited."""
    assert not asyncio.run(_reason_during(Pausable(), Patient(hangs=False), calls))
    monkeypatch.setattr("holdfast.engine.proxy.SLEEP_DEADLINE_SECONDS", 0.0)
    assert asyncio.run(_reason_during(Pausable(), Patient(hangs=False), calls))


@pytest.mark.parametrize("calls", [(_pause,), (_sleep,)])
def test_an_engine_that_has_paused_makes_no_steps(
    calls: Sequence[Callable[[EngineProxy], Awaitable[Any]]],
) -> None:
    """However long that is."""
    llm = Pausable()
    llm.hangs = False
    assert not asyncio.run(_reason_during(llm, Patient(hangs=False), calls))


def test_an_engine_that_has_paused_before_the_others_does_not_stall() -> None:
    """It queues what comes, and another still makes its long answers."""

    class Others(Patient):
        def ranks(self, *, reads_steps: bool = True) -> tuple[RankStats, ...]:
            del reads_steps
            return (a_rank(last_step_ended_seconds=math.inf),)

        def running_requests(self) -> dict[int, int]:
            return {0: 1, 1: 1}

        def blocked_since_seconds(self) -> dict[int, float]:
            return {1: 0.0}

    assert not asyncio.run(_reason_during(Pausable(), Others(hangs=False), [_pause]))


class Compiling(Patient):
    """Hangs, and is in a compiler for a number of looks at its stacks; each look takes time."""

    def __init__(self, clock: FakeClock, looks: float) -> None:
        super().__init__(hangs=True)
        self._clock = clock
        self._looks = looks

    def ranks(self, *, reads_steps: bool = True) -> tuple[RankStats, ...]:
        self._clock.now_seconds += 1
        return super().ranks(reads_steps=reads_steps)

    async def dump_stacks(self) -> str:
        self._looks -= 1
        return "the stacks" if self._looks < 0 else "make_llir (triton/backends/nvidia/compiler.py)"


@pytest.mark.parametrize("looks", [0, 3, math.inf])
def test_a_compiler_that_is_part_of_a_process_gets_time_too(
    monkeypatch: pytest.MonkeyPatch, looks: float
) -> None:
    """Each look at a compiler allows one more timeout, up to a limit."""
    monkeypatch.setattr("holdfast.engine.heartbeat.POLL_SECONDS", 0.0)
    clock = FakeClock()

    async def scene() -> str:
        engine = Compiling(clock, looks)
        async with asyncio.timeout(60):
            return (await _beat(engine, clock).until_stalled()).cause

    began = clock.now_seconds
    assert asyncio.run(scene()) == "stall"
    first_seconds = IDLE_SECONDS + TIMEOUT_SECONDS
    given_seconds = min(looks * TIMEOUT_SECONDS, MAX_COMPILE_SECONDS)
    assert first_seconds + given_seconds <= clock.now_seconds - began
    assert clock.now_seconds - began <= first_seconds + given_seconds + 2 * TIMEOUT_SECONDS


class Unseen(Patient):
    """An engine that fails when the heartbeat looks at it."""

    looks = 0

    def ranks(self, *, reads_steps: bool = True) -> tuple[RankStats, ...]:
        del reads_steps
        self.looks += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_an_engine_that_cannot_be_looked_at_is_not_stalled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The heartbeat looks again, and logs one line."""
    monkeypatch.setattr("holdfast.engine.heartbeat.POLL_SECONDS", 0.001)
    engine = Unseen(hangs=False)

    async def scene() -> None:
        waiting = asyncio.create_task(_beat(engine, FakeClock()).until_stalled())
        async with asyncio.timeout(60):
            while engine.looks < 5:  # noqa: ASYNC110 - it sends no event
                await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(scene())
    assert sum("cannot read the engine" in record.getMessage() for record in caplog.records) == 1
