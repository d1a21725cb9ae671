"""What does a request body cost? Its memory, and the time that its JSON or its form will take.

The JSON is followed before it is parsed: a parser makes an object of each value while all other
requests wait. A string, an array or an object takes as long as eight numbers: keys of objects are
looked up, and the garbage collector traverses arrays.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from random import random

from starlette import formparsers
from starlette.types import Scope

from holdfast.engine.grammars.lanes import Lane
from holdfast.errors import RefusedError

FREE_BYTES = 64 * 1024
"""The first bytes of each body are not counted: connections are limited, and a short request is
never refused because of the long ones of others."""
LOOK_BYTES = 32 * 1024
"""The bytes of a body that are inspected in one turn: some milliseconds at worst."""
PACE_BYTES = 256 * 1024
"""The bytes of a large body that are read before it has to wait for its next turn."""
PACE_SECONDS = 0.001
"""The pause before each turn, so all large bodies together bring at most 250 MiB/s."""
GARBAGE_BYTES = 64 << 20
"""After answering bodies of this total size, the garbage that they left is collected."""

_FORM_CHARSETS = frozenset(
    {b"utf-8", b"utf8", b"us-ascii", b"ascii"}
    | {b"iso-8859-1", b"iso8859-1", b"latin-1", b"latin1"}
)
"""Python decodes these at the speed of C. It takes half a minute for one field of `punycode`, and
keeps each unknown name in memory."""
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


@dataclass(slots=True)
class Buffer:
    """The memory that the body of one request takes, from its first byte until the answer."""

    buffers: Buffers
    owner: str
    size_bytes: int = 0
    counted_bytes: int = 0

    def try_reserve(self, size_bytes: int) -> bool:
        """Reserve memory for more of the body; False, without an effect, if there is too little."""
        counted_bytes = max(0, self.size_bytes + size_bytes - FREE_BYTES) - self.counted_bytes
        if not self.buffers.try_take(self.owner, counted_bytes):
            return False
        self.size_bytes += size_bytes
        self.counted_bytes += counted_bytes
        return True

    async def turn(self) -> None:
        """Return when more of the body may be read after `PACE_BYTES`."""
        await self.buffers.turn(self.owner)

    def try_resize(self, size_bytes: int) -> bool:
        """Change how much is reserved; False, without an effect, if there is too little."""
        if size_bytes >= self.size_bytes:
            return self.try_reserve(size_bytes - self.size_bytes)
        counted_bytes = max(0, size_bytes - FREE_BYTES)
        self.buffers.give_back(self.owner, self.counted_bytes - counted_bytes)
        self.size_bytes, self.counted_bytes = size_bytes, counted_bytes
        return True


class Buffers:
    """The memory of all request bodies. An owner may take at most as much as it leaves free.

    A single owner gets half of the total, two get a third each, and so on. It belongs to one event
    loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._turns = Lane(1, slots_per_key=1)
        self.taken_bytes = 0
        """The counted bytes of all owners."""
        self._taken_by: Counter[str] = Counter()
        self._answered_bytes = 0

    @contextmanager
    def buffer_of(self, owner: str) -> Iterator[Buffer]:
        """Yield the buffer of a request of `owner`, and return its memory at the end."""
        buffer = Buffer(self, owner)
        try:
            yield buffer
        finally:
            self.give_back(owner, buffer.counted_bytes)
            self._collect(buffer.size_bytes)

    async def turn(self, owner: str) -> None:
        """Return when it is the turn of a large body of `owner` to be read on; owners alternate.

        Only one has its turn at a time: a dozen fast ones would keep a core from everybody else.
        """
        await self._turns.take(owner)
        try:
            await asyncio.sleep(PACE_SECONDS)
        finally:
            self._turns.give(owner)

    def _collect(self, answered_bytes: int) -> None:
        """Free the bodies that parser errors keep alive: they are part of reference cycles.

        FastAPI 0.136 keeps the exception in a variable of a frame that its traceback refers to. A
        body is only a few objects, so Python would collect many bodies late. vLLM freezes the
        objects of the start, so a collection takes milliseconds.
        """
        self._answered_bytes += answered_bytes
        if self._answered_bytes >= GARBAGE_BYTES:
            self._answered_bytes = 0
            gc.collect()

    def try_take(self, owner: str, size_bytes: int) -> bool:
        """Take memory for an owner; False, without any effect, if it would have too much."""
        free_bytes = self._max_bytes - self.taken_bytes - size_bytes
        if size_bytes and self._taken_by[owner] + size_bytes > free_bytes:
            return False
        self.taken_bytes += size_bytes
        self._taken_by[owner] += size_bytes
        return True

    def give_back(self, owner: str, size_bytes: int) -> None:
        """Return memory that an owner took."""
        self.taken_bytes -= size_bytes
        self._taken_by[owner] -= size_bytes
        if not self._taken_by[owner]:
            del self._taken_by[owner]


