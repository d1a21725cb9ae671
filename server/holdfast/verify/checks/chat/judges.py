"""What is wrong with a text, whatever it is about? Cheap signs of a broken sampler or kernel."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

_LOOP = re.compile(r"(\S(?:.{0,78}?\S)?\s?)\1{5,}", re.DOTALL)
_MIN_LOOP_CHARACTERS = 60
_LONG_UNITS = range(81, 301)
"""Lengths of what is repeated that the pattern does not find: it would take too long."""
_REPEATS = 6
_JUDGED_CHARACTERS = 20_000
"""At the end of a text: a model that loops goes on until it is cut. No model writes as much within
the tokens that it is given."""
_ALWAYS = frozenset({"LATIN", "GREEK", "MICRO", "FEMININE", "MASCULINE", "MODIFIER"})
"""Formulas have Greek in any language."""
_MIN_STRAY = 2
_STRAY_SHARE = 0.01


def loop(text: str) -> str:
    """What is said six times or more in a row, over a line; empty if nothing is."""
    for found in _LOOP.finditer(text[-_JUDGED_CHARACTERS:]):
        is_long = len(found.group()) >= _MIN_LOOP_CHARACTERS
        if is_long and any(character.isalnum() for character in found.group(1)):
            return found.group(1).strip()
    return _long_loop(text[-_JUDGED_CHARACTERS:])


def _long_loop(text: str) -> str:
    """What `loop` returns, for the lengths that its pattern does not find.

    For each of them, the text is cut into pieces of that length. Wherever six repeats begin, four
    pieces in a row are equal to the one behind them.
    """
    for size in _LONG_UNITS:
        equal = 0
        for start in range(0, len(text) - size, size):
            piece = text[start : start + size]
            equal = equal + 1 if text.startswith(piece, start + size) else 0
            if equal == _REPEATS - 2 and any(character.isalnum() for character in piece):
                begin = _beginning(text, start - (equal - 1) * size, size)
                unit = text[begin : begin + size]
                if text.startswith(unit * _REPEATS, begin):
                    return unit.strip()
    return ""


def _beginning(text: str, start: int, size: int) -> int:
    """Return where the repeats begin that go on at `start`."""
    while start > 0 and text[start - 1] == text[start - 1 + size]:
        start -= 1
    return start


def stray_scripts(text: str, allowed: frozenset[str] = frozenset()) -> dict[str, int]:
    """Letters of scripts that nobody asked for: `{"CJK": 12}`; empty if there are hardly any."""
    letters = [character for character in text[-_JUDGED_CHARACTERS:] if character.isalpha()]
    counts = Counter(unicodedata.name(one, "UNKNOWN").split()[0] for one in letters)
    stray = {name: count for name, count in counts.items() if name not in _ALWAYS | allowed}
    are_few = sum(stray.values()) < max(_MIN_STRAY, _STRAY_SHARE * len(letters))
    return {} if are_few else stray


def broken_characters(text: str) -> int:
    """How many characters are replaced; one at the end may only have been cut."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}").count("\N{REPLACEMENT CHARACTER}")
