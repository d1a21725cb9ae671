"""Reads small files of the kernel again and again, without needing memory that may not be there.

A file is opened once, and its content goes to a buffer that exists already. What a reading takes
beyond that is a few small objects, which Python finds in memory that the process has. Locking the
buffer into memory would gain nothing: pages that are used five times a second are the last that
the kernel takes away, and a reading needs the interpreter's pages too, which are too many to lock.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUFFER_BYTES = 16 * 1024
"""The largest file that is read, `memory.stat` of cgroup v1, has about 2 KiB."""


class KeptFile:
    """A file that stays open. Belongs to one thread at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = bytearray(BUFFER_BYTES)
        self._into = (self._buffer,)
        self._length = 0

    def read(self) -> bool:
        """Read the present content; False if there is none, as in a cgroup that was removed."""
        try:
            self._length = os.preadv(self._descriptor, self._into, 0)
        except OSError:
            self._length = 0
        return self._length > 0

    def number(self, pattern: re.Pattern[bytes]) -> int | None:
        """Return the first number that a group of `pattern` finds; None if it finds nothing."""
        found = pattern.search(self._buffer, 0, self._length)
        return int(found[1]) if found else None


@contextmanager
def kept_file(path: Path) -> Iterator[KeptFile | None]:
    """Keep a file open while entered; None if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        file = KeptFile(descriptor)
        yield file if file.read() else None
    finally:
        os.close(descriptor)
