"""Keys in what a server said: no part of one is written that a reader could guess the rest of."""

from __future__ import annotations

import pytest

from holdfast.verify.answers import ELLIPSIS, beginning, excerpt
from holdfast.verify.records import Fault
from holdfast.verify.redaction import redacted

KEY = "sk-holdfast-0123456789"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (f"it is {KEY}.", "it is [hidden]."),
        (f"it is sk-hold{ELLIPSIS}", f"it is [hidden]{ELLIPSIS}"),
        (
            f"sk-hold{ELLIPSIS} and sk-holdfast-{ELLIPSIS}",
            f"[hidden]{ELLIPSIS} and [hidden]{ELLIPSIS}",
        ),
        (f"it is sk-{ELLIPSIS}", f"it is sk-{ELLIPSIS}"),
        ("it is sk-hold", "it is sk-hold"),
        (f"it is holdfast{ELLIPSIS}", f"it is holdfast{ELLIPSIS}"),
    ],
)
def test_a_key_is_hidden_also_where_it_was_cut(text: str, written: str) -> None:
    """Four characters of it are its beginning, if the text was cut behind them."""
    assert redacted(Fault(text), [KEY]).what == written


def test_a_key_within_a_key_leaves_nothing_of_it() -> None:
    """Whichever of them is named first."""
    assert redacted(Fault(f"{KEY}-more"), [KEY, f"{KEY}-more"]).what == "[hidden]"


@pytest.mark.parametrize("before", range(270, 300))
def test_an_excerpt_that_is_cut_within_a_key_shows_none_of_it(before: int) -> None:
    """Wherever the cut is, at most three of its characters are left."""
    shown = redacted(Fault(excerpt("." * before + KEY)), [KEY]).what
    assert "sk-h" not in shown


def test_a_text_that_is_not_cut_has_no_ellipsis() -> None:
    """One that is cut has as many characters as were asked for, and one."""
    assert (excerpt("a  b", 3), excerpt("a  bc", 3)) == ("a b", f"a b{ELLIPSIS}")
    assert beginning("a  b", 3) == f"a  {ELLIPSIS}"
