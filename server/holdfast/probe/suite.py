"""Runs the steps by name and reports. The supervisor knows no other part of the probe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from types import MappingProxyType

import httpx
import psutil

from holdfast.engine.baseline import BaselineWatch
from holdfast.engine.interface import Engine
from holdfast.errors import HoldfastError, ProbeTooSlowError
from holdfast.labels import PROBE_STEPS, QUICK_STEPS, Outcome, StepName
from holdfast.probe import measure
from holdfast.probe.baseline import baseline
from holdfast.probe.batches import batch_sweep, full_batch
from holdfast.probe.budget import Budget
from holdfast.probe.contexts import context_sweep, first_token, full_context, prefix_continuation
from holdfast.probe.decodes import mixed, widest_decode
from holdfast.probe.first_uses import first_adapter, first_image, first_sampling
from holdfast.probe.journal import ProbeJournal
from holdfast.probe.session import ProbeSession, ProbeTimeouts, Prompts, StepResult
from holdfast.probe.sizes import EngineLimits, full_prompt_tokens, is_pooling, is_transcribing
from holdfast.records import EngineFacts, ProbeReport, ProbeStep
from holdfast.settings import ProbeSettings, Suite
from holdfast.telemetry.progress import Progress

CLEANUP_STEPS = 3

Step = Callable[[ProbeSession], Awaitable[StepResult]]

STEPS: Mapping[StepName, Step] = MappingProxyType(
    {
        "first_token": first_token,
        "context_sweep": context_sweep,
        "full_context": full_context,
        "prefix_continuation": prefix_continuation,
        "batch_sweep": batch_sweep,
        "full_batch": full_batch,
        "widest_decode": widest_decode,
        "mixed": mixed,
        "baseline": baseline,
        "first_sampling": first_sampling,
        "first_image": first_image,
        "first_adapter": first_adapter,
    }
)

_SERVED_TASKS = frozenset({"generate", "embed", "classify", "token_classify", "token_embed"})
_COMPOSED: frozenset[StepName] = frozenset({"batch_sweep", "full_batch"})
_DECODING: frozenset[StepName] = frozenset(
    {"prefix_continuation", "widest_decode", "mixed", "baseline", "first_sampling"}
)
_TOGETHER: frozenset[StepName] = frozenset({"widest_decode", "mixed"})


def reason_to_skip(step: StepName, facts: EngineFacts) -> str:
    """Return why the step does not apply to the engine; empty if it does."""
    if step == "first_token" and is_transcribing(facts):
        return ""
    pools = is_pooling(facts)
    is_scattered = pools and facts.data_parallel_size > 1
    rules = (
        (facts.is_encoder_decoder, "an encoder-decoder model accepts no prompt of bare tokens"),
        (not facts.tasks & _SERVED_TASKS, "the model supports no task with a prompt of tokens"),
        (pools and step in _DECODING, "a pooling model does not decode"),
        (is_scattered and step in _COMPOSED, "pooling requests cannot choose their engine"),
        (step == "prefix_continuation" and not facts.has_prefix_caching, "prefix caching is off"),
        (facts.max_answer_tokens == 1 and step in _TOGETHER, "no answer has a second token"),
        (step == "mixed" and facts.max_num_seqs < 2, "the engine runs one request at a time"),
        (step == "first_image" and not facts.largest_image, "the model accepts no images"),
        (step == "first_image" and pools, "a pooling model does not answer chats"),
        (step == "first_image" and not facts.has_chat_template, "there is no chat template"),
        (step == "first_adapter" and not facts.has_lora, "LoRA is off"),
    )
    return next((reason for applies, reason in rules if applies), "")


def available_memory_bytes() -> int:
    """Return the memory that the kernel says is available on the host."""
    return int(psutil.virtual_memory().available)


class Prober:
    """Proves, through the real API, that one engine generation serves its worst case.

    `client_factory` makes a client with the base URL and the token that passes the gate. The prober
    closes it, sets its own deadlines, and needs few connections at a time: many prompts travel in
    one request.
    """

    def __init__(  # noqa: PLR0913 - the composition root names each collaborator
        self,
        settings: ProbeSettings,
        engine: Engine,
        client_factory: Callable[[], httpx.AsyncClient],
        journal: ProbeJournal,
        progress: Progress,
        *,
        available_memory: Callable[[], int] = available_memory_bytes,
        clock: Callable[[], float] = time.monotonic,
        timeouts: ProbeTimeouts | None = None,
        baseline: BaselineWatch | None = None,
        random: Random | None = None,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._client_factory = client_factory
        self._journal = journal
        self._progress = progress
        self._available_memory = available_memory
        self._clock = clock
        self._timeouts = timeouts or ProbeTimeouts()
        self._baseline = baseline
        self._random = random or Random()  # noqa: S311 - prompts, not secrets

    async def run(
        self,
        steps: Sequence[StepName] | None = None,
        *,
        suite: Suite | None = None,
        ceiling_tokens: int | None = None,
    ) -> ProbeReport:
        """Run a suite, the configured one by default, or `steps` in their order, and report.

        `ceiling_tokens` bounds the steps that follow a sweep of contexts, as its end would.

        A step that fails is reported, not raised, and those after it are not run. Cancellation
        propagates. The prefix cache is empty afterwards. The suite `off` sends nothing, and its
        report says that it passed, limited to 0 tokens.
        """
        suite = suite or self._settings.suite
        if suite == "off" and steps is None:
            return ProbeReport(suite, True, True, 0, 0.0, ())
        names = steps or (QUICK_STEPS if suite == "quick" else PROBE_STEPS)
        started, start = self._clock(), measure.mark(self._engine.ranks())
        async with self._client_factory() as client:
            session = self._session(client, start, ceiling_tokens)
            try:
                found = await self._run_all(session, names)
            finally:
                not_forgotten = await self._forget_prefixes(session)
            if found[-1].outcome != "failed":
                await session.until_all_reported()
        if not_forgotten and all(step.outcome != "failed" for step in found):
            found[-1] = replace(found[-1], outcome="failed", reason=not_forgotten)
        ranks = self._engine.ranks()
        session.slowest.observe(ranks)
        proven = _proven_tokens(found)
        is_short = "full_context" in names and proven < full_prompt_tokens(self._engine.facts)
        return ProbeReport(
            suite=suite,
            passed=all(step.outcome != "failed" for step in found),
            limited=is_short or any(step.limited for step in found),
            proven_tokens=proven,
            duration_seconds=self._clock() - started,
            steps=tuple(found),
            grew=start.grew(ranks),
            slowest_step_seconds=session.slowest.seconds,
            is_whole=steps is None,
        )

    async def run_again(self, compared_tokens: int) -> ProbeReport:
        """Run the first step that applies to the model, and that of a baseline, and report.

        Of the baseline, compare the sequences of up to `compared_tokens`.
        """
        if self._settings.suite == "off":
            return await self.run()
        facts = self._engine.facts
        applying = [name for name in QUICK_STEPS if not reason_to_skip(name, facts)]
        steps = list((applying or QUICK_STEPS)[:1])
        if self._baseline is not None and "baseline" in applying:
            steps.append("baseline")
        return await self.run(steps, ceiling_tokens=compared_tokens)

    def _session(
        self, client: httpx.AsyncClient, start: measure.Mark, ceiling_tokens: int | None
    ) -> ProbeSession:
        facts = self._engine.facts
        memory = self._available_memory if facts.is_unified_memory else None
        return ProbeSession(
            engine=self._engine,
            client=client,
            budget=Budget(self._settings.timeout_seconds, self._journal, self._clock, memory),
            progress=self._progress,
            limits=EngineLimits.of(facts, self._settings.max_tokens),
            prompts=Prompts(facts, self._random),
            timeouts=self._timeouts,
            slowest=measure.SlowestStep(start),
            baseline=self._baseline,
            ceiling_tokens=ceiling_tokens,
        )

    async def _run_all(self, session: ProbeSession, names: Sequence[StepName]) -> list[ProbeStep]:
        found: list[ProbeStep] = []
        failed = ""
        for name in names:
            if failed:
                step = ProbeStep(name, "skipped", 0.0, reason=f"not run, because {failed} failed")
            else:
                step = await self._run_one(session, name)
                failed = name if step.outcome == "failed" else ""
            if name == "first_token":
                session.slowest.first_token_ended(self._engine.ranks())
            self._progress.step_finished(step)
            found.append(step)
        return found

    async def _run_one(self, session: ProbeSession, name: StepName) -> ProbeStep:
        if reason := reason_to_skip(name, session.facts):
            return ProbeStep(name, "skipped", 0.0, reason=reason)
        if session.budget.seconds_left() <= 0:
            return ProbeStep(name, "skipped", 0.0, limited=True, reason="no time was left")
        session.step = name
        started = self._clock()
        try:
            result = await STEPS[name](session)
        except ProbeTooSlowError as error:
            # The first request has no smaller size: without it nothing would be proven.
            is_limit = name != "first_token"
            outcome: Outcome = "skipped" if is_limit else "failed"
            reason = f"{session.attempt}: {error.cause}"
            seconds = self._clock() - started
            return ProbeStep(name, outcome, seconds, limited=is_limit, reason=reason)
        except HoldfastError as error:
            reason = await self._explain(session, error.cause)
            return ProbeStep(name, "failed", self._clock() - started, reason=reason)
        return ProbeStep(
            name,
            "skipped" if result.is_skipped else "passed",
            self._clock() - started,
            tokens=result.tokens,
            limited=result.limited,
            reason=result.reason,
        )

    async def _explain(self, session: ProbeSession, cause: str) -> str:
        """Name step, size and cause, with what the engine says about its death and workspaces."""
        parts = [f"{session.step} failed at {session.attempt}: {cause}"]
        if "the engine died" not in cause:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.death_seconds):
                    parts.append(f"The engine died: {await self._engine.until_dead()}.")
        parts.append(measure.rank_errors(self._engine.ranks()))
        return " ".join(filter(None, parts))

    async def _forget_prefixes(self, session: ProbeSession) -> str:
        """Empty the prefix cache; return why it was not emptied, or an empty string.

        A request that ran out of time may still have a step to end.
        """
        seconds = max(self._timeouts.cleanup_seconds, session.steps_seconds(CLEANUP_STEPS))
        try:
            async with asyncio.timeout(seconds):
                await self._engine.reset_prefix_cache()
        except TimeoutError:
            return "the prefix cache was not emptied in time"
        except HoldfastError as error:
            return f"the prefix cache was not emptied: {error}"
        return ""


def _proven_tokens(steps: Sequence[ProbeStep]) -> int:
    """Return the longest context that was served whole."""
    about_context = ("context_sweep", "full_context")
    return max((s.tokens for s in steps if s.name in about_context), default=0)
