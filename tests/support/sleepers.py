"""Processes that do nothing, for tests of what becomes of a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

_MAPS = """
import mmap, sys, time
file = open(sys.argv[1], "w+b")
file.truncate(4096)
mapped = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
time.sleep(600)
"""


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends only if it is killed, which it is at the latest when this is left."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def begun(command: Sequence[str]) -> Iterator[psutil.Process]:
    """The process of a command that has printed its first line; it is killed when this is left."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            process.stdout.readline()
            yield psutil.Process(process.pid)
        finally:
            process.kill()


@contextmanager
def mapping(path: Path) -> Iterator[psutil.Process]:
    """A process that maps a new file, which is gone at the latest when this is left."""
    try:
        with begun([sys.executable, "-c", _MAPS, str(path)]) as process:
            yield process
    finally:
        path.unlink(missing_ok=True)
