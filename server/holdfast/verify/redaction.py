"""Takes the keys that the tool was given out of what it writes: a server may repeat them.

Where a text was cut, the beginning of a key may be all that is left of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from holdfast.verify.answers import ELLIPSIS
from holdfast.verify.texts import RecordOfTexts, with_texts

HIDDEN = "[hidden]"
_LEAST_BEGINNING = 4
"""Characters of a secret: fewer stand at the end of many a text that was cut."""


def redacted(record: RecordOfTexts, secrets: Sequence[str]) -> RecordOfTexts:
    """The dataclass or text with each secret in each of its texts replaced, however deep."""
    # The longest first: a shorter one may be a part of it.
    known = sorted(filter(None, secrets), key=len, reverse=True)
    return with_texts(record, partial(_without, secrets=known)) if known else record


def _without(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    *cut, last = text.split(ELLIPSIS)
    return ELLIPSIS.join([*(_without_beginning(one, secrets) for one in cut), last])


def _without_beginning(text: str, secrets: Sequence[str]) -> str:
    """The text without the longest beginning of a secret that it ends with."""
    for secret in secrets:
        for length in range(len(secret) - 1, _LEAST_BEGINNING - 1, -1):
            if text.endswith(secret[:length]):
                return f"{text[:-length]}{HIDDEN}"
    return text
