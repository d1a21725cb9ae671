"""Takes the keys that the tool was given out of what it writes: a server may repeat them.

It may repeat them as JSON or a URL has them, with characters escaped. Where a text was cut, the
beginning of a key may be all that is left of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache, partial

from holdfast.verify.answers import ELLIPSIS
from holdfast.verify.texts import RecordOfTexts, with_texts

HIDDEN = "[hidden]"
_LEAST_BEGINNING = 4
"""Characters of a secret: fewer stand at the end of many a text that was cut."""
_MOST_BACKSLASHES = 8
"""Before one character, where JSON stands in JSON: each level escapes those of the one within."""
_PART = re.compile(r"\\+|.", re.DOTALL)
_CUT_ESCAPE = re.compile(r"(?:\\+(?:u[0-9a-fA-F]{0,3})?|%[0-9a-fA-F]?)\Z")
"""The beginning of an escape at the end of a text."""


def redacted(record: RecordOfTexts, secrets: Sequence[str]) -> RecordOfTexts:
    """The dataclass or text with each secret in each of its texts replaced, however deep."""
    # The longest first: a shorter one may be a part of it.
    known = sorted(filter(None, secrets), key=len, reverse=True)
    return with_texts(record, partial(_without, secrets=known)) if known else record


def _without(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
        if "\\" in text or "%" in text:  # searching for escapes takes longer than the rest
            text = _escaped(secret).sub(HIDDEN, text)
    *cut, last = text.split(ELLIPSIS)
    return ELLIPSIS.join([*(_without_beginning(one, secrets) for one in cut), last])


def _without_beginning(text: str, secrets: Sequence[str]) -> str:
    """The text without the longest beginning of a secret that it ends with."""
    for secret in secrets:
        first, *others = _parts(secret)
        longest = len(secret) * (_MOST_BACKSLASHES + len("uffff"))
        for found in first.finditer(text, max(0, len(text) - longest)):
            if _ends_within(text, found, others):
                return f"{text[: found.start()]}{HIDDEN}"
    return text


def _ends_within(text: str, first: re.Match[str], others: Sequence[re.Pattern[str]]) -> bool:
    """Whether the text ends within the secret that begins there, after enough characters of it."""
    end, characters = first.end(), 1
    for part in others:
        if end == len(text) or _CUT_ESCAPE.match(text, end):
            break
        found = part.match(text, end)
        if found is None:
            return False
        end, characters = found.end(), characters + 1
    return characters >= _LEAST_BEGINNING


@lru_cache
def _escaped(secret: str) -> re.Pattern[str]:
    """What finds the secret in any spelling."""
    return re.compile("".join(part.pattern for part in _parts(secret)))


@lru_cache
def _parts(secret: str) -> tuple[re.Pattern[str], ...]:
    """What finds each character of the secret in any spelling; backslashes in a row are one."""
    return tuple(re.compile(_spellings(part)) for part in _PART.findall(secret))


def _spellings(part: str) -> str:
    if part.startswith("\\"):
        return rf"(?:\\|u005[cC]|%5[cC]){{1,{_MOST_BACKSLASHES * len(part)}}}"
    backslashes = rf"\\\\{{0,{_MOST_BACKSLASHES - 1}}}"
    units = re.findall("....", part.encode("utf-16-be", "replace").hex())
    escaped = backslashes.join(f"u{_in_any_case(unit)}" for unit in units)
    plain = re.escape(part)
    percents = _in_any_case("".join(f"%{byte:02x}" for byte in part.encode(errors="replace")))
    return f"(?:{percents}|{backslashes}(?:{escaped}|{plain})|{plain})"


def _in_any_case(hexadecimal: str) -> str:
    return re.sub("[a-f]", lambda found: f"[{found[0]}{found[0].upper()}]", hexadecimal)
