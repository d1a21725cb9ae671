"""The depth of JSON that streams by is that which a parser finds, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.api.json_depth import JsonDepth

MOST = 5
NASTY = st.text(alphabet='[]{}"\\\n/u0aé\u2028', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | NASTY,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NASTY, inner, max_size=4),
    max_leaves=30,
)


def depth_of(value: Any) -> int:
    """How many levels of arrays and objects it has."""
    inner = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def is_too_deep(body: bytes, cuts: list[int], most: int = MOST) -> bool:
    """What is found of a body that comes in pieces of these sizes, over and over."""
    found, depth, at, piece = False, JsonDepth(most), 0, 0
    while at < len(body):
        size = cuts[piece % len(cuts)]
        found = found or depth.is_too_deep_with(body[at : at + size])
        at, piece = at + size, piece + 1
    return found


@given(VALUES, st.lists(st.integers(1, 9), min_size=1), st.booleans())
@example(["\\", [[[[['"[']]]]]], [1], False)
@example('\\"[[[[[[[[[', [3], True)
def test_the_depth_is_that_of_the_value(value: Any, cuts: list[int], is_ascii: bool) -> None:
    """Brackets in strings, escapes and cuts anywhere change nothing."""
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert is_too_deep(body, cuts) == (depth_of(value) > MOST)


@pytest.mark.parametrize("opener", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("cut", [1, 7, 1000, 10**6])
def test_a_hundred_thousand_levels_are_too_deep(opener: bytes, cut: int) -> None:
    """Also when nothing is ever closed."""
    assert is_too_deep(opener * 100_000, [cut], most=128)


def test_a_limit_is_the_deepest_that_is_allowed() -> None:
    """One level more is refused."""
    assert not is_too_deep(b"[" * 128 + b"]" * 128, [50], most=128)
    assert is_too_deep(b"[" * 129 + b"]" * 129, [50], most=128)


def test_many_brackets_side_by_side_are_not_deep() -> None:
    """It is not their number that counts."""
    assert not is_too_deep(json.dumps([{"a": ["b"]}] * 10_000).encode(), [999])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("cut", [1, 3, 100])
def test_another_encoding_is_seen(encoding: str, cut: int) -> None:
    """Python would parse it, but its brackets cannot be counted as bytes."""
    body, depth = '{"a": 1}'.encode(encoding), JsonDepth(MOST)
    for at in range(0, len(body), cut):
        depth.is_too_deep_with(body[at : at + cut])
    assert not depth.is_utf8


@pytest.mark.parametrize("body", [b"", b"1", b'\xef\xbb\xbf{"a": "\xc3\xa9"}', b"[]"])
def test_utf8_is_utf8(body: bytes) -> None:
    """Also with a mark at its beginning, and when it is short."""
    depth = JsonDepth(MOST)
    depth.is_too_deep_with(body)
    assert depth.is_utf8
