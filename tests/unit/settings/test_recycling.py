"""The limits of a planned restart are read as people write them."""

from __future__ import annotations

import pytest

from holdfast.settings.recycling import RecycleLimits, recycle_limits


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("none", RecycleLimits()),
        ("24h", RecycleLimits(age_seconds=86_400)),
        ("1.5 d", RecycleLimits(age_seconds=129_600)),
        ("90m", RecycleLimits(age_seconds=5400)),
        ("60s", RecycleLimits(age_seconds=60)),
        ("8GiB", RecycleLimits(host_memory_bytes=8 << 30)),
        ("1.5GB", RecycleLimits(host_memory_bytes=1_500_000_000)),
        ("100000requests", RecycleLimits(requests=100_000)),
        ("1 Request", RecycleLimits(requests=1)),
        ("8GiB, 24h,7requests", RecycleLimits(86_400, 8 << 30, 7)),
    ],
)
def test_each_limit_has_its_unit(text: str, limits: RecycleLimits) -> None:
    """Age, memory and requests, in any order, at most one of each."""
    assert recycle_limits(text) == limits
    assert limits.are_set == (text != "none")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "limits such as 24h"),
        ("24", "limits such as 24h"),
        ("24h,", "limits such as 24h"),
        ("24h;8GiB", "a size such as 64MiB"),
        ("-1h", "limits such as 24h"),
        ("none,24h", "limits such as 24h"),
        ("59s", "a minute or more"),
        ("400d", "less than a year"),
        ("0requests", "a number of requests above 0"),
        ("0b", "a size above 0"),
        ("8MB,8GB", "each kind of limit once"),
        ("24h,1d", "each kind of limit once"),
        ("1request,2requests", "each kind of limit once"),
    ],
)
def test_what_is_not_a_limit_is_refused(text: str, expected: str) -> None:
    """The error says what was expected."""
    with pytest.raises(ValueError, match=f"^expected .*{expected}"):
        recycle_limits(text)


def test_limits_are_brought_forward_by_a_share() -> None:
    """Age and requests come earlier; the memory that is held says when by itself."""
    limits = RecycleLimits(age_seconds=1000.0, host_memory_bytes=1 << 30, requests=100)
    assert limits.brought_forward(0.1) == RecycleLimits(900.0, 1 << 30, 90)
    assert RecycleLimits(requests=3).brought_forward(0.1) == RecycleLimits(requests=3)
    assert RecycleLimits().brought_forward(0.1) == RecycleLimits()
