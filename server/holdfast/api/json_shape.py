"""How deep is the JSON that streams by, and of how many values? Known before anything parses it.

A parser makes an object of each value while everybody else waits. A string, an array and an object
take it as long as eight numbers do: keys of objects are looked up, and arrays are gone through by
the collector of garbage.
"""

from __future__ import annotations

from itertools import accumulate
from random import random

_ALL_BYTES = frozenset(range(256))
_NO_OPENERS = bytes(_ALL_BYTES - set(b"[{"))
_NO_STRUCTURE = bytes(_ALL_BYTES - set(b'[]{}"'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""From a bracket to a step of the depth, as a signed byte."""
_NEVER_UTF8 = frozenset(b"\0\xfe\xff")
_ENCODING_BYTES = 4
"""UTF-16 and UTF-32 show in so many first bytes, by a mark or by a zero."""
COSTLY_VALUES = 8
"""What a string, an array or an object counts, where a number counts one."""
_SAMPLE_BYTES = 1024
_SAMPLED_SHARE = 32
"""Of a part, one of so many bytes is looked at for commas; of a short part, these all."""


class JsonShape:
    """Follows one body, cut anywhere. What is no JSON is followed as far as a parser would.

    Nothing is kept of what was seen, and what a part costs is a matter of its size: some passes at
    the speed of C. Brackets are gone through one by one only where they may be too deep.
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
        """Whether the body can be UTF-8; of another encoding nothing is known but this."""

    @property
    def has_too_many_values(self) -> bool:
        """Whether what was seen has more values than it may."""
        return self._values > self._most_values

    def is_too_deep_with(self, content: bytes, *, is_whole: bool = False) -> bool:
        """Whether the body is deeper than it may be, with its next bytes, or with all of them."""
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
        """The brackets of the next bytes that stand outside of strings. Counts all but these."""
        if self._escape or b"\\" in content:
            content = (self._escape + content).replace(b"\\\\", b"")
            self._escape = b"\\" if content.endswith(b"\\") else b""
            content = content.replace(b'\\"', b"")
        structure = content.translate(None, _NO_STRUCTURE)
        # Two quotes with no bracket between them leave what follows inside or outside as it was.
        kept = structure.replace(b'""', b"")
        pieces = kept.split(b'"')
        quotes = len(structure) - len(kept) + len(pieces) - 1
        if quotes or not self._is_in_string:
            self._values += COSTLY_VALUES // 2 * quotes + _commas(content)
        outside = b"".join(pieces[self._is_in_string :: 2])
        self._is_in_string ^= not len(pieces) % 2
        return outside


def _commas(content: bytes) -> int:
    """About how many there are, in strings too: a text has few.

    They are counted at a place that no client can foresee. To count all would take up to half as
    long as the parser takes.
    """
    size_bytes = len(content)
    sample_bytes = max(_SAMPLE_BYTES, size_bytes // _SAMPLED_SHARE)
    if sample_bytes >= size_bytes:
        return content.count(b",")
    at = int(random() * (size_bytes - sample_bytes))  # noqa: S311 - nothing is kept secret by it
    return content.count(b",", at, at + sample_bytes) * size_bytes // sample_bytes
