"""What a body costs: the memory that it takes, and the depth and values of its JSON."""

from __future__ import annotations

import asyncio
import json
import pickle
import weakref
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.api import body_cost
from holdfast.api.body_cost import COSTLY_VALUES, GARBAGE_BYTES, Buffers, JsonShape

MOST = 5
MANY = 4 << 20
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
    found, depth, at, piece = False, JsonShape(most, MANY), 0, 0
    while at < len(body):
        size = cuts[piece % len(cuts)]
        found = found or depth.is_too_deep_with(body[at : at + size])
        at, piece = at + size, piece + 1
    assert JsonShape(most, MANY).is_too_deep_with(body, is_whole=True) == found
    return found


@given(VALUES, st.lists(st.integers(1, 9), min_size=1), st.booleans())
@example(["\\", [[[[['"[']]]]]], [1], False)
@example('\\"[[[[[[[[[', [3], True)
def test_the_depth_is_that_of_the_value(value: Any, cuts: list[int], is_ascii: bool) -> None:
    """Brackets in strings, escapes and cuts anywhere change nothing."""
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert is_too_deep(body, cuts) == (depth_of(value) > MOST)


def deepest(body: bytes) -> int | None:
    """How deep a parser gets that looks at one byte after the other; None if it stops before."""
    depth, most, is_in_string, is_escaped = 0, 0, False, False
    for byte in map(chr, body):
        if is_escaped:
            is_escaped = False
        elif byte == "\\":
            if not is_in_string:
                return most if most > MOST else None
            is_escaped = True
        elif byte == '"':
            is_in_string = not is_in_string
        elif not is_in_string:
            depth += (byte in "[{") - (byte in "]}")
            most = max(most, depth)
    return most


@given(
    st.lists(
        st.sampled_from(["[", "]", "{", "}", '"', "\\", "a", "[[[[", '"]"', '\\"']), max_size=60
    ),
    st.lists(st.integers(1, 9), min_size=1),
)
@example(["]", "[", "[", "[", "[", "[", "[", "["], [1])
def test_whatever_bytes_come_are_followed_as_a_parser_would(
    parts: list[str], cuts: list[int]
) -> None:
    """One that looks at each byte finds the same; beyond what it stops at, anything may be said."""
    body = "".join(parts).encode()
    expected = deepest(body)
    if expected is not None:
        assert is_too_deep(body, cuts) == (expected > MOST)


@pytest.mark.parametrize("kept", [b"]", b"}", b'"]"', b'"', b"\\", b'\\"', b'"[" ', b'"]"[]'])
def test_no_body_makes_one_part_cost_what_all_of_it_would(
    kept: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen is not kept, and only brackets of a part that may be too deep are gone through.

    A body of closing brackets, with openers at its end, was gone through in one go for seconds.
    """
    gone_through = 0

    def counted(steps: Iterable[int], *, initial: int) -> Iterator[int]:
        nonlocal gone_through
        for depth in accumulate(steps, initial=initial):
            gone_through += 1
            yield depth

    monkeypatch.setattr(body_cost, "accumulate", counted)
    depth, part, at_once = JsonShape(128, MANY), kept * (4096 // len(kept)), 0
    for content in [part] * 256 + [b"[" * 129]:
        gone_through = 0
        depth.is_too_deep_with(content)
        at_once = max(at_once, gone_through)
        assert len(pickle.dumps(depth)) < 512
    assert at_once <= len(part) + 1


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
    body, depth = '{"a": 1}'.encode(encoding), JsonShape(MOST, MANY)
    for at in range(0, len(body), cut):
        depth.is_too_deep_with(body[at : at + cut])
    assert not depth.is_utf8


@pytest.mark.parametrize("body", [b"", b"1", b'\xef\xbb\xbf{"a": "\xc3\xa9"}', b"[]"])
def test_utf8_is_utf8(body: bytes) -> None:
    """Also with a mark at its beginning, and when it is short."""
    depth = JsonShape(MOST, MANY)
    depth.is_too_deep_with(body)
    assert depth.is_utf8


def values_in(body: bytes, cut: int = 32 * 1024) -> bool:
    """Whether a body that comes in parts of this size has more than a million values."""
    shape = JsonShape(128, 1_000_000)
    for at in range(0, len(body), cut):
        shape.is_too_deep_with(body[at : at + cut])
    return shape.has_too_many_values


@pytest.mark.parametrize(
    ("value", "values"),
    [
        ("1", 1),
        ("-1.5e300", 1),
        ("null", 1),
        ('"a"', COSTLY_VALUES),
        ('"\\\\\\"a"', COSTLY_VALUES),
        ("[]", COSTLY_VALUES),
        ('{"a":1}', 2 * COSTLY_VALUES),
        ('["[[[["]', 2 * COSTLY_VALUES),
    ],
)
@pytest.mark.parametrize("cut", [997, 32 * 1024, 10**9])
def test_too_many_values_of_any_kind_are_seen(value: str, values: int, cut: int) -> None:
    """Numbers are estimated, and so are commas everywhere; half of the limit is always free."""
    most = 1_000_000 // values
    assert values_in(f"[{f'{value},' * (most + most // 4)}0]".encode(), cut)
    assert not values_in(f"[{f'{value},' * (most // 2)}0]".encode(), cut)


def test_members_of_an_object_are_values() -> None:
    """Their keys are what takes a parser the longest."""
    assert values_in(json.dumps({str(at): 1 for at in range(140_000)}).encode())


def test_a_long_text_is_one_value() -> None:
    """Whatever stands in it, as a picture or a program."""
    body = json.dumps({"text": '[{"a": 1, "b": [2]}]\n' * 100_000}).encode()
    assert not values_in(body)


def test_token_ids_of_many_inputs_are_not_too_many() -> None:
    """The most that is honestly asked for, in the space that bodies have by default."""
    body = json.dumps({"input": [[100_000] * 2000] * 2048}).encode()
    shape = JsonShape(128, MANY)
    for at in range(0, len(body), 32 * 1024):
        shape.is_too_deep_with(body[at : at + 32 * 1024])
    assert not shape.has_too_many_values


class Cycle:
    """What refers to itself, as the exception of a parser does that has its body."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_left_of_answered_bodies_is_collected() -> None:
    """They are few objects: Python alone would let many of them come together."""
    buffers = Buffers(4 * GARBAGE_BYTES)
    left: list[weakref.ref[Cycle]] = []
    for size_bytes in (GARBAGE_BYTES - 1, 1):
        with buffers.buffer_of("key") as buffer:
            assert buffer.try_reserve(size_bytes)
            left.append(weakref.ref(Cycle()))
    assert [one() for one in left] == [None, None]


def test_owners_of_large_bodies_take_turns() -> None:
    """However many bodies one of them sends at once."""
    buffers, read = Buffers(GARBAGE_BYTES), list[str]()

    async def read_on(owner: str) -> None:
        with buffers.buffer_of(owner) as buffer:
            await buffer.turn()
            read.append(owner)

    async def scene() -> None:
        async with asyncio.TaskGroup() as tasks:
            for owner in "a" * 50 + "b":
                tasks.create_task(read_on(owner))

    asyncio.run(scene())
    assert read.index("b") <= 2
