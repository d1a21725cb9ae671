"""Does the next engine give the same log-probs? It is asked for, so only `full` does it."""

from __future__ import annotations

import asyncio
from functools import partial

from holdfast.verify.check import Check
from holdfast.verify.checks.self_agreement.judging import (
    base_prompt,
    judge,
    malformed_blamed,
    noise,
    reference,
)
from holdfast.verify.course import course_of
from holdfast.verify.records import HoldfastFacts
from holdfast.verify.scoring import scored
from holdfast.verify.survey import ask_facts, ask_holdfast
from holdfast.verify.trial import InconclusiveError, SkippedError, Trial

_RESTART = "/admin/restart"
_ACCEPTED = 202
_REFUSED = (401, 403, 404, 405, 409)
_SERVING = "READY"
_RESTART_SECONDS = 1800.0
_POLL_SECONDS = 0.5
_REMEDY = "give --admin-api-key-file a file with the admin key"


async def restart(trial: Trial) -> None:
    """Score a prompt before and after a restart of the engine.

    Raises:
        SkippedError: no admin key was given, or the server does not know the one that was.
    """
    # The key of the API may be an operator's by chance, and then it would restart the engine too.
    if not trial.target.has_admin_key:
        raise SkippedError("no admin key was given, so the engine is not restarted", _REMEDY)
    limits = (await noise(trial)).reordered.as_reordered
    prompt = await base_prompt(trial)
    before = await reference(trial, prompt)
    await _restart(trial)
    with malformed_blamed(trial):
        after = await scored(trial, prompt)
    judge(trial, "after a restart", [(after, before)], limits)


async def _restart(trial: Trial) -> None:
    """Have Holdfast start the next engine, and wait until it is READY.

    Raises:
        SkippedError: the key is not one of an operator.
        InconclusiveError: the next engine is not READY in time.
    """
    facts = await ask_facts(trial.target)
    asking = partial(trial.ask, _RESTART, {"reason": "holdfast verify"})
    answer = await trial.admitted(asking)
    if answer.status in _REFUSED or facts is None:
        raise SkippedError(
            f"the server does not restart its engine for this key (HTTP {answer.status})",
            _REMEDY,
        )
    (await course_of(trial)).told.append(facts)
    trial.require(answer.status == _ACCEPTED, f"POST /admin/restart got {answer.status}", answer)
    try:
        async with asyncio.timeout(_RESTART_SECONDS):
            while not _is_next(  # noqa: ASYNC110 - another process restarts it
                await ask_holdfast(trial.target), facts
            ):
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise InconclusiveError("the engine did not restart in time") from None


def _is_next(now: HoldfastFacts | None, before: HoldfastFacts) -> bool:
    return now is not None and now.generation > before.generation and now.state == _SERVING


CHECKS = (
    Check(
        "restart",
        "self",
        restart,
        "After a restart the engine gives the log-probs that it gave before.",
        profiles=("full",),
        needs=("completions", "holdfast"),
        deadline_seconds=3600.0,
    ),
)
