"""Processes that do nothing, for tests of what becomes of a process."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends only if it is killed, which it is at the latest when this is left."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()
