"""What the text of a flag, a variable or a file means."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.settings.flag import (
    boolean,
    count,
    directory_or_none,
    file_path,
    headroom_fraction,
    memory_marks,
    positive_count,
    positive_seconds,
    positive_size_bytes,
    seconds,
    size_bytes,
    token_count,
)

NO_NUMBERS = ("", " ", "-1", "nan", "inf", "-inf", "1_0", "0x10", "٣", "½", "1e400", "ten", "1\0")


NUMERIC = (
    size_bytes,
    positive_size_bytes,
    positive_count,
    headroom_fraction,
    positive_seconds,
    seconds,
    token_count,
)


@pytest.mark.parametrize("parse", NUMERIC)
@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_plain_number_is_refused(parse: Callable[[str], object], text: str) -> None:
    """Neither NaN, infinity, negative numbers, digits of other scripts nor Python's own forms."""
    with pytest.raises(ValueError, match="expected a"):
        parse(text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (size_bytes, "1PiB"),
        (size_bytes, "1024TiB"),
        (size_bytes, "9" * 5000),
        (size_bytes, "1.MiB"),
        (size_bytes, "64 M iB"),
        (headroom_fraction, "10.001"),
        (positive_size_bytes, "0"),
        (positive_count, "0"),
        (positive_seconds, "0"),
        (positive_seconds, "31536000"),
        (seconds, "31536000"),
        (token_count, "1"),
        (token_count, "2.0"),
        (token_count, "9999999999"),
        (token_count, "9" * 5000),
        (directory_or_none, ""),
        (directory_or_none, "a\0b"),
        (directory_or_none, "~nobody-of-that-name/x"),
        (file_path, ""),
        (file_path, "a\0b"),
        (file_path, "~nobody-of-that-name/x"),
        (boolean, "maybe"),
        (memory_marks, "4GiB"),
        (memory_marks, "4GiB,2GiB,1GiB,0"),
        (memory_marks, "1GiB,2GiB,3GiB"),
        (memory_marks, "4GiB,,1GiB"),
    ],
)
def test_what_is_out_of_range_is_refused(parse: Callable[[str], object], text: str) -> None:
    """With a ValueError that says what was expected, however huge the value."""
    with pytest.raises(ValueError, match="expected"):
        parse(text)


@pytest.mark.parametrize(("parse", "least"), [(count, 0), (positive_count, 1)])
def test_the_limits_of_a_count_are_told(parse: Callable[[str], int], least: int) -> None:
    """Whichever is exceeded, what is allowed is in the sentence."""
    assert (parse(str(least)), parse("999999")) == (least, 999_999)
    for text in (str(least - 1), "1000000"):
        with pytest.raises(ValueError, match=f"^expected a number from {least} to 999999$"):
            parse(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        (" 1.5GiB ", 3 << 29),
        ("2kB", 2000),
        ("3B", 3),
        ("1023TiB", 1023 << 40),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, size: int) -> None:
    """Binary and decimal units, in any case, with a space or without."""
    assert size_bytes(text) == size


@given(st.integers(0, (1 << 50) - 1))
@example(9_007_199_254_740_993 >> 4)
def test_no_byte_of_a_size_is_lost(size: int) -> None:
    """A plain number of bytes comes back exactly."""
    assert size_bytes(str(size)) == size
    assert size_bytes(f"{size}B") == size


@given(st.integers(0, (1 << 30) - 1), st.sampled_from(["KiB", "MiB", "kB", "MB"]))
def test_units_multiply(number: int, unit: str) -> None:
    """`N unit` is N times one unit, or beyond what is allowed."""
    one = size_bytes(f"1{unit}")
    if number * one < 1 << 50:
        assert size_bytes(f"{number}{unit}") == number * one


@given(st.floats(0, 10))
def test_a_fraction_comes_back(value: float) -> None:
    """Every fraction in range is read as Python writes it."""
    assert headroom_fraction(repr(value)) == value


@given(st.floats(0, 31_535_999))
def test_seconds_come_back(value: float) -> None:
    """Every time in range is read as Python writes it."""
    assert seconds(repr(value)) == value


@given(st.integers(2, (1 << 31) - 1))
def test_a_count_comes_back(value: int) -> None:
    """Every count in range."""
    assert token_count(str(value)) == value
