"""Which requests are refused because no probe has proven their length?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fake_engine import FakeEngine
from holdfast.labels import Outcome
from holdfast.lifecycle.death_task import first_death
from holdfast.lifecycle.learning import Learning
from holdfast.lifecycle.proof import Proof, proven_context_tokens
from holdfast.records import Death, ProbeReport, ProbeStep
from holdfast.settings import ProbeSettings, Suite, WorkspaceSettings
from holdfast.status_page.activity import Activity, WatchedProgress
from holdfast.telemetry.progress import LogProgress
from stub_engine import FACTS


def report(proven: int, *, grew: bool = False, outcome: Outcome = "passed") -> ProbeReport:
    """Return the report of a pass that served contexts of up to `proven` tokens."""
    full = FACTS.max_model_len - 1
    steps = (
        ProbeStep("first_token", "passed", 1.0, tokens=8),
        ProbeStep("full_context", outcome, 1.0, tokens=proven, limited=proven < full),
    )
    return ProbeReport("worst-case", True, proven < full, proven, 1.0, steps, grew=grew)


@pytest.mark.parametrize(
    ("proven", "limit"), [(1000, None), (999, 1000), (500, 501), (8, 9), (0, 9)]
)
def test_the_limit_is_what_was_proven_with_room_for_an_answer(
    proven: int, limit: int | None
) -> None:
    """The longest prompt is one token short of max_model_len, so a full proof sets no limit.

    A probe that tried no context has proven its first short request.
    """
    outcome: Outcome = "passed" if proven else "skipped"
    assert proven_context_tokens(report(proven, outcome=outcome), FACTS) == limit


@pytest.mark.parametrize(("proven", "limit"), [(1001, None), (500, 500)])
def test_a_pooling_model_makes_no_answer(proven: int, limit: int | None) -> None:
    """Its longest prompt is max_model_len."""
    facts = replace(FACTS, tasks=frozenset({"embed"}))
    assert proven_context_tokens(report(proven), facts) == limit


def test_what_does_not_apply_limits_nothing() -> None:
    """An encoder-decoder model accepts no prompt of the probe, so there is no limit."""
    facts = replace(FACTS, is_encoder_decoder=True)
    assert proven_context_tokens(report(0, outcome="skipped"), facts) is None


class Probe:
    """Gives reports in turn, and notes the limit that each was made under."""

    def __init__(self, engine: FakeEngine, reports: Sequence[ProbeReport]) -> None:
        self.engine = engine
        self.limits: list[int | None] = []
        self.compared_tokens: int | None = None
        self._reports = iter(reports)

    async def run(self, *, suite: Suite | None = None) -> ProbeReport:
        """Return the next report, and note the limit."""
        del suite
        self.limits.append(self.engine.context_limit_tokens)
        return next(self._reports)

    async def run_again(self, compared_tokens: int) -> ProbeReport:
        """Return the next report, and note the limit, and that on a baseline's sequences."""
        self.compared_tokens = compared_tokens
        return await self.run()


def limits_of(
    reports: Sequence[ProbeReport], settings: ProbeSettings, *, is_invalidated: bool = False
) -> tuple[list[int | None], list[int | None]]:
    """Return the limits in READY of successive proofs, and the limits that the suite ran under."""

    async def live() -> tuple[list[int | None], list[int | None]]:
        learning = Learning(WorkspaceSettings(learned_directory=None), None)
        progress = LogProgress(logging.getLogger("a.pipe"))
        proof = Proof(settings, learning, progress, phases={}, on_report=lambda _: None)
        found = []
        async with (
            FakeEngine() as engine,
            first_death(_never(), on_death=lambda _: None) as death_task,
        ):
            probe = Probe(engine, reports)
            for _ in reports:
                given = await proof.prove(
                    engine, probe, death_task, start_seconds=1.0, is_first=True
                )
                assert given == "proven"
                found.append(engine.context_limit_tokens)
                if is_invalidated:
                    proof.invalidate()
        return found, probe.limits

    return asyncio.run(live())


