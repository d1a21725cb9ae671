"""What processes hold of the host's memory is what their end gives back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from holdfast.processes.memory import host_memory_bytes

MIB = 1 << 20
OWN = f"held = b'x' * (256 * {MIB})"
SHARED = f"import mmap; held = mmap.mmap(-1, 256 * {MIB}); held.write(b'x' * len(held))"
"""An anonymous mapping of `mmap` is shared with the children of a process."""


@contextmanager
def holding(statement: str) -> Iterator[psutil.Process]:
    """Return a process that has run a statement, and waits."""
    program = f"{statement}; print('done', flush=True); input()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        try:
            yield psutil.Process(child.pid)
        finally:
            child.kill()


def test_memory_of_its_own_counts() -> None:
    """Several processes add up."""
    with holding(OWN) as one, holding(OWN) as other:
        held_bytes = host_memory_bytes([one, other])
    assert 512 * MIB <= held_bytes < 768 * MIB


def test_shared_memory_does_not_count() -> None:
    """It may be another process's, too."""
    with holding(SHARED) as process:
        assert process.memory_info().shared >= 256 * MIB
        assert host_memory_bytes([process]) < 256 * MIB


def test_a_process_that_has_ended_holds_nothing() -> None:
    """Also if it ends between the look at the processes and the look at their memory."""
    with holding("held = 1") as process:
        pass
    assert host_memory_bytes([process]) == 0
