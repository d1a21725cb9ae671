"""Holds on to every descendant until it has ended in full."""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.processes import exits, tree
from servers import wait_until
from sleepers import sleeping

EXIT_SYSTEM_CALL = {"x86_64": 60, "aarch64": 93}
HALF_ENDED = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall(int(sys.argv[1]), 0)
"""
"""Ends its first thread alone, as the kernel may do at first to a killed process of many."""


@pytest.fixture
def half_ended() -> Iterator[psutil.Process]:
    """A child that the kernel calls a zombie, and that still holds its memory."""
    number = EXIT_SYSTEM_CALL[platform.machine()]
    command = [sys.executable, "-c", HALF_ENDED, str(number)]
    with subprocess.Popen(command) as child:
        process = psutil.Process(child.pid)
        try:
            wait_until(
                lambda: process.status() == psutil.STATUS_ZOMBIE,
                deadline_seconds=60,
                what=lambda: f"{process} is not a zombie",
            )
            yield process
        finally:
            child.kill()


def test_a_process_is_a_descendant_until_its_last_thread_has_ended(
    half_ended: psutil.Process,
) -> None:
    """Else its memory would be counted as free, and it would stay a zombie of ours."""
    assert half_ended in tree.children()


def test_a_process_whose_first_thread_has_ended_is_killed_and_reaped(
    half_ended: psutil.Process,
) -> None:
    """Nothing is left of it, not even a zombie."""
    assert tree.kill(tree.children()) == ()
    tree.reap(())
    assert not psutil.pid_exists(half_ended.pid)


def test_a_process_that_has_ended_is_not_a_descendant() -> None:
    """A zombie of one thread holds nothing."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        process = psutil.Process(child.pid)
        wait_until(
            lambda: not exits.is_alive(process),
            deadline_seconds=60,
            what=lambda: f"{process} has not ended",
        )
        assert process not in tree.children()


HELD = """
import os, sys
from multiprocessing import resource_tracker
from pathlib import Path
from holdfast.processes import tree

tree.TRACKER_END_SECONDS = 0.01
with tree.owned(Path(sys.argv[1]), {}, has_fork_server=False):
    held = os.dup(resource_tracker._resource_tracker._fd)
    tracker = resource_tracker._resource_tracker._pid
print(Path(f"/proc/{tracker}").exists())
"""
"""Holds the pipe of its resource tracker, as a process does that cannot be killed."""


def test_a_resource_tracker_that_is_held_is_killed(tmp_path: Path) -> None:
    """It would not end, and the server would wait for it forever."""
    done = ran(HELD, tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


STUCK = """
import sys
from pathlib import Path
from holdfast.processes import tree

tree.kill = lambda _: (4711,)
with tree.owned(Path(sys.argv[1]), {}, has_fork_server=False):
    pass
"""


def test_a_process_that_cannot_be_killed_is_named(tmp_path: Path) -> None:
    """The kernel may keep one in a call of a driver, with its memory."""
    assert "processes that cannot be killed are left: 4711" in ran(STUCK, tmp_path).stderr


def ran(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A program of its own, since it changes how its process starts others."""
    return subprocess.run(
        [sys.executable, "-c", program, str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_process_that_goes_on_has_not_been_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been counted of it is forgotten: a debugger may stop it for a moment."""
    monkeypatch.setattr(tree, "STOPPED_POLL_SECONDS", 0.01)
    looks: list[bool] = []

    def looked_at() -> list[psutil.Process]:
        looks.append(len(looks) != 3)
        (process.suspend if looks[-1] else process.resume)()
        wait_until(
            lambda: (process.status() == psutil.STATUS_STOPPED) is looks[-1],
            deadline_seconds=60,
            what=lambda: f"{process} takes no signal",
        )
        return [process]

    with sleeping() as child:
        process = psutil.Process(child.pid)
        reason = asyncio.run(tree.until_stopped(looked_at, 0.035))
    assert reason.startswith(f"process {child.pid} was stopped by a signal")
    assert looks == [True, True, True, False, True, True, True, True]
