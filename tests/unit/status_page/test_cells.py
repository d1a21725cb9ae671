"""A value of a document as text, whatever it is."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast.status_page.cells import (
    age,
    age_until,
    bar,
    finite,
    in_order,
    number_of,
    percent,
    plain,
    size_of,
    sum_of,
)

NO_NUMBERS = (None, "7", [7], math.nan, math.inf, 10**400, -(10**4200))


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_is_not_a_number_of_a_server_is_unknown(value: object) -> None:
    """It is neither shown nor counted."""
    assert finite(value) is None
    assert (number_of(value), size_of(value), percent(value)) == ("?", "?", "")
    assert (bar(value, 1).plain, bar(1, value).plain) == ("", "")
    assert sum_of({"one": value, "other": 2}) == 2


@pytest.mark.parametrize(
    ("size", "said"), [(0, "0 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 50, "1024.0 TiB")]
)
def test_a_size_is_in_the_unit_that_people_read(size: int, said: str) -> None:
    """IEC's."""
    assert size_of(size) == said


@pytest.mark.parametrize(("part", "cells"), [(-1, 0), (0, 0), (0.5, 10), (1, 20), (9, 20)])
def test_a_bar_is_never_longer_than_its_whole(part: float, cells: int) -> None:
    """Nor shorter than nothing."""
    assert bar(part, 1).plain == "#" * cells + "." * (20 - cells)


def test_a_text_has_nothing_that_a_terminal_interprets() -> None:
    """And an end."""
    assert plain("a\x1b[2J\nb") == "a [2J b"
    assert (plain(None), plain(7), len(plain("x" * 5000))) == ("", "7", 1000)


def test_names_are_in_the_order_of_their_numbers() -> None:
    """A name with more digits than Python converts is a text."""
    names = ["0/10", "0/2", "9" * 5000, "other"]
    document: dict[str, Any] = {"ranks": {name: {} for name in names} | {"0/1": "not a map"}}
    found = [name for name, _ in in_order(document, "ranks")]
    assert found.index("0/2") < found.index("0/10")
    assert set(found) == set(names)


@pytest.mark.parametrize("time", [None, "soon", 7, "9" * 5000])
def test_a_time_that_is_none_has_no_age(time: object) -> None:
    """Nor is it awaited."""
    assert (age(time, 0.0), age_until(time, 0.0)) == ("", "")


def test_an_age_is_counted_in_its_largest_units() -> None:
    """To the second for an hour."""
    ages = [age("1970-01-01T00:00:00+00:00", now) for now in (59.9, 61.0, 7260.0)]
    assert ages == ["59 s", "1 min 1 s", "2 h 1 min"]
    assert age_until("1970-01-01T00:00:10+00:00", 4.0) == "6 s"
    assert age_until("1970-01-01T00:00:10+00:00", 10.0) == ""
