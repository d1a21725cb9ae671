"""Keys in what a server said: no part of one is written that a reader could guess the rest of."""

from __future__ import annotations

import json
import re
import time
from html import escape
from urllib.parse import quote

import pytest

from holdfast.verify.answers import ELLIPSIS, beginning, excerpt
from holdfast.verify.records import Fault
from holdfast.verify.redaction import redacted

KEY = "sk-holdfast-0123456789"
PATH_KEY = "sk-live/abcd/EFGH1234"
_NAMES = {"/": "&sol;", "+": "&plus;", "=": "&equals;"}
_MOST_SECONDS = 5.0
"""Many times what it takes, and a fraction of what a square would take."""


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


@pytest.mark.parametrize(
    "key",
    [
        PATH_KEY,
        'sk-"quoted"-1234',
        "sk-back\\\\slash\\1234",
        "pässword😀%1",
        "sk-a+b/c<d>&e&amp;f==",
    ],
)
def test_a_key_is_hidden_in_every_spelling_that_servers_use(key: str) -> None:
    """PHP escapes slashes, JSON within JSON escapes its backslashes, and a URL has per cents.

    Error pages have entities of HTML, and logs of Python have what `repr` makes of bytes.
    """
    as_json, as_url = json.dumps(key)[1:-1], quote(key, safe="")
    entities = "".join(f"&#x{ord(one):X};" for one in key)
    units = key.encode("utf-16-be").hex()
    all_escaped = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
    for spelled in (
        as_json,
        as_json.replace("/", "\\/"),
        json.dumps(as_json.replace("/", "\\/"))[1:-1],
        all_escaped,
        all_escaped.upper().replace("U", "u"),
        repr(all_escaped)[1:-1],
        as_url,
        re.sub("%..", lambda found: found[0].lower(), as_url),
        quote(as_url, safe=""),
        quote(quote(as_url, safe=""), safe=""),
        entities,
        entities.replace("&", "&amp;"),
        entities.replace("&", "\\u0026"),
        "".join(f"&#{ord(one):03};" for one in key),
        escape(key),
        escape(escape(key)),
        re.sub("[/+=]", lambda found: _NAMES[found[0]], key),
        key.encode("ascii", "xmlcharrefreplace").decode(),
        repr(key.encode())[2:-1],
        json.dumps(repr(key.encode())[2:-1])[1:-1],
        ascii(key)[1:-1],
    ):
        assert redacted(Fault(f"bad key {spelled} sorry"), [key]).what == "bad key [hidden] sorry"


@pytest.mark.parametrize(
    "left",
    [
        "sk-live\\/ab",
        "sk-live\\",
        "sk-live%2",
        "sk-live%2Fabcd",
        "\\u0073\\u006b\\u002d\\u006c",
        "\\u0073\\u006b\\u002d\\u006c\\u00",
        "sk-live%252",
        "sk-live%252Fab",
        "sk-live&",
        "sk-live&amp;#x2",
        "sk-live&#x2F;ab",
        "sk-live\\u0026#4",
        "sk-live\\x2",
        "sk-live\\\\x2fab",
    ],
)
def test_the_beginning_of_an_escaped_key_is_hidden_where_it_was_cut(left: str) -> None:
    """Also where the cut is within an escape."""
    assert (
        redacted(Fault(f"it is {left}{ELLIPSIS}"), [PATH_KEY]).what == f"it is [hidden]{ELLIPSIS}"
    )


@pytest.mark.parametrize(
    "text",
    [
        "a&b <c> 100%25 \\n &lt; &#x2F; %2F \\x2f \\u0026",
        "sk-live&nbsp;abcd sk-live%20abcd sk-live\\nabcd",
    ],
)
def test_what_only_looks_like_a_key_stays(text: str) -> None:
    """Escapes are in many a text that is innocent."""
    assert redacted(Fault(f"{text}{ELLIPSIS}"), [PATH_KEY]).what == f"{text}{ELLIPSIS}"


@pytest.mark.parametrize(
    "text",
    [
        "\\" * 1_000_000,
        "s\\" * 500_000,
        "sk-live%2" * 100_000,
        "sk-live%2525" * 100_000,
        "sk-live&#x2" * 100_000,
        "&amp;" * 200_000,
    ],
)
def test_a_long_text_takes_a_time_that_grows_with_it(text: str) -> None:
    """A server may answer with megabytes of what nearly is a key."""
    started_seconds = time.process_time()
    assert redacted(Fault(text), [PATH_KEY]).what == text
    assert time.process_time() - started_seconds < _MOST_SECONDS
