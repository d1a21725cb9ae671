"""What is read out of an answer, whatever shape it has."""

from __future__ import annotations

import pytest

from holdfast.verify.answers import (
    ELLIPSIS,
    MalformedError,
    dig,
    dig_or,
    excerpt,
    has_words,
    quoted,
    read_json,
)


@pytest.mark.parametrize("levels", [200, 600, 100_000])
def test_an_answer_is_not_nested_deeply(levels: int) -> None:
    """A report that repeats it could not be written."""
    with pytest.raises(MalformedError):
        read_json("[" * levels + "]" * levels)
    assert read_json('{"a": [[1]]}') == {"a": [[1]]}


def test_an_integer_of_hundreds_of_digits_is_not_read() -> None:
    """No float is as great, and a number is shown as one."""
    document = {"tokens": 10**400}
    with pytest.raises(MalformedError, match="tokens is an integer beyond 53 bits"):
        dig(document, "tokens", kind=int)
    assert dig_or(document, "tokens", default=0) == 0


def test_a_long_text_is_quoted_with_what_is_left_out() -> None:
    """How much that is, so that nobody takes the beginning for all of it."""
    assert quoted("a\tb") == "a\N{REPLACEMENT CHARACTER}b"
    assert quoted("x" * 2000) == "x" * 2000
    assert quoted("x" * 1_002_000) == "x" * 2000 + f"{ELLIPSIS} (1,000,000 characters left out)"


def test_an_excerpt_reads_only_the_beginning() -> None:
    """Behind many spaces there may be more, which the ellipsis stands for."""
    assert excerpt(f"a{' ' * 5000}b") == f"a{ELLIPSIS}"
    assert excerpt("ab  " * 5_000_000, 5) == f"ab ab{ELLIPSIS}"


@pytest.mark.parametrize(
    ("said", "expected", "is_it"),
    [
        ("It is THE\nseine!", "the Seine", True),
        ("the Seines", "the Seine", False),
        ("15", "5", False),
        ("about 3.14 or so", "3.14", True),
        ("C++ it is", "C++", True),
    ],
)
def test_words_are_found(said: str, expected: str, is_it: bool) -> None:
    """As whole words, in any case and spacing."""
    assert has_words(said, expected) is is_it
