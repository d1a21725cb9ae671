"""Does the server say the same after a soak as before it, whichever way it computes it?"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.verify.agreement import Comparison, DifferenceLimits, compare, other_choices
from holdfast.verify.check import ONLY_SOAK, Check
from holdfast.verify.checks.soak.history import Look, SoakHistory, history_of
from holdfast.verify.records import at_most, equal_to
from holdfast.verify.trial import InconclusiveError, Trial

_MINUTE_SECONDS, _HOUR_SECONDS = 60.0, 3600.0
_AT_FIRST = 2


async def canary(trial: Trial) -> None:
    """Compare each look with the first one."""
    history = await history_of(trial)
    before, first, *later = _looks(history)
    trial.measure("looks", len(later))
    kept = [one for one in later if one.prefill and first.prefill]
    if history.limits is not None and kept:
        found = [(one, compare(one.prefill, first.prefill)) for one in kept]
        _judge(trial, "the prompt since the beginning", found, history.limits)
    if before.text != first.text:
        raise InconclusiveError("the server does not give the same greedy answer twice")
    changed = [one for one in later if one.text != first.text]
    trial.measure("answers that changed", len(changed), limit=equal_to(0))
    if changed:
        said = changed[0].broken or "a greedy answer has changed"
        trial.blame(f"{_when(changed[0])}: {said}")


async def agreement(trial: Trial) -> None:
    """Compare, in each look, what was decoded, also behind a cached prefix, with prefills."""
    history = await history_of(trial)
    if history.obstacle is not None:
        raise history.obstacle
    limits = history.limits
    looks = _looks(history)
    for one in looks:
        is_sound = not one.broken or not one.text  # without a text, it is the canary that failed
        trial.require(is_sound, f"{_when(one)}: {one.broken}")
    scored = [one for one in looks if one.decode]
    if limits is None or not scored:
        raise InconclusiveError("no look has log-probs")
    found = [(one, compare(one.decode, one.again)) for one in scored]
    _judge(trial, "decoded and prefilled", found, limits)
    behind = [(one, compare(one.cached, one.cold)) for one in scored if one.cached]
    trial.measure("looks at the prefix cache", len(behind))
    cached_limits = history.cached_limits or limits
    if behind:
        _judge(trial, "behind a prefix from the cache", behind, cached_limits)
    others = sum(
        len(other_choices(one.decode, one.again, limits))
        + len(other_choices(one.cached, one.cold, cached_limits))
        for one in scored
    )
    trial.measure("first choices that differ", others, limit=equal_to(0))


def _looks(history: SoakHistory) -> Sequence[Look]:
    """All of them: two from before the load, and those since.

    Raises:
        InconclusiveError: there is none since.
    """
    if len(history.looks) < _AT_FIRST + 1:
        raise InconclusiveError("the soak ended before it looked at the answers again")
    return history.looks


def _when(look: Look) -> str:
    return f"after {look.at_seconds / _MINUTE_SECONDS:.0f} minutes"


def _judge(
    trial: Trial, name: str, found: Sequence[tuple[Look, Comparison]], limits: DifferenceLimits
) -> None:
    """Note the worst look, and draw them all."""
    greatest = at_most(limits.greatest, "A/A")
    median = at_most(limits.median, "A/A")
    worst = max((one.greatest for _, one in found))
    trial.measure(f"{name}: greatest difference", worst, "nat", greatest)
    middle = max((one.median for _, one in found))
    trial.measure(f"{name}: median difference", middle, "nat", median)
    points = [(look.at_seconds / _HOUR_SECONDS, one.greatest) for look, one in found]
    trial.draw(name, "time [h]", "greatest difference [nat]", points, greatest)


CHECKS = (
    Check(
        "canary",
        "soak",
        canary,
        "A greedy answer and the log-probs of a prompt are the same, hour after hour.",
        profiles=ONLY_SOAK,
        is_afterthought=True,
    ),
    Check(
        "agreement",
        "soak",
        agreement,
        "Hour after hour, an answer gets the log-probs of a prefill, also behind a cached prefix.",
        profiles=ONLY_SOAK,
        is_afterthought=True,
    ),
)
