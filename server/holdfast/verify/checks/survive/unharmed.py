"""Did the checks leave Holdfast's engine as it was? No answer shows the death of an engine that was
replaced in time, or the growth of a workspace.
"""

from __future__ import annotations

from holdfast.verify.check import EVERY, Check
from holdfast.verify.course import course_of, deaths_in, restarts_in, since_the_first
from holdfast.verify.records import equal_to
from holdfast.verify.survey import ask_facts
from holdfast.verify.trial import InconclusiveError, Trial

_MIB = 1 << 20


async def unharmed(trial: Trial) -> None:
    """Compare what Holdfast says of itself with what it said before the first check."""
    before, now = trial.server.holdfast, await ask_facts(trial.target)
    if before is None or now is None:
        raise InconclusiveError("Holdfast did not report its status after the checks")
    course = await course_of(trial)
    told = [before, *course.told, now]
    *_, growths = since_the_first(told, "growths")
    *_, rejections = since_the_first(told, "rejections")
    if (restarts := restarts_in(told)) is not None:
        trial.measure("restarts of the server", restarts, limit=equal_to(0))
    trial.measure("growths", growths, limit=equal_to(0))
    trial.measure("rejections", rejections, limit=equal_to(0))
    if before.memory_bytes is not None and now.memory_bytes is not None:
        trial.measure("memory before the checks", before.memory_bytes / _MIB, "MiB")
        trial.measure("memory after the checks", now.memory_bytes / _MIB, "MiB")
    if before.deaths is None or now.deaths is None:
        raise InconclusiveError("the server's /metrics does not report how many engines have died")
    trial.measure("engines that died", deaths_in(told) - course.killed, limit=equal_to(0))


CHECKS = (
    Check(
        "unharmed",
        "survive",
        unharmed,
        "While the checks ran, no engine died except those they killed, and no workspace grew.",
        profiles=EVERY,
        needs=("holdfast",),
    ),
)
