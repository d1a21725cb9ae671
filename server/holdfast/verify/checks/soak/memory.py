"""Does the server's memory grow under a steady load?

A line is fitted to the samples after the warm-up, by least squares. Each engine has a height of its
own, since a new one begins with less memory, and all share the slope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.verify.check import ONLY_SOAK, Check
from holdfast.verify.checks.soak.history import history_of
from holdfast.verify.records import Limit, at_most
from holdfast.verify.trial import InconclusiveError, SkippedError, Trial

_HOUR_SECONDS = 3600.0
_MIB = 1 << 20
_MOST_MIB_AN_HOUR = 1.0
_MOST_MIB_AN_HOUR_OF_LESS = 64.0
"""The limit for what is shorter than an hour: allocators take several MiB at once, so a slower leak
does not show, and the check never passes."""
_LEAST_JUDGED_HOURS = 1.0
_WARM_UP_HOURS = 1.0
_WARM_UP_SHARE = 1 / 3
"""The share of a soak of less than three hours."""
_LEAST_FITTED_HOURS = 0.1
_LEAST_SAMPLES = 10


@dataclass(frozen=True, slots=True)
class Held:
    """What the server's processes held at one moment."""

    hours: float
    """Since the soak began."""
    mib: float
    generation: int
    """The generation of the engine."""


async def memory(trial: Trial) -> None:
    """Fit a line to the samples after the warm-up."""
    told = [
        Held(at_seconds / _HOUR_SECONDS, held_bytes / _MIB, generation)
        for at_seconds, held_bytes, generation in (await history_of(trial)).memory
    ]
    if not told:
        raise SkippedError(
            "the server does not report how much memory it has",
            "serve the model with Holdfast, or have /metrics report process_resident_memory_bytes",
        )
    warm = after_warm_up(told)
    hours = fitted_hours(told)
    trial.measure("memory at the beginning", told[0].mib, "MiB")
    trial.measure("memory after the warm-up", warm[0].mib, "MiB")
    trial.measure("memory at the end", told[-1].mib, "MiB")
    trial.measure("time after the warm-up", hours, "h")
    trial.draw("memory", "time [h]", "memory [MiB]", ((one.hours, one.mib) for one in told))
    if hours < _LEAST_FITTED_HOURS or len(warm) < _LEAST_SAMPLES:
        raise InconclusiveError(
            f"{60 * hours:.1f} minutes of samples after the warm-up are too few for a "
            f"slope, which needs {60 * _LEAST_FITTED_HOURS:.0f}; raise --hours"
        )
    trial.measure("slope of the memory", slope_of(warm), "MiB/h", limit_of(hours))
    if hours < _LEAST_JUDGED_HOURS:
        trial.warn(
            f"{60 * hours:.0f} minutes after the warm-up show only fast leaks: a slope of "
            f"{_MOST_MIB_AN_HOUR:g} MiB/h takes an hour; give --hours 1.5 or more"
        )


def after_warm_up(told: Sequence[Held]) -> Sequence[Held]:
    """The samples after the first hour, or after the first third of a shorter soak."""
    return [one for one in told if one.hours >= _warm_up_hours(told)]


def fitted_hours(told: Sequence[Held]) -> float:
    """How long the server was watched after its warm-up.

    The first sample comes later by up to their spacing, which is not to decide what the limit is.
    It comes much later if the server reported nothing for a while.
    """
    spacing_hours = (told[-1].hours - told[0].hours) / max(1, len(told) - 1)
    ends, begins = _warm_up_hours(told), after_warm_up(told)[0].hours
    return told[-1].hours - (ends if begins - ends <= 2 * spacing_hours else begins)


def _warm_up_hours(told: Sequence[Held]) -> float:
    return min(_WARM_UP_HOURS, _WARM_UP_SHARE * told[-1].hours)


def limit_of(hours: float) -> Limit:
    """How fast memory may grow, which depends on how long it was watched."""
    is_judged = hours >= _LEAST_JUDGED_HOURS
    return at_most(_MOST_MIB_AN_HOUR if is_judged else _MOST_MIB_AN_HOUR_OF_LESS)


def slope_of(samples: Sequence[Held]) -> float:
    """The slope of the line through the samples, in MiB an hour."""
    above = below = 0.0
    for generation in {one.generation for one in samples}:
        of_one = [one for one in samples if one.generation == generation]
        middle_hours = sum(one.hours for one in of_one) / len(of_one)
        middle_mib = sum(one.mib for one in of_one) / len(of_one)
        above += sum((one.hours - middle_hours) * (one.mib - middle_mib) for one in of_one)
        below += sum((one.hours - middle_hours) ** 2 for one in of_one)
    return above / below if below else 0.0


CHECKS = (
    Check(
        "memory",
        "soak",
        memory,
        "After it has warmed up, the server's memory does not grow.",
        profiles=ONLY_SOAK,
        is_afterthought=True,
    ),
)