async def _never() -> Death:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def test_a_limited_proof_limits_what_is_taken() -> None:
    """A recovery with a valid proof changes nothing; its one request may be longer."""
    found, under = limits_of([report(500), report(8)], ProbeSettings())
    assert (found, under) == ([501, 501], [None, None])


def test_the_suite_is_not_limited_by_what_it_proved_before() -> None:
    """After a workspace fell short, the suite tries everything again, and the new proof counts."""
    found, under = limits_of([report(500), report(1000)], ProbeSettings(), is_invalidated=True)
    assert (found, under) == ([501, None], [None, None])


@pytest.mark.parametrize(
    "settings",
    [
        ProbeSettings(lifts_proven_length=True),
        ProbeSettings(suite="quick"),
        ProbeSettings(suite="off"),
    ],
)
def test_an_operator_may_want_unproven_requests(settings: ProbeSettings) -> None:
    """A flag says so, or a suite that claims less."""
    assert limits_of([report(500)], settings)[0] == [None]


def test_a_proof_on_request_is_over_once_it_has_run() -> None:
    """Or the status page would show it until the next start."""

    async def live() -> list[Activity | None]:
        learning = Learning(WorkspaceSettings(learned_directory=None), None)
        log = LogProgress(logging.getLogger("a.pipe"))
        progress, seen = WatchedProgress(log, lambda *_: None), list[Activity | None]()
        proof = Proof(
            ProbeSettings(),
            learning,
            progress,
            phases={},
            on_report=lambda _: seen.append(progress.activity),
        )
        async with (
            FakeEngine() as engine,
            first_death(_never(), on_death=lambda _: None) as death_task,
        ):
            probe = Probe(engine, [report(500)])
            await proof.prove_again(engine, probe, death_task, "worst-case")
        return [*seen, progress.activity]

    during, after = asyncio.run(live())
    assert during is not None
    assert during.phase == "probe"
    assert after is None


def test_a_proof_on_request_is_not_limited_by_what_was_proven_before() -> None:
    """The suite tries everything, and its report sets the limit from then on."""

    async def live() -> tuple[list[int | None], int | None]:
        learning = Learning(WorkspaceSettings(learned_directory=None), None)
        progress = LogProgress(logging.getLogger("a.pipe"))
        proof = Proof(ProbeSettings(), learning, progress, phases={}, on_report=lambda _: None)
        async with (
            FakeEngine() as engine,
            first_death(_never(), on_death=lambda _: None) as death_task,
        ):
            probe = Probe(engine, [report(500), report(700)])
            await proof.prove(engine, probe, death_task, start_seconds=1.0, is_first=True)
            await proof.prove_again(engine, probe, death_task, "worst-case")
            return probe.limits, engine.context_limit_tokens

    assert asyncio.run(live()) == ([None, None], 701)


@pytest.mark.parametrize(
    ("step", "compared"),
    [
        (None, 0),
        (ProbeStep("baseline", "passed", 1.0, tokens=600), 600),
        (ProbeStep("baseline", "passed", 1.0, tokens=42, limited=True), 500),
        (ProbeStep("baseline", "skipped", 1.0, limited=True), 500),
    ],
    ids=["none", "compared", "cut by time", "no time"],
)
def test_a_recovery_compares_no_more_of_a_baseline_than_was_served(
    step: ProbeStep | None, compared: int
) -> None:
    """What was too long may be too long again; for what lacked time, there is time again."""

    async def live() -> int | None:
        learning = Learning(WorkspaceSettings(learned_directory=None), None)
        progress = LogProgress(logging.getLogger("a.pipe"))
        proof = Proof(ProbeSettings(), learning, progress, phases={}, on_report=lambda _: None)
        whole = report(500)
        if step is not None:
            whole = replace(whole, steps=(*whole.steps, step))
        async with (
            FakeEngine() as engine,
            first_death(_never(), on_death=lambda _: None) as death_task,
        ):
            probe = Probe(engine, [whole, report(8)])
            for _ in range(2):
                await proof.prove(engine, probe, death_task, start_seconds=1.0, is_first=True)
            return probe.compared_tokens

    assert asyncio.run(live()) == compared


