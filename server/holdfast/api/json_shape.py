"""How deep is the JSON of a body, and how many values does it have? Known before it is parsed.

A parser makes an object of each value while all other requests wait. A string, an array or an
object takes as long as eight numbers: keys of objects are looked up, and the garbage collector
traverses arrays.
"""

from __future__ import annotations

from itertools import accumulate
from random import random

_ALL_BYTES = frozenset(range(256))
_NO_OPENERS = bytes(_ALL_BYTES - set(b"[{"))
_NO_STRUCTURE = bytes(_ALL_BYTES - set(b'[]{}"'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Maps a bracket to the change of depth, as a signed byte."""
_NEVER_UTF8 = frozenset(b"\0\xfe\xff")
_ENCODING_BYTES = 4
"""The first bytes that reveal UTF-16 and UTF-32, by a byte order mark or a zero."""
COSTLY_VALUES = 8
"""The weight of a string, an array or an object; that of a number is 1."""
_SAMPLE_BYTES = 1024
_SAMPLED_SHARE = 32
"""One in this many bytes of a part is searched for commas, but at least `_SAMPLE_BYTES`."""


class JsonShape:
    """Follows one body, split anywhere. Invalid JSON is followed as far as a parser would.

    It keeps none of the content, and the cost of a part depends only on its size: a few passes at
    the speed of C. It goes through brackets one by one only where they may be too deep.
    """

    def __init__(self, most_levels: int, most_values: int) -> None:
        self._most_levels = most_levels
        self._most_values = most_values
        self._values = 0
        self._size_bytes = 0
        self._depth = 0
        self._is_in_string = False
        self._escape = b""
        self.is_utf8 = True
        """Whether the body can be UTF-8. Nothing else is known of a body in another encoding."""

    @property
    def has_too_many_values(self) -> bool:
        """Whether the body has more values than allowed."""
        return self._values > self._most_values

    def is_too_deep_with(self, content: bytes, *, is_whole: bool = False) -> bool:
        """Add the next bytes, or all of them, and return whether the body is too deep."""
        if self._size_bytes < _ENCODING_BYTES:
            first = content[: _ENCODING_BYTES - self._size_bytes]
            self.is_utf8 = self.is_utf8 and _NEVER_UTF8.isdisjoint(first)
            self._size_bytes += len(first)
        if (
            is_whole
            and COSTLY_VALUES * len(content) <= self._most_values
            and len(content.translate(None, _NO_OPENERS)) <= self._most_levels
        ):
            return False
        brackets = self._outside_of_strings(content)
        openers = len(brackets.translate(None, _NO_OPENERS))
        self._values += COSTLY_VALUES * openers
        before, self._depth = self._depth, self._depth + 2 * openers - len(brackets)
        if before + openers <= self._most_levels:
            return False
        steps = memoryview(brackets.translate(_STEPS)).cast("b")
        return max(accumulate(steps, initial=before)) > self._most_levels

    def _outside_of_strings(self, content: bytes) -> bytes:
        """Return the brackets outside of strings, and count the values other than those."""
        if self._escape or b"\\" in content:
            content = (self._escape + content).replace(b"\\\\", b"")
            self._escape = b"\\" if content.endswith(b"\\") else b""
            content = content.replace(b'\\"', b"")
        structure = content.translate(None, _NO_STRUCTURE)
        # Two quotes without a bracket between them do not change whether the rest is in a string.
        kept = structure.replace(b'""', b"")
        pieces = kept.split(b'"')
        quotes = len(structure) - len(kept) + len(pieces) - 1
        if quotes or not self._is_in_string:
            self._values += COSTLY_VALUES // 2 * quotes + _commas(content)
        outside = b"".join(pieces[self._is_in_string :: 2])
        self._is_in_string ^= not len(pieces) % 2
        return outside


def _commas(content: bytes) -> int:
    """Estimate the number of commas, including those in strings, where texts have few.

    A sample is counted at a random position that no client can predict. Counting all commas would
    take up to half as long as parsing.
    """
    size_bytes = len(content)
    sample_bytes = max(_SAMPLE_BYTES, size_bytes // _SAMPLED_SHARE)
    if sample_bytes >= size_bytes:
        return content.count(b",")
    at = int(random() * (size_bytes - sample_bytes))  # noqa: S311 - it does not protect a secret
    return content.count(b",", at, at + sample_bytes) * size_bytes // sample_bytes
