"""Which processes ended, in what order and how: watched, recorded and counted by the kernel."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from holdfast.processes import exits
from holdfast.processes.exits import (
    ExitWatcher,
    ProcessExit,
    exempt,
    first_killed,
    oom_kills,
    recorded_pids,
)
from sleepers import sleeping

DEADLINE_SECONDS = 60.0
RECORDS = """
import multiprocessing, os, signal, subprocess, sys
from pathlib import Path
from holdfast.processes.exits import record_exit_codes, recorded_exit_code

directory, parent, reap = Path(sys.argv[1]), os.getpid(), os.waitpid


def reap_what_is_recorded(pid, options):
    assert os.getpid() != parent or recorded_exit_code(directory, pid) is not None
    return reap(pid, options)


def run_and_spawn():
    subprocess.run([sys.executable, "-c", "import os; os.abort()"], stderr=subprocess.DEVNULL)
    worker = multiprocessing.get_context("fork").Process(target=os._exit, args=(5,))
    worker.start()
    worker.join()


def forked(program):
    if not (pid := os.fork()):
        program()
        os._exit(4)
    return pid


os.waitpid = reap_what_is_recorded
record_exit_codes(directory)
assert os.waitpid(forked(lambda: os._exit(3)), 0)[1] == 3 << 8
assert os.waitpid(forked(run_and_spawn), 0)[1] == 4 << 8
waiting = forked(signal.pause)
assert os.waitpid(-1, os.WNOHANG) == (0, 0)
os.kill(waiting, signal.SIGKILL)
assert os.waitpid(-1, 0) == (waiting, signal.SIGKILL)
leader = forked(signal.pause)
os.setpgid(leader, 0)
os.kill(leader, signal.SIGTERM)
assert os.waitpid(-leader, 0) == (leader, signal.SIGTERM)
"""


def _ends(directory: Path, pid: int, code: int, at_seconds: float) -> None:
    path = directory / str(pid)
    path.write_text(str(code))
    os.utime(path, (at_seconds, at_seconds))


def test_the_first_that_a_signal_ended_is_named(tmp_path: Path) -> None:
    """A process that got SIGTERM, ended with an exit code or ended earlier does not count."""
    _ends(tmp_path, 1, -signal.SIGKILL, 1)
    before = recorded_pids(tmp_path)
    _ends(tmp_path, 2, -signal.SIGTERM, 2)
    _ends(tmp_path, 3, 1, 3)
    assert first_killed(tmp_path, before) == ""
    _ends(tmp_path, 4, -signal.SIGKILL, 5)
    _ends(tmp_path, 5, -signal.SIGSEGV, 4)
    assert first_killed(tmp_path, before) == "its process 5 was killed by SIGSEGV"


def test_a_process_that_was_killed_may_have_had_too_little_memory(tmp_path: Path) -> None:
    """Which is how the kernel ends the largest one."""
    _ends(tmp_path, 1, -signal.SIGKILL, 1)
    told = first_killed(tmp_path, frozenset())
    assert told == "its process 1 was killed by SIGKILL (probably for lack of memory)"


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    """Most of those for real time have none."""
    number = signal.SIGRTMIN + 1
    _ends(tmp_path, 1, -number, 1)
    told = first_killed(tmp_path, frozenset())
    assert told == f"its process 1 was killed by signal {number}"
    assert str(ProcessExit(1, -number)) == f"was killed by signal {number}"


def test_what_belongs_to_no_engine_is_passed_over(tmp_path: Path) -> None:
    """The processes that try grammars are killed whenever one does not answer."""
    exempt(tmp_path / "codes", 1)
    _ends(tmp_path / "codes", 1, -signal.SIGKILL, 1)
    assert first_killed(tmp_path / "codes", frozenset()) == ""


def test_a_directory_that_takes_no_file_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the process is for is more important than what is said of its end."""
    monkeypatch.setattr(exits, "_warned_causes", set())
    (tmp_path / "codes").touch()
    exempt(tmp_path / "codes", 1)
    exempt(tmp_path / "codes", 2)
    assert [record.message for record in caplog.records] == [
        "cannot record which processes belong to no engine: File exists"
    ]


def test_a_child_is_recorded_before_it_is_reaped(tmp_path: Path) -> None:
    """What it forks records only what it starts by multiprocessing, as a core its workers."""
    subprocess.run([sys.executable, "-c", RECORDS, str(tmp_path)], check=True, timeout=60)
    codes = [path.read_text() for path in tmp_path.iterdir()]
    assert sorted(codes) == ["-15", "-9", "3", "4", "5"]


def test_where_nothing_was_noted_nothing_is_told(tmp_path: Path) -> None:
    """The server makes the directory with the first end."""
    assert first_killed(tmp_path / "none", frozenset()) == ""


def open_descriptors() -> int:
    """How many this process has, without those that only await the garbage collector."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


async def ends_in_order(processes: list[subprocess.Popen[bytes]]) -> list[ProcessExit]:
    """Kill them one after the other, each when the one before was seen."""
    with ExitWatcher([psutil.Process(process.pid) for process in processes]) as watcher:
        for count, process in enumerate(processes, start=1):
            process.kill()
            async with asyncio.timeout(DEADLINE_SECONDS):
                while len(watcher.exits()) < count:
                    await watcher.wait(0.05)
        return list(watcher.exits())


def refuse(_pid: int) -> int:
    """As a kernel or a seccomp filter that does not know the call."""
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_ends_are_told_in_their_order(has_pidfds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pidfds and, where the kernel has none, by looking."""
    if not has_pidfds:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    with ExitStack() as stack:
        processes = [stack.enter_context(sleeping()) for _ in range(3)]
        before = open_descriptors()
        ended = asyncio.run(ends_in_order(processes))
        assert [exited.pid for exited in ended] == [process.pid for process in processes]
        assert open_descriptors() == before


def write(path: Path, text: str) -> None:
    """A file of the kernel's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/system.slice/a\n", "sys/fs/cgroup/system.slice/a/memory.events"),
        ("0::/host/path\n", "sys/fs/cgroup/memory.events"),
        ("4:cpu,memory:/a\n0::/\n", "sys/fs/cgroup/memory/a/memory.oom_control"),
        ("0::/\n", "proc/vmstat"),
    ],
)
def test_kills_are_counted_where_the_kernel_counts_them(
    tmp_path: Path, groups: str, file: str
) -> None:
    """Both versions of cgroups, within a container and outside, and else the whole machine."""
    write(tmp_path / "proc/vmstat", "nr_free_pages 1\noom_kill 0\n")
    write(tmp_path / "proc/self/cgroup", groups)
    write(tmp_path / file, "low 0\noom_kill 3\noom_group_kill 0\n")
    assert oom_kills(tmp_path) == 3


def test_this_kernel_counts_its_kills(tmp_path: Path) -> None:
    """The kernel's own table has the line that is read, in the form that is read."""
    table = re.sub(r"(?m)^oom_kill \d+$", "oom_kill 7", Path("/proc/vmstat").read_text())
    write(tmp_path / "proc/vmstat", table)
    assert oom_kills(tmp_path) == 7
