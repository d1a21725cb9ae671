"""Takes the keys that the tool was given out of what it writes: a server may repeat them.

It may repeat them as JSON, a URL, HTML or Python has them, with characters escaped. Where a text
was cut, the beginning of a key may be all that is left of it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from html.entities import html5

from holdfast.verify.answers import ELLIPSIS
from holdfast.verify.texts import RecordOfTexts, with_texts

HIDDEN = "[hidden]"
_LEAST_BEGINNING = 4
"""Characters of a secret: fewer stand at the end of many a text that was cut."""
_MOST_BACKSLASHES = 8
"""Before one character, where JSON stands in JSON: each level escapes those of the one within."""
_BACKSLASHES = rf"\\\\{{0,{_MOST_BACKSLASHES - 1}}}"
_MOST_ENCODINGS = 3
"""How many times more than once a URL or HTML may be encoded, as each proxy on the way may do."""
_PERCENT = rf"%(?:25){{0,{_MOST_ENCODINGS}}}"
_LONGEST_SPELLING = 50
"""The most characters in place of one: its four bytes, each with backslashes, or a name in HTML."""
_PART = re.compile(r"\\+|.", re.DOTALL)
_CUT_ESCAPE = re.compile(
    rf"(?:\\+(?:u[0-9a-fA-F]{{0,3}}|x[0-9a-fA-F]?|U[0-9a-fA-F]{{0,7}})?"
    rf"|{_PERCENT}[0-9a-fA-F]?|(?:&|\\+u0026)(?:amp;){{0,{_MOST_ENCODINGS}}}#?\w{{0,20}})\Z"
)
"""The beginning of an escape at the end of a text."""


def redacted(record: RecordOfTexts, secrets: Sequence[str]) -> RecordOfTexts:
    """The dataclass or text with each secret in each of its texts replaced, however deep."""
    # The longest first: a shorter one may be a part of it.
    known = sorted(filter(None, secrets), key=len, reverse=True)
    return with_texts(record, partial(_without, secrets=known)) if known else record


def _without(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
        if any(one in text for one in "\\%&"):  # searching for escapes takes longer than the rest
            text = _escaped(secret).sub(HIDDEN, text)
    *cut, last = text.split(ELLIPSIS)
    return ELLIPSIS.join([*(_without_beginning(one, secrets) for one in cut), last])


def _without_beginning(text: str, secrets: Sequence[str]) -> str:
    """The text without the longest beginning of a secret that it ends with."""
    for secret in secrets:
        first, *others = _parts(secret)
        longest = len(secret) * _LONGEST_SPELLING
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
        one = rf"\\|u005[cC]|x5[cC]|{_PERCENT}5[cC]|(?:&|u0026){_entity(part[0])}"
        return rf"(?:{one}){{1,{_MOST_BACKSLASHES * len(part)}}}"
    plain, entity = re.escape(part), _entity(part)
    octets = _hexadecimals(part.encode(errors="replace"), 2)
    units = _hexadecimals(part.encode("utf-16-be", "replace"), 4)
    escapes = [
        _BACKSLASHES.join(f"u{unit}" for unit in units),
        _BACKSLASHES.join(f"x{octet}" for octet in octets),
        *(f"x{octet}" for octet in _hexadecimals(part.encode("latin-1", "ignore"), 2)),
        *(f"U{code}" for code in _hexadecimals(part.encode("utf-32-be", "replace"), 8)),
        f"u0026{entity}",
        plain,
    ]
    percents = "".join(f"{_PERCENT}{octet}" for octet in octets)
    return f"(?:{percents}|{_BACKSLASHES}(?:{'|'.join(escapes)})|&{entity}|{plain})"


def _entity(character: str) -> str:
    """What stands behind the ampersand of an entity of HTML; that may be written as one, too."""
    number = ord(character)
    numbers = rf"#0{{0,6}}{number};|#[xX]0{{0,6}}{_in_any_case(f'{number:x}')};"
    names = "".join(f"|{name}" for name in _names().get(character, ()))
    return rf"(?:amp;){{0,{_MOST_ENCODINGS}}}(?:{numbers}{names})"


@lru_cache
def _names() -> Mapping[str, Sequence[str]]:
    """The names of each character in HTML."""
    found = defaultdict[str, list[str]](list)
    for name, character in html5.items():
        if name.endswith(";"):
            found[character].append(name)
    return found


def _hexadecimals(encoded: bytes, digits: int) -> list[str]:
    """The numbers that bytes are written as, each with this many digits."""
    return list(map(_in_any_case, re.findall("." * digits, encoded.hex())))


def _in_any_case(hexadecimal: str) -> str:
    return re.sub("[a-f]", lambda found: f"[{found[0]}{found[0].upper()}]", hexadecimal)
