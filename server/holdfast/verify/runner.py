"""Runs the checks one after the other, and judges the result. No check can end the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from holdfast.verify.answers import MalformedError, excerpt, quoted
from holdfast.verify.check import Check, deadline_seconds_of, lack_of
from holdfast.verify.interruption import unless
from holdfast.verify.options import Options
from holdfast.verify.records import CheckResult, CheckStatus, Fault, Profile, Server, Verdict
from holdfast.verify.redaction import redacted
from holdfast.verify.survey import Reach, reach_of
from holdfast.verify.target import PATIENT_SECONDS, NoAnswerError, Target
from holdfast.verify.trial import (
    InconclusiveError,
    SkippedError,
    Trial,
    UnexpectedStatusError,
    fault_of,
)
from holdfast.verify.waiting import LIMITED_REMEDY, UNAVAILABLE, why_refused

INTERRUPTED = "the run was interrupted"
_OBSTACLES = {
    Reach.LIMITED: (
        "the server let no request in for ten minutes, or asks to wait longer (429), after {}; a "
        "gateway may say so for a server that is dead: see whether it still runs, or "
        + LIMITED_REMEDY
    ),
    Reach.LOST: "the server stopped answering after {}",
}
"""Why no check is made after one that met this."""


class View(Protocol):
    """Shows what happens."""

    def begun(self, check: Check) -> None:
        """A check has begun."""

    def ended(self, result: CheckResult) -> None:
        """A check is over, or was not run."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all checks of a run share."""

    target: Target
    server: Server
    profile: Profile
    interrupted: asyncio.Event
    """Set once the user wants the run to end."""
    options: Options = field(default_factory=Options)
    measured: dict[Any, Any] = field(default_factory=dict)
    """What `Trial.once` has measured, by the function that did."""


async def run(checks: Sequence[Check], context: RunContext, view: View) -> tuple[CheckResult, ...]:
    """The result of each check, in their order; those that were not made are skipped."""
    results = []
    obstacle = ""
    for check in checks:
        view.begun(check)
        not_made = _not_made(check, context, obstacle)
        made = _as_asked(check, not_made or await _made(check, context), context.options)
        # Only a check that asked for something and ended without a verdict may have met the end of
        # the server, which takes minutes to tell; the result of any other stands.
        has_asked = not_made is None and not check.is_afterthought
        is_open = has_asked and made.status is CheckStatus.INCONCLUSIVE
        result = redacted(made, context.target.secrets)
        if not is_open:
            view.ended(result)
        reach = Reach.ANSWERED if obstacle else await _reach_after(made, context)
        if reach is not Reach.ANSWERED:
            obstacle = _OBSTACLES[reach].format(check.full_name)
        if reach is Reach.LOST and is_open:
            result = _with_loss(result)
        if context.interrupted.is_set():
            obstacle = obstacle or INTERRUPTED
        if is_open:
            view.ended(result)
        results.append(result)
    return tuple(results)


def judge(results: Sequence[CheckResult], *, is_interrupted: bool) -> tuple[Verdict, str]:
    """The verdict, and why."""
    named: dict[CheckStatus, list[str]] = {status: [] for status in CheckStatus}
    for result in results:
        named[result.status].append(f"{result.group}.{result.name}")
    if failed := named[CheckStatus.FAILED]:
        return Verdict.FAILED, f"failed: {', '.join(failed)}"
    if is_interrupted:
        return Verdict.INCONCLUSIVE, INTERRUPTED
    if unjudged := named[CheckStatus.INCONCLUSIVE]:
        return Verdict.INCONCLUSIVE, f"inconclusive: {', '.join(unjudged)}"
    if not (named[CheckStatus.PASSED] or named[CheckStatus.WARNED]):
        return Verdict.INCONCLUSIVE, "every check was skipped"
    if warned := named[CheckStatus.WARNED]:
        return Verdict.PASSED, f"no check failed; warned: {', '.join(warned)}"
    return Verdict.PASSED, "every check that ran passed"


def _not_made(check: Check, context: RunContext, obstacle: str) -> CheckResult | None:
    """Return the result of a check that cannot run."""
    skipped = _result(check, CheckStatus.SKIPPED)
    if obstacle and not check.is_afterthought:
        return replace(skipped, reason=obstacle)
    if lack := lack_of(check, context.server):
        return replace(skipped, reason=lack.what, remedy=lack.remedy)
    return None


def _as_asked(check: Check, made: CheckResult, options: Options) -> CheckResult:
    """The result, which is not "skipped" where a flag asks for the check: exit 0 would hide it."""
    if made.status is CheckStatus.SKIPPED and check.asked_for(options):
        return replace(made, status=CheckStatus.INCONCLUSIVE)
    return made


