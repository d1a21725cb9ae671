"""How long a soak lasts, and in which pieces: `--hours`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import UsageError
from holdfast.verify.records import Profile

DEFAULT_HOURS = 6.0
LEAST_HOURS = 0.01
MOST_HOURS = 168.0
_HOUR_SECONDS = 3600.0
_LEAST_INTERVALS = 6
_SAMPLES = 240
_LEAST_SPACING_SECONDS = 1.0
_CLIENTS = 8
_SEED = 1


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """A soak as it is asked for."""

    seconds: float = DEFAULT_HOURS * _HOUR_SECONDS
    clients: int = _CLIENTS
    """How many requests are under way at a time."""
    seed: int = _SEED
    """What the requests are drawn from."""
    clock: Callable[[], float] = time.monotonic
    """Seconds since any moment; every time of a soak is read from it."""

    @property
    def interval_ends_seconds(self) -> tuple[float, ...]:
        """When the load pauses for another look at the answers.

        An interval lasts an hour at most. Their number divides by three, so that a third of the
        soak ends with one.
        """
        hours = math.ceil(self.seconds / _HOUR_SECONDS)
        count = max(_LEAST_INTERVALS, 3 * math.ceil(hours / 3))
        return tuple(self.seconds * (number + 1) / count for number in range(count))

    @property
    def spacing_seconds(self) -> float:
        """How long after a sample of the server's memory the next one is taken."""
        return max(self.seconds / _SAMPLES, _LEAST_SPACING_SECONDS)


def plan_of(hours: float | None, profile: Profile) -> SoakPlan | None:
    """The plan of a run; None in a profile without a soak.

    Raises:
        UsageError: the hours are out of bounds, or the profile has no soak.
    """
    if profile != "soak":
        if hours is not None:
            raise UsageError(
                f"--hours: the profile {profile} has no soak.",
                remedy="add --profile soak, or leave --hours out.",
            )
        return None
    asked = DEFAULT_HOURS if hours is None else hours
    if not LEAST_HOURS <= asked <= MOST_HOURS:  # NaN is not between them
        raise UsageError(
            f"--hours: {asked:g} is not from {LEAST_HOURS:g} to {MOST_HOURS:g}.",
            remedy="give a number of hours within these bounds, such as 0.5 or 6.",
        )
    return SoakPlan(seconds=asked * _HOUR_SECONDS)
