"""Is it proven? Runs the suite until a pass succeeds without growth, or says why none does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Literal

from holdfast.engine.interface import Engine
from holdfast.errors import EngineLostError, ProbeFailedError
from holdfast.labels import StepName
from holdfast.lifecycle.death_task import DeathTask, death_within, run_unless_dead
from holdfast.lifecycle.host import Prober
from holdfast.lifecycle.learning import Learning, has_rejection
from holdfast.lifecycle.start_times import timed
from holdfast.probe.sizes import full_prompt_tokens
from holdfast.probe.suite import reason_to_skip
from holdfast.records import Death, EngineFacts, ProbeReport, ProbeStep
from holdfast.settings import ProbeSettings, Suite
from holdfast.telemetry.progress import Progress

logger = logging.getLogger(__name__)

MAX_PASSES = 3
"""The most passes of the suite in one engine, until one succeeds without growth."""
DEATH_DEADLINE_SECONDS = 2.0
"""The time between a death and the report of the probe that met it, in either order."""

_REMEDY = (
    "reserve more (--workspace-reserve), let it grow (--workspace-growth alongside) or learn "
    "(--learned-dir), or lower --max-model-len or --max-num-batched-tokens."
)
_REMEDIES: Mapping[StepName, str] = {
    "first_token": "correct what the message names, see the engine's log above, or reserve more "
    "(--workspace-reserve).",
    "baseline": "compare versions, flags and the model's files with those of the recording "
    "(`holdfast verify URL --against FILE`), or record a new baseline if the change is intended.",
}

ProofOutcome = Literal["proven", "again", "died"]


class Proof:
    """Proves engines, and knows whether the proof holds for the next generation too."""

    def __init__(
        self,
        settings: ProbeSettings,
        learning: Learning,
        progress: Progress,
        *,
        phases: MutableMapping[str, float],
        on_report: Callable[[ProbeReport], None],
    ) -> None:
        self._settings = settings
        self._learning = learning
        self._progress = progress
        self._phases = phases
        self._on_report = on_report
        self._is_valid = False
        self._pass_began_seconds = 0.0
        self.report: ProbeReport | None = None
        """The report of the last pass; None before the first."""

    @property
    def slowest_step_seconds(self) -> float | None:
        """The slowest step that the suite saw; None before its first pass."""
        return self.report.slowest_step_seconds if self.report else None

    @property
    def next_run(self) -> str:
        """What the next proof runs."""
        return "one request" if self._is_valid else f"the {self._settings.suite} suite"

    def invalidate(self) -> None:
        """Require a whole suite of the next generation, since a workspace fell short."""
        self._is_valid = False

    def leave_out(self, tokens: int) -> None:
        """Limit the proof to contexts shorter than `tokens`; 0 leaves nothing out.

        The host ran out of memory with these. The limit applies from the next generation on, which
        need not prove the shorter ones again.
        """
        if tokens and self.report is not None and self.report.proven_tokens >= tokens:
            self.report = replace(self.report, proven_tokens=tokens - 1, limited=True)

    async def prove(
        self,
        engine: Engine,
        prober: Prober,
        death_task: DeathTask,
        *,
        start_seconds: float,
        is_first: bool,
    ) -> ProofOutcome:
        """Prove an engine: with the whole suite, or with one request if the proof is valid.

        `again` asks for a start with what was learned. `died` says that the engine died, and that
        the proof did not cause it or the engine replaces one that died.

        Raises:
            ProbeFailedError: the worst case was not served.
        """
        for attempt in range(1, MAX_PASSES + 1):
            report = await self._pass(engine, prober, death_task, attempt)
            death = await death_within(death_task, 0.0 if report.passed else DEATH_DEADLINE_SECONDS)
            ranks = engine.ranks()
            has_fallen_short = report.grew or has_rejection(ranks)
            if has_fallen_short and self._learning.takes_restart(ranks, start_seconds):
                return "again"
            if death and not (is_first and _is_to_blame(report, death)):
                return "died"
            self._require_success(report)
            if not report.grew:
                self._is_valid = self._learning.holds_for_the_next(ranks)
                self._limit(engine)
                try:
                    await self._learning.settle(engine)
                except EngineLostError:
                    return "died"
                return "proven"
            self._is_valid = False
        raise ProbeFailedError(
            f"a workspace still grew in pass {MAX_PASSES} of the probe",
            remedy="reserve more with --workspace-reserve.",
        )

    async def prove_again(
        self, engine: Engine, prober: Prober, death_task: DeathTask, suite: Suite
    ) -> ProbeReport:
        """Prove an engine again, on request; a report with growth in every pass is a failure.

        The report of a wider suite is kept when a narrower one passes. After a failure, or a death
        that the proof may have caused, the whole suite proves the next generation.
        """
        engine.limit_context(None)
        try:
            report = await self._passes_again(engine, prober, death_task, suite)
        except asyncio.CancelledError:
            self._note_fatal_proof(death_task, suite)
            raise
        if not report.passed:
            self._is_valid = False
        if not report.passed or self.report is None or _is_as_wide(report, self.report):
            self.report = report
        self._limit(engine)
        return report

    async def _passes_again(
        self, engine: Engine, prober: Prober, death_task: DeathTask, suite: Suite
    ) -> ProbeReport:
        for _ in range(MAX_PASSES):
            with timed("probe", {}, self._progress):
                running = prober.run(suite=suite)
                report = await self._reported_pass(engine, running, death_task, suite)
            if not (report.passed and report.grew):
                break
        return replace(report, passed=report.passed and not report.grew)

    def _note_fatal_proof(self, death_task: DeathTask, suite: Suite) -> None:
        """Take a proof that was cancelled for the end of its engine, which it may have caused."""
        death = None if death_task.cancelled() or not death_task.done() else death_task.result()
        if death is not None and death.blames_requests:
            self._is_valid = False
            self.report = self._cut_short(death, suite, is_whole=True)
            self._on_report(self.report)

    async def _pass(
        self, engine: Engine, prober: Prober, death_task: DeathTask, attempt: int
    ) -> ProbeReport:
        if attempt > 1:
            logger.info("a workspace grew, so the suite runs again (pass %d)", attempt)
        # The last engine's limit still applies, and may be shorter than the request of a proof.
        engine.limit_context(None)
        running = (
            prober.run_again(_compared_tokens(self.report)) if self._is_valid else prober.run()
        )
        with timed("probe", self._phases, self._progress):
            report = await self._reported_pass(
                engine, running, death_task, self._settings.suite, is_whole=not self._is_valid
            )
        if not self._is_valid:
            self.report = report
        return report

    async def _reported_pass(
        self,
        engine: Engine,
        running: Awaitable[ProbeReport],
        death_task: DeathTask,
        suite: Suite,
        *,
        is_whole: bool = True,
    ) -> ProbeReport:
        self._pass_began_seconds = time.monotonic()
        # The probe would wait without end for an engine that is stalled.
        found = await run_unless_dead(death_task, running, grace_seconds=DEATH_DEADLINE_SECONDS)
        report = found or self._cut_short(death_task.result(), suite, is_whole=is_whole)
        self._on_report(report)
        self._learning.learn(engine.ranks())
        return report

    def _cut_short(self, death: Death, suite: Suite, *, is_whole: bool) -> ProbeReport:
        """Return the report of a pass that a death ended, with the slowest step known so far."""
        step = ProbeStep("first_token", "failed", 0.0, reason=f"the engine died: {death}")
        return ProbeReport(
            suite=suite,
            passed=False,
            limited=False,
            proven_tokens=0,
            duration_seconds=time.monotonic() - self._pass_began_seconds,
            steps=(step,),
            slowest_step_seconds=self.slowest_step_seconds or 0.0,
            is_whole=is_whole,
        )

    def _limit(self, engine: Engine) -> None:
        """Refuse requests that are longer than what was proven, unless they are wanted."""
        if self.report is None or self._settings.admits_unproven:
            return
        limit_tokens = proven_context_tokens(self.report, engine.facts)
        engine.limit_context(limit_tokens)
        if limit_tokens is not None:
            logger.warning(
                "requests longer than %d tokens get 400, because nothing longer was proven; "
                "--admit-unproven accepts them",
                limit_tokens,
            )

    def _require_success(self, report: ProbeReport) -> None:
        if not report.passed:
            failed = next(step for step in report.steps if step.outcome == "failed")
            raise ProbeFailedError(
                f"the probe failed in {failed.name}: {failed.reason}",
                remedy=_REMEDIES.get(failed.name, _REMEDY),
            )
        if report.limited and self._settings.requires_full:
            limits = "; ".join(f"{s.name}: {s.reason}" for s in report.steps if s.limited)
            raise ProbeFailedError(
                f"the proof is limited to {report.proven_tokens} tokens ({limits})",
                remedy="raise --probe-timeout, delete the probe journal, or leave out "
                "--probe-require-full.",
            )


def failure_text(report: ProbeReport) -> str:
    """Describe why a report is not a proof."""
    failed = next((step for step in report.steps if step.outcome == "failed"), None)
    return f"{failed.name}: {failed.reason}" if failed else "a workspace grew in every pass"


def proven_text(report: ProbeReport | None) -> str:
    """Describe what a report proves of an engine that serves."""
    if report is None or report.suite == "off":
        return "not probed"
    limited = " (limited)" if report.limited else ""
    return f"{report.proven_tokens} tokens proven{limited}"


def proven_context_tokens(report: ProbeReport, facts: EngineFacts) -> int | None:
    """Return the longest request that was proven, with its answer; None if it is max_model_len.

    A prompt of the proven size was served with the least room that an answer needs, like the
    longest prompt of all. Where the steps about contexts do not apply, there is no limit.
    """
    if reason_to_skip("full_context", facts):
        return None
    short = (step.tokens for step in report.steps if step.name == "first_token")
    missing = full_prompt_tokens(facts) - max(report.proven_tokens, *short, 0)
    return facts.max_model_len - missing if missing > 0 else None


def _compared_tokens(report: ProbeReport | None) -> int:
    """Return the length of the longest sequence of a baseline that may be compared again.

    If time ended the comparison, that is the longest context which was served.
    """
    if report is None or all(step.name != "baseline" for step in report.steps):
        return 0
    compared = (step.tokens for step in report.steps if step.name == "baseline")
    return max(report.proven_tokens, *compared)


def _is_to_blame(report: ProbeReport, death: Death) -> bool:
    """Whether the proof itself ended the engine, so that another start would end the same way."""
    return not report.passed and death.blames_requests


def _is_as_wide(report: ProbeReport, current: ProbeReport) -> bool:
    widths = {"off": 0, "quick": 1, "worst-case": 2}
    return widths[report.suite] >= widths[current.suite]
