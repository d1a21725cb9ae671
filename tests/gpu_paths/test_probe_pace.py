"""The probe on engines as slow as GPUs are: quadratic attention, heat, a rate that changes.

It ends whole or limited, and never as a failure: an engine that runs is not refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from asgi_server import serving
from fake_engine import FakeEngine, FakeStep, Faults
from fake_openai_app import openai_app
from gpu_paths.reports import told
from holdfast.probe import ProbeJournal, Prober, ProbeTimeouts
from holdfast.probe.measure import Run, expected_seconds
from holdfast.records import EngineFacts, ProbeReport, RankStats
from holdfast.settings import ProbeSettings, Suite
from holdfast.telemetry.progress import LogProgress
from keep_alive import NO_KEEP_ALIVE
from stub_engine import FACTS, FakeClock

MILLION = 2**20
STEP_TOKENS = 8192
LARGE = replace(
    FACTS,
    max_model_len=MILLION,
    max_num_batched_tokens=STEP_TOKENS,
    max_num_seqs=4,
    kv_capacity_tokens=4 * MILLION,
    # The fake looks for a cached prefix at each block.
    kv_block_tokens=2**18,
)


@dataclass(frozen=True)
class Pace:
    """What a step costs: `token_seconds` for each token, `back_seconds` for each it looks at."""

    token_seconds: float
    back_seconds: float
    factor: Callable[[float], float] = lambda _: 1.0
    """How much slower the device is, given the seconds since the start."""


class PacedEngine(FakeEngine):
    """The fake engine at a pace: its clock, or the real one, goes on by what its steps cost."""

    def __init__(self, facts: EngineFacts, pace: Pace, clock: Any, faults: Faults) -> None:
        super().__init__(facts, faults, FakeClock())
        self._pace = pace
        self._fake = self.clock
        self._is_real = clock is time.monotonic
        self._began_seconds = self._fake.now_seconds
        self._ended_seconds: float | None = None
        """When the last step ended, by the real clock."""
        self.stacks = ""

    def ranks(self, *, reads_steps: bool = True) -> tuple[RankStats, ...]:
        found = super().ranks(reads_steps=reads_steps)
        if not self._is_real:
            return found
        return tuple(replace(rank, last_step_ended_seconds=self._ended_seconds) for rank in found)

    async def dump_stacks(self) -> str:
        return self.stacks

    async def _step(self, lane: Any) -> None:
        before = self._fake.now_seconds
        await super()._step(lane)
        if self._is_real:
            await asyncio.sleep(self._fake.now_seconds - before)
            self._ended_seconds = time.monotonic()

    def _compute(self, lane: Any, step: FakeStep) -> None:
        looked = sum(taken * (r.computed_tokens + taken / 2) for r, taken in step.taken.items())
        seconds = step.tokens * self._pace.token_seconds + looked * self._pace.back_seconds
        seconds *= self._pace.factor(self._fake.now_seconds - self._began_seconds)
        self.tokens_per_second = step.tokens / seconds
        super()._compute(lane, step)


def probed(
    facts: EngineFacts,
    pace: Pace,
    *,
    seconds: float = 600.0,
    suite: Suite = "worst-case",
    is_real: bool = False,
    faults: Faults | None = None,
    journal: ProbeJournal | None = None,
    stall_seconds: float = 120.0,
    stacks: str = "",
) -> ProbeReport:
    """What the suite finds of an engine at this pace, within this many seconds."""

    async def run() -> ProbeReport:
        clock = time.monotonic if is_real else None
        engine = PacedEngine(facts, pace, clock, faults or Faults())
        engine.stacks = stacks
        async with serving(openai_app(engine)) as client, engine:
            prober = Prober(
                ProbeSettings(suite=suite, timeout_seconds=seconds, max_tokens=None),
                engine,
                lambda: httpx.AsyncClient(base_url=client.base_url, limits=NO_KEEP_ALIVE),
                journal or ProbeJournal(None, "paced"),
                LogProgress(logging.getLogger("a.probe")),
                clock=clock or engine.clock,
                timeouts=ProbeTimeouts(0.2, 0.1, 5.0, stall_seconds),
                random=Random(7),
            )
            return await prober.run()

    return asyncio.run(run())


QUADRATIC = Pace(token_seconds=1e-5, back_seconds=4e-10)
"""10 s for the weights and 220 s for the attention of a prompt of a million tokens."""


def heated(seconds: float) -> float:
    """A device that throttles to half within a minute."""
    return 1.0 + min(1.0, seconds / 60.0)


def shared(seconds: float) -> float:
    """A device that a neighbour takes a share of every other 20 s."""
    return 4.0 if int(seconds / 20) % 2 else 1.0


@pytest.mark.parametrize("suite", ["worst-case", "quick"])
@pytest.mark.parametrize("factor", [lambda _: 1.0, heated, shared], ids=["even", "hot", "shared"])
def test_long_contexts_are_proven_or_left_out(
    suite: Suite, factor: Callable[[float], float]
) -> None:
    """A million tokens that do not fit in the time are left out, and the rest of the suite runs."""
    report = probed(LARGE, replace(QUADRATIC, factor=factor), suite=suite)
    assert report.passed, told(report)
    assert report.limited or report.proven_tokens == MILLION - 1
    assert report.proven_tokens >= STEP_TOKENS
    assert all(step.outcome == "passed" for step in report.steps if step.name == "full_batch")


def test_quadratic_attention_fits_in_time() -> None:
    """The time left is never exceeded at a pace that holds."""
    report = probed(LARGE, QUADRATIC, seconds=300.0)
    assert report.limited
    assert report.duration_seconds < 300.0


SMALL = replace(LARGE, max_model_len=2**17, has_prefix_caching=False)


def slowed(seconds: float) -> float:
    """A device that a neighbour takes nearly all of, and keeps."""
    return 1000.0 if seconds > 0.2 else 1.0


@pytest.mark.parametrize("stall_seconds", [120.0, 0.1])
def test_context_that_takes_too_long_is_given_up(tmp_path: Path, stall_seconds: float) -> None:
    """It is left out, what was proven before stands, and the next start may try it again.

    A step as slow as one that was seen is not a hang, however little the user has patience.
    """
    pace = Pace(token_seconds=1e-6, back_seconds=0.0, factor=slowed)
    journal = ProbeJournal(tmp_path, "paced")
    report = probed(
        SMALL, pace, seconds=5.0, is_real=True, journal=journal, stall_seconds=stall_seconds
    )
    assert report.passed, told(report)
    assert report.limited
    assert 0 < report.proven_tokens < SMALL.max_model_len - 1
    assert ProbeJournal(tmp_path, "paced").forbidden_tokens is None


def test_engine_that_gives_no_answer_in_time_fails() -> None:
    """Of the first request nothing can be left out: a proof of nothing would not be one."""
    pace = Pace(token_seconds=0.1, back_seconds=0.0)
    report = probed(SMALL, pace, seconds=1.0, is_real=True)
    assert not report.passed, told(report)


def test_engine_that_stands_still_fails() -> None:
    """A step that never ends is not a slow one."""
    faults = Faults(hangs=lambda step: step.tokens == STEP_TOKENS)
    pace = Pace(token_seconds=1e-6, back_seconds=0.0)
    report = probed(SMALL, pace, seconds=3.0, is_real=True, faults=faults)
    assert not report.passed


def stands_still_within_a_prompt(step: FakeStep) -> bool:
    """At its second chunk."""
    return any(request.computed_tokens >= STEP_TOKENS for request in step.prefilling)


BRISK = Pace(token_seconds=1e-6, back_seconds=0.0)


def test_engine_that_stands_still_within_a_prompt_fails(caplog: pytest.LogCaptureFixture) -> None:
    """It is named with the prompt it stood still in, though it had begun it well."""
    faults = Faults(hangs=stands_still_within_a_prompt)
    report = probed(
        SMALL, BRISK, seconds=6.0, is_real=True, faults=faults, stall_seconds=0.5, stacks="a stack"
    )
    (failed,) = [step for step in report.steps if step.outcome == "failed"]
    assert failed.name == "context_sweep"
    assert "a prompt of 16384 tokens" in failed.reason
    assert "no step had ended for" in failed.reason
    assert "a stack" in caplog.text


def test_engine_that_may_still_end_its_step_is_limited() -> None:
    """Nor is a step that takes less than the stall timeout a hang in an engine that serves."""
    faults = Faults(hangs=stands_still_within_a_prompt)
    report = probed(SMALL, BRISK, seconds=3.0, is_real=True, faults=faults)
    (sweep,) = [step for step in report.steps if step.name == "context_sweep"]
    assert sweep.outcome == "passed"
    assert sweep.limited


def test_engine_that_compiles_within_a_prompt_is_limited() -> None:
    """Its kernels for a longer context may take minutes, and nobody calls that a hang."""
    faults = Faults(hangs=stands_still_within_a_prompt)
    compiling = 'File "/x/triton/compiler/compiler.py", line 1 in compile'
    report = probed(
        SMALL, BRISK, seconds=4.0, is_real=True, faults=faults, stall_seconds=0.5, stacks=compiling
    )
    assert report.passed, told(report)
    assert report.limited


@pytest.mark.parametrize("back_seconds", [0.0, 1e-9])
def test_expectation_is_that_of_the_cost(back_seconds: float) -> None:
    """Two contexts tell what the next one takes, with attention and without."""

    def run(tokens: int, context: int) -> Run:
        made = Run(tokens, 0.0, context)
        return replace(made, seconds=1e-4 * tokens + back_seconds * made.attended_tokens)

    sizes = [128, 1024, 2048, 4096, 8192]
    runs = [run(later - earlier, later) for earlier, later in pairwise([0, *sizes])]
    for tokens, context in ((8192, 16384), (100_000, 100_000)):
        expected = expected_seconds(runs, tokens, context)
        assert expected == pytest.approx(run(tokens, context).seconds)