async def _made(check: Check, context: RunContext) -> CheckResult:
    """The result of a check that is made, until it ends or must end: its time, or the user."""
    trial = Trial(
        context.target, context.server, context.profile, context.options, context.measured
    )
    deadline_seconds = deadline_seconds_of(check, context.options)
    started_seconds = time.monotonic()
    attempt = asyncio.ensure_future(check.run(trial))
    interruption = asyncio.create_task(context.interrupted.wait())
    try:
        await asyncio.wait(
            {attempt, interruption},
            timeout=deadline_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        is_over = attempt.done()
        if not is_over:
            attempt.cancel()
        (error,) = await asyncio.gather(attempt, return_exceptions=True)
    finally:
        interruption.cancel()
        attempt.cancel()
    if not is_over:
        error = _cut_short(check, trial, context)
    noted = replace(
        _result(check, CheckStatus.PASSED),
        duration_seconds=time.monotonic() - started_seconds,
        numbers=tuple(trial.numbers),
        series=tuple(trial.series),
        faults=tuple(trial.faults),
        warnings=(*trial.warnings, *_absences(trial)),
        requests=trial.requests,
    )
    return _judged(noted, error)


def _absences(trial: Trial) -> tuple[Fault, ...]:
    """A warning if the server was away, which nobody sees in the answers that came later."""
    count = trial.refusals[UNAVAILABLE]
    said = f"requests that the server refused for now, with 503 and Retry-After: {count}"
    return (fault_of(said),) if count else ()


def _cut_short(check: Check, trial: Trial, context: RunContext) -> Exception:
    """What ended a check that did not end by itself."""
    if context.interrupted.is_set():
        return InconclusiveError(INTERRUPTED)
    said = f"it took more than {deadline_seconds_of(check, context.options):.0f} s"
    if trial.refusals:
        status, _ = trial.refusals.most_common(1)[0]
        return InconclusiveError(f"{said}: {why_refused(status)}")
    # A slow server is not at fault: each request has a deadline of its own.
    if check.is_asked_elsewhere:
        unknown = "whether the server answered the other program is not known"
        return InconclusiveError(f"{said}, and {unknown}")
    if time.monotonic() - trial.answered_at_seconds <= PATIENT_SECONDS:
        return InconclusiveError(f"{said}, though the server answered")
    return TimeoutError(said)


def _judged(noted: CheckResult, error: BaseException | None) -> CheckResult:
    """Return the result with the status that its notes and the end of the attempt give it."""
    said = quoted(str(error)) if error is not None else ""
    match error:
        case None | SkippedError() | InconclusiveError() | MalformedError():
            pass
        case NoAnswerError() | UnexpectedStatusError():
            fault = fault_of(str(error), request=error.request)
            noted = replace(noted, faults=(*noted.faults, fault))
        case TimeoutError():
            noted = replace(noted, faults=(*noted.faults, fault_of(str(error))))
        case Exception():  # a shape of an answer that the check did not think of
            said = f"unexpected {type(error).__name__}: {excerpt(str(error))}"
        case _:
            raise error
    beyond = [
        f"{n.name} is {n.value:g} {n.unit}".rstrip() + f", {n.limit.relation} {n.limit.value:g}"
        for n in noted.numbers
        if n.limit is not None and not n.is_within
    ]
    if wrong := [*(fault.what for fault in noted.faults), *beyond]:
        return replace(noted, status=CheckStatus.FAILED, reason=_sentence(wrong))
    if isinstance(error, SkippedError):
        return replace(noted, status=CheckStatus.SKIPPED, reason=said, remedy=error.remedy)
    if error is not None:
        return replace(noted, status=CheckStatus.INCONCLUSIVE, reason=said)
    if noted.warnings:
        reason = _sentence([warning.what for warning in noted.warnings])
        return replace(noted, status=CheckStatus.WARNED, reason=reason)
    return noted


async def _reach_after(made: CheckResult, context: RunContext) -> Reach:
    """What comes of a request after what may have been the end of the server.

    If the user wants no answer, there is nothing to find out.
    """
    if made.status not in (CheckStatus.FAILED, CheckStatus.INCONCLUSIVE):
        return Reach.ANSWERED
    reach = await unless(context.interrupted, reach_of(context.target, context.server))
    return Reach.ANSWERED if reach is None or context.interrupted.is_set() else reach


def _with_loss(made: CheckResult) -> CheckResult:
    """The result, failed: a check that ended without a verdict is the last that the server met."""
    fault = fault_of(f"the server stopped answering; before that, {made.reason}")
    faults = (*made.faults, fault)
    return replace(made, status=CheckStatus.FAILED, faults=faults, reason=fault.what, remedy="")


def _result(check: Check, status: CheckStatus) -> CheckResult:
    return CheckResult(check.name, check.group, check.proves, status)


def _sentence(wrong: Sequence[str]) -> str:
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}"
