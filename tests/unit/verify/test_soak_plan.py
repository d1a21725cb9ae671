"""`--hours`: how long a soak lasts, and in which pieces."""

from __future__ import annotations

import pytest

from holdfast.errors import UsageError
from holdfast.verify.check import ONLY_SOAK, Check, deadline_seconds_of
from holdfast.verify.checks import ALL
from holdfast.verify.options import Options
from holdfast.verify.soak_plan import SoakPlan, plan_of
from holdfast.verify.trial import Trial

HOUR = 3600.0


@pytest.mark.parametrize(("hours", "seconds"), [(None, 6 * HOUR), (0.5, HOUR / 2), (24, 24 * HOUR)])
def test_a_soak_lasts_as_long_as_it_is_asked_to(hours: float | None, seconds: float) -> None:
    """Six hours, if nothing is said; a part of an hour will do."""
    plan = plan_of(hours, "soak")
    assert plan is not None
    assert plan.seconds == seconds


@pytest.mark.parametrize("hours", [-1.0, 0.0, 0.009, 169.0, float("nan"), float("inf")])
def test_hours_have_bounds(hours: float) -> None:
    """The error names them."""
    with pytest.raises(UsageError, match=r"is not from 0\.01 to 168") as caught:
        plan_of(hours, "soak")
    assert "hours within these bounds" in caught.value.remedy


def test_hours_of_another_profile_are_refused() -> None:
    """The error says what to add, or to leave out."""
    assert plan_of(None, "full") is None
    with pytest.raises(UsageError, match="the profile full has no soak") as caught:
        plan_of(6, "full")
    assert "add --profile soak" in caught.value.remedy


@pytest.mark.parametrize("hours", [0.01, 0.3, 1, 5.5, 6, 7, 100, 168])
def test_the_load_pauses_every_hour_at_least(hours: float) -> None:
    """And at the end of each third."""
    seconds = hours * HOUR
    ends = SoakPlan(seconds).interval_ends_seconds
    starts = (0.0, *ends)
    assert max(end - start for start, end in zip(starts, ends, strict=False)) <= HOUR + 1e-6
    assert [ends[len(ends) * third // 3 - 1] for third in (1, 2, 3)] == pytest.approx(
        [seconds / 3, 2 * seconds / 3, seconds]
    )


def test_the_deadline_follows_the_hours() -> None:
    """Of the check that soaks; every other one has its own."""

    async def nothing(_trial: Trial) -> None: ...

    options = Options(soak=SoakPlan(seconds=10 * HOUR))
    long = Check("long", "soak", nothing, "It is long.", deadline_seconds=60, is_soak=True)
    short = Check("short", "soak", nothing, "It is short.", deadline_seconds=60)
    assert deadline_seconds_of(long, options) == 10 * HOUR + 60
    assert deadline_seconds_of(short, options) == 60


def test_the_profile_soak_has_the_checks_of_quick_first() -> None:
    """Then those of the group, and no others."""
    chosen = [check for check in ALL if "soak" in check.profiles]
    quick = [check for check in ALL if "quick" in check.profiles]
    assert chosen[: len(quick)] == quick
    assert {check.profiles for check in chosen[len(quick) :]} == {ONLY_SOAK}
    assert {check.group for check in chosen[len(quick) :]} == {"soak"}
