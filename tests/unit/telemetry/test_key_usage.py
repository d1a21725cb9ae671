"""What keys have used is counted by name, since the start and for each day."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from holdfast.telemetry.key_usage import DAY_SECONDS, MAX_NAMES, OTHER, KeyUsage, Used
from stub_engine import FakeClock


class Names(tuple[str, ...]):
    """Names of keys that count how often they are gone through."""

    __slots__ = ()
    readings: ClassVar[int] = 0

    def __iter__(self) -> Iterator[str]:
        Names.readings += 1
        return super().__iter__()


def test_each_key_has_its_own_counts() -> None:
    """What one uses is not counted for another."""
    usage = KeyUsage()
    usage.count("alice", requests=1, prompt_tokens=5, output_tokens=7)
    usage.count("alice", output_tokens=1)
    usage.count("bob", requests=1)
    assert usage.totals() == {"alice": Used(1, 5, 8), "bob": Used(1, 0, 0)}
    assert usage.tokens_today("alice") == 13
    assert usage.tokens_today("nobody") == 0


def test_a_valid_key_has_counts_before_it_is_used() -> None:
    """An alert sees no increase in a series that begins at 1."""
    assert KeyUsage(lambda: ("alice",)).totals() == {"alice": Used()}


def test_names_beyond_the_bound_are_counted_together() -> None:
    """However many keys there are, and however often they change."""
    usage = KeyUsage(lambda: tuple(f"key {number}" for number in range(MAX_NAMES - 1)))
    usage.totals()
    for name in ("first", "second", "third"):
        usage.count(name, requests=1)
    totals = usage.totals()
    assert len(totals) == MAX_NAMES + 1
    assert totals["first"].requests == 1
    assert totals[OTHER].requests == 2
    assert usage.days()[usage.day]["third"].requests == 1


def test_a_removed_key_leaves_its_place_to_a_valid_one() -> None:
    """Only when there is no other, and a name that comes back begins at 0."""
    valid = [f"key {number}" for number in range(MAX_NAMES)]
    usage = KeyUsage(lambda: tuple(valid))
    usage.totals()
    usage.count("key 0", requests=5)
    usage.count("new", requests=1)
    assert usage.totals()[OTHER].requests == 1
    valid[0:2] = ["new"]
    totals = usage.totals()
    assert ("key 0" in totals, totals["key 1"], totals["new"]) == (False, Used(), Used())
    usage.count("new", requests=2)
    usage.count("key 0", requests=1)
    totals = usage.totals()
    assert (totals["new"].requests, totals[OTHER].requests) == (2, 2)
    valid[0] = "key 0"
    assert usage.totals()["key 0"] == Used()
    assert len(usage.totals()) == MAX_NAMES + 1


def test_a_new_key_needs_no_scrape_to_take_the_place_of_a_removed_one() -> None:
    """Its first requests would count as `other`, and an alert on its name would miss them."""
    valid = [f"key {number}" for number in range(MAX_NAMES)]
    usage = KeyUsage(lambda: tuple(valid))
    for name in valid:
        usage.count(name, requests=1)
    usage.count("removed", requests=1)
    valid[:3] = ["new", "newer"]
    for name in ("removed", "key 0", "new", "newer", "key 2"):
        usage.count(name, requests=1)
    totals = usage.totals()
    assert (totals["new"].requests, totals["newer"].requests) == (1, 1)
    assert (totals["key 2"].requests, totals[OTHER].requests) == (2, 3)
    assert len(totals) == MAX_NAMES + 1


def test_names_beyond_the_bound_do_not_slow_down_what_is_counted() -> None:
    """The names are gone through once after each change of the keys, not with each token."""
    names = Names(f"key {number}" for number in range(MAX_NAMES + 2))
    usage = KeyUsage(lambda: names)
    usage.totals()
    readings = Names.readings
    for _ in range(10):
        usage.count(f"key {MAX_NAMES + 1}", output_tokens=1)
    assert Names.readings == readings
    assert usage.totals()[OTHER].output_tokens == 10


def test_a_new_day_begins_with_nothing() -> None:
    """The day before is kept for its file, and no other."""
    clock = FakeClock()
    clock.now_seconds = 10 * DAY_SECONDS - 5.0
    usage = KeyUsage(clock=clock)
    assert (usage.day, usage.day_seconds_left) == (9, 5.0)
    usage.count("alice", prompt_tokens=3)
    for day in (10, 11):
        clock.now_seconds = day * DAY_SECONDS
        assert usage.tokens_today("alice") == 0
        usage.count("alice", prompt_tokens=day)
        assert usage.tokens_today("alice") == day
    assert {day: used["alice"].prompt_tokens for day, used in usage.days().items()} == {
        10: 10,
        11: 11,
    }
    assert usage.totals()["alice"].prompt_tokens == 24


def test_a_clock_that_is_set_back_still_counts() -> None:
    """A day that was counted before goes on, and an earlier one is counted too."""
    clock = FakeClock()
    usage = KeyUsage(clock=clock)
    for day in (20, 21, 20, 5, 5):
        clock.now_seconds = day * DAY_SECONDS + 1.0
        usage.count("alice", output_tokens=2)
    assert usage.tokens_today("alice") == 4


def test_what_was_counted_before_goes_on() -> None:
    """For the limit of the day; what was used since the start is what it was."""
    usage = KeyUsage()
    usage.restore(usage.day, {"alice": Used(1, 2, 3)})
    usage.count("alice", requests=1, output_tokens=1)
    assert usage.days()[usage.day] == {"alice": Used(2, 2, 4)}
    assert usage.totals() == {"alice": Used(1, 0, 1)}
