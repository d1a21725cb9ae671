"""What is read out of an answer, whatever shape it has."""

from __future__ import annotations

import pytest

from holdfast.verify.answers import MalformedError, dig, dig_or


def test_an_integer_of_hundreds_of_digits_is_not_read() -> None:
    """No float is as great, and a number is shown as one."""
    document = {"tokens": 10**400}
    with pytest.raises(MalformedError, match="tokens is an integer beyond 53 bits"):
        dig(document, "tokens", kind=int)
    assert dig_or(document, "tokens", default=0) == 0