class JsonShape:
    """Follows one body, split anywhere. Invalid JSON is followed as far as a parser would.

    It keeps none of the content, and the cost of a part depends only on its size: a few passes at
    the speed of C. It goes through brackets one by one only where they may be too deep.
    """

    def __init__(self, max_levels: int, max_values: int) -> None:
        self._max_levels = max_levels
        self._max_values = max_values
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
        return self._values > self._max_values

    def is_too_deep_with(self, content: bytes, *, is_whole: bool = False) -> bool:
        """Add the next bytes, or all of them, and return whether the body is too deep."""
        if self._size_bytes < _ENCODING_BYTES:
            first = content[: _ENCODING_BYTES - self._size_bytes]
            self.is_utf8 = self.is_utf8 and _NEVER_UTF8.isdisjoint(first)
            self._size_bytes += len(first)
        if (
            is_whole
            and COSTLY_VALUES * len(content) <= self._max_values
            and len(content.translate(None, _NO_OPENERS)) <= self._max_levels
        ):
            return False
        brackets = self._outside_of_strings(content)
        openers = len(brackets.translate(None, _NO_OPENERS))
        self._values += COSTLY_VALUES * openers
        before, self._depth = self._depth, self._depth + 2 * openers - len(brackets)
        if before + openers <= self._max_levels:
            return False
        steps = memoryview(brackets.translate(_STEPS)).cast("b")
        return max(accumulate(steps, initial=before)) > self._max_levels

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


def content_type(scope: Scope) -> bytes | None:
    """Return the type of a request's body in lower case, the first that is given; None without."""
    for name, value in scope["headers"]:
        if name == b"content-type":
            return bytes(value).lower()
    return None


def form_fault(scope: Scope) -> RefusedError | None:
    """Return why a form is refused for its charset; None if the body may be read.

    Starlette decodes each field of a form by the charset in the type of the body.
    """
    given = content_type(scope)
    if given is None or b"multipart" not in given or b"charset" not in given:
        return None
    # Starlette's own function, so that what is checked is what is used.
    parse = formparsers.parse_options_header  # type: ignore[attr-defined]  # it is imported there
    kind, parameters = parse(given.decode("latin-1"))
    charset = parameters.get(b"charset", b"utf-8").replace(b"_", b"-")
    if kind != b"multipart/form-data" or charset in _FORM_CHARSETS:
        return None
    return RefusedError(
        "The charset of the form is not UTF-8, US-ASCII or ISO-8859-1. Send the form with "
        "charset=utf-8, or without a charset.",
        reason="malformed",
        http_status=400,
    )


def json_fault(shape: JsonShape, body: bytes, *, is_whole: bool) -> RefusedError | None:
    """Return why JSON is refused once `body` is added to its shape; None if it is not."""
    if shape.is_too_deep_with(body, is_whole=is_whole):
        return RefusedError(
            "The JSON in the body is nested too deeply (--max-json-depth).",
            reason="json_too_deep",
            http_status=400,
        )
    if shape.has_too_many_values:
        return RefusedError(
            "The JSON in the body has too many values.", reason="json_too_large", http_status=400
        )
    if not shape.is_utf8:
        return RefusedError(
            "The JSON in the body is not UTF-8.", reason="malformed", http_status=400
        )
    return None
