"""How deep is the JSON that streams by? Known before anything parses it."""

from __future__ import annotations

from itertools import accumulate

_ALL_BYTES = frozenset(range(256))
_NO_OPENERS = bytes(_ALL_BYTES - set(b"[{"))
_NO_STRUCTURE = bytes(_ALL_BYTES - set(b'[]{}"'))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NEVER_UTF8 = frozenset(b"\0\xfe\xff")
_ENCODING_BYTES = 4
"""UTF-16 and UTF-32 show in so many first bytes, by a mark or by a zero."""


class JsonDepth:
    """Follows one body, cut anywhere. What is no JSON is followed as far as a parser would.

    A body that does not have enough brackets to be too deep, which is nearly every one, costs one
    pass at the speed of C. Only of others are the strings left out, from the beginning on.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._openers = 0
        self._size_bytes = 0
        self._unread: list[bytes] = []
        self._depth = 0
        self._is_in_string = False
        self._escape = b""
        self.is_utf8 = True
        """Whether the body can be UTF-8; of another encoding nothing is known but this."""

    def is_too_deep_with(self, content: bytes) -> bool:
        """Whether the body is deeper than it may be, with its next bytes."""
        if self._size_bytes < _ENCODING_BYTES:
            first = content[: _ENCODING_BYTES - self._size_bytes]
            self.is_utf8 = self.is_utf8 and _NEVER_UTF8.isdisjoint(first)
            self._size_bytes += len(first)
        self._openers += len(content.translate(None, _NO_OPENERS))
        self._unread.append(content)
        if self._openers <= self._most:
            return False
        unread, self._unread = self._unread, []
        return any(self._reads_too_deep(part) for part in unread)

    def _reads_too_deep(self, content: bytes) -> bool:
        steps = [_STEPS[byte] for byte in self._structure(content)]
        deepest = max(accumulate(steps, initial=self._depth))
        self._depth += sum(steps)
        return deepest > self._most

    def _structure(self, content: bytes) -> bytes:
        """The brackets of the next bytes that stand outside of strings."""
        if self._escape or b"\\" in content:
            content = (self._escape + content).replace(b"\\\\", b"")
            self._escape = b"\\" if content.endswith(b"\\") else b""
            content = content.replace(b'\\"', b"")
        # Two quotes with no bracket between them leave what follows inside or outside as it was.
        kept = content.translate(None, _NO_STRUCTURE).replace(b'""', b"")
        pieces = kept.split(b'"')
        outside = b"".join(pieces[self._is_in_string :: 2])
        self._is_in_string ^= not len(pieces) % 2
        return outside
