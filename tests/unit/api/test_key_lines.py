"""Key files as people write them, and what is said of a wrong one."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.api.key_lines import NO_LIMITS, KeyLimits, key_lines

SECRET = "hush-hush-hush-hush"  # noqa: S105 - no key of anything
LIMITED = "max_tokens_per_day=1000 max_requests_per_minute=5"


def test_a_line_may_give_its_key_a_name_and_limits() -> None:
    """In any order and with any space between them; a key alone stays one."""
    lines = key_lines(
        b"# clients\n"
        b"old:key/with=signs\n"
        b"alice: key-of-alice max_requests_per_minute=60\n"
        b"\t bob@example.org:\t key-of-bob   max_requests_per_minute=1 max_tokens_per_day=2 \r\n"
        b"key-without-name max_tokens_per_day=3\n"
    )
    assert [(line.number, line.name, line.key, line.limits) for line in lines] == [
        (2, "", "old:key/with=signs", NO_LIMITS),
        (3, "alice", "key-of-alice", KeyLimits(None, 60)),
        (4, "bob@example.org", "key-of-bob", KeyLimits(2, 1)),
        (5, "", "key-without-name", KeyLimits(3, None)),
    ]


def test_a_client_may_have_two_keys() -> None:
    """While it moves from one to the other."""
    lines = key_lines(f"alice: old {LIMITED}\nalice: new {LIMITED}\n".encode())
    assert [line.name for line in lines] == ["alice", "alice"]


def test_a_line_may_be_given_twice() -> None:
    """Its second copy changes nothing."""
    assert len(key_lines(b"alice: a\nalice: a\nb\nb\n")) == 4


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("alice:", "expected a key after the name"),
        (f"alice : {SECRET}", "expected a key, or a name with a colon"),
        (f"alice {SECRET}", "expected a key, or a name with a colon"),
        (f"alice: bob: {SECRET}", "expected a key, or a name with a colon"),
        (f"alice: {SECRET} # hers", "expected a key, or a name with a colon"),
        (f"alice: {SECRET} max_tokens=5", "only max_tokens_per_day=N and max_requests_per_min"),
        (f"alice: {SECRET} max_tokens_per_day", "only max_tokens_per_day=N"),
        (f"alice: {SECRET} max_tokens_per_day= 5", "expected max_tokens_per_day from 1 to"),
        (f"alice: {SECRET} max_tokens_per_day=0", "leave it out for no limit"),
        (f"alice: {SECRET} max_tokens_per_day=1e6", "expected max_tokens_per_day from 1 to"),
        (f"alice: {SECRET} max_tokens_per_day=-1", "expected max_tokens_per_day from 1 to"),
        (f"alice: {SECRET} max_tokens_per_day={'9' * 5000}", "expected max_tokens_per_day from"),
        (f"alice: {SECRET} max_requests_per_minute=100001", "from 1 to 100000"),
        (f"alice: {SECRET} max_tokens_per_day=1 max_tokens_per_day=2", "it is given twice"),
        (f"alice: max_tokens_per_day=5 {SECRET}", "expected a key before its limits"),
        ("max_tokens_per_day=5", "expected a key before its limits"),
        (f"-alice: {SECRET}", "expected a name of 1 to 48 letters"),
        (f"{'a' * 49}: {SECRET}", "expected a name of 1 to 48 letters"),
        (f"élise: {SECRET}", "expected a name of 1 to 48 letters"),
        (f"other: {SECRET}", "choose another name"),
        (f"alice: {SECRET}é", "expected a key of visible ASCII characters"),
        (f"alice: {SECRET} {LIMITED}\nalice: another", "line 4: give it the limits of line 3"),
        (f"alice: {SECRET}\nbob: {SECRET}", "line 4: remove it or line 3"),
        (f"{SECRET}\n{SECRET} {LIMITED}", "line 4: remove it or line 3"),
    ],
)
def test_a_wrong_line_is_named_with_what_to_write(line: str, advice: str) -> None:
    """By its number, and without a word of it."""
    with pytest.raises(ValueError, match=r"^line [34]: ") as caught:
        key_lines(f"# clients\ngood-key\n{line}\n".encode())
    assert advice in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "alice" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"# only\n"])
def test_a_file_without_a_key_is_wrong(content: bytes) -> None:
    """It would close the server to everybody, or be a file that is being written."""
    with pytest.raises(ValueError, match="it contains no key"):
        key_lines(content)


@pytest.mark.parametrize(
    ("line", "looks"),
    [(b"alice:key", True), (b"/:key", False), (b"key", False), (b"alice: a:key", False)],
)
def test_a_space_that_may_be_missing_after_a_name_is_noticed(line: bytes, looks: bool) -> None:
    """The line is still the key that it was before there were names."""
    (found,) = key_lines(line)
    assert found.looks_named is looks


@given(st.binary(max_size=200))
def test_no_file_does_more_than_raise(content: bytes) -> None:
    """Whatever is in it: keys, or a ValueError."""
    lines = []
    with suppress(ValueError):
        lines = key_lines(content)
    assert all(line.key.isascii() and " " not in line.key for line in lines)