class EndlessProbe:
    """Runs until it is cancelled, as a probe of an engine that is gone."""

    def __init__(self, began: asyncio.Event) -> None:
        self._began = began

    async def run(self, *, suite: Suite | None = None) -> ProbeReport:
        """Note that it began, and never end."""
        del suite
        self._began.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def run_again(self, compared_tokens: int) -> ProbeReport:
        """Do the same with one request."""
        del compared_tokens
        return await self.run()


async def reports_of_death(
    settings: ProbeSettings, *, was_proven: bool = False, again: Suite | None = None
) -> list[ProbeReport]:
    """Return the reports of a proof during which the engine dies."""
    reports: list[ProbeReport] = []
    learning = Learning(WorkspaceSettings(learned_directory=None), None)
    progress = LogProgress(logging.getLogger("a.pipe"))
    proof = Proof(settings, learning, progress, phases={}, on_report=reports.append)
    began = asyncio.Event()

    async def dies() -> Death:
        await began.wait()
        return Death("core_exit", "signal 11", blames_requests=True)

    async with FakeEngine() as engine, first_death(dies(), on_death=lambda _: None) as death_task:
        if was_proven:
            probe = Probe(engine, [report(500)])
            await proof.prove(engine, probe, death_task, start_seconds=1.0, is_first=True)
            reports.clear()
        endless = EndlessProbe(began)
        if again:
            await proof.prove_again(engine, endless, death_task, again)
        else:
            await proof.prove(engine, endless, death_task, start_seconds=1.0, is_first=False)
    return reports


@pytest.mark.parametrize("suite", ["quick", "worst-case"])
@pytest.mark.parametrize("is_on_request", [False, True])
def test_a_proof_that_a_death_cuts_short_is_one_of_its_suite(
    suite: Suite, *, is_on_request: bool
) -> None:
    """The page would show the time of the failure as that of the last good proof of another."""
    other: Suite = "quick" if suite == "worst-case" else "worst-case"
    settings = ProbeSettings(suite=other if is_on_request else suite)
    proof = reports_of_death(settings, again=suite if is_on_request else None)
    (cut,) = asyncio.run(proof)
    assert (cut.suite, cut.is_whole, cut.passed) == (suite, True, False)
    assert cut.duration_seconds > 0


def test_one_request_that_a_death_cuts_short_is_not_the_suite() -> None:
    """The page keeps the time of the suite before it."""
    (cut,) = asyncio.run(reports_of_death(ProbeSettings(), was_proven=True))
    assert (cut.suite, cut.is_whole, cut.passed) == ("worst-case", False, False)


def test_a_proof_on_request_that_is_cancelled_with_its_engine_keeps_its_suite() -> None:
    """Its report says which suite may have ended the engine."""

    async def live() -> list[ProbeReport]:
        reports: list[ProbeReport] = []
        learning = Learning(WorkspaceSettings(learned_directory=None), None)
        progress = LogProgress(logging.getLogger("a.pipe"))
        proof = Proof(ProbeSettings(), learning, progress, phases={}, on_report=reports.append)
        began, ends = asyncio.Event(), asyncio.get_running_loop().create_future()
        async with FakeEngine() as engine, first_death(ends, on_death=lambda _: None) as death_task:
            again = proof.prove_again(engine, EndlessProbe(began), death_task, "worst-case")
            proving = asyncio.create_task(again)
            await began.wait()
            ends.set_result(Death("core_exit", "signal 11", blames_requests=True))
            await asyncio.wait({death_task})
            proving.cancel()
            await asyncio.wait({proving})
        return reports

    (cut,) = asyncio.run(live())
    assert (cut.suite, cut.is_whole) == ("worst-case", True)
    assert cut.duration_seconds > 0
