"""A parent that is killed leaves no child behind, whatever that child is doing."""

from __future__ import annotations

import multiprocessing
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from holdfast.processes import exits, tree
from servers import descendants, wait_until
from sleepers import sleeping

DEADLINE_SECONDS = 60.0

SPAWNS = """
import multiprocessing, sys, time
from holdfast.worker import lifetime

def stay(path):
    open(path, "w").close()
    while True:  # as a kernel does that never returns
        pass

if __name__ == "__main__":
    lifetime.make_spawned_die_with_parent()
    lifetime.make_spawned_die_with_parent()
    child = multiprocessing.get_context("spawn").Process(target=stay, args=(sys.argv[1],))
    child.start()
    child.join()
"""

SPAWNS_IN_AN_EXECUTOR = """
import asyncio, multiprocessing, sys
from holdfast.worker import lifetime

def stay(path):
    open(path, "w").close()
    while True:
        pass

async def spawn(path):
    child = multiprocessing.get_context("spawn").Process(target=stay, args=(path,))
    await asyncio.to_thread(child.start)
    await asyncio.to_thread(child.join)

if __name__ == "__main__":
    lifetime.make_spawned_die_with_parent()
    path, loop = sys.argv[1:]
    __import__(loop).run(spawn(path))
"""

SPAWNS_IN_A_THREAD = """
import multiprocessing, threading
from holdfast.worker import lifetime

def wait_for_a_word(connection):
    connection.recv()

if __name__ == "__main__":
    lifetime.make_spawned_die_with_parent()
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=wait_for_a_word, args=(receiver,))
    thread = threading.Thread(target=child.start)
    thread.start()
    thread.join()
    child.join(1)
    assert child.is_alive()
    sender.send("end")
    child.join()
    assert child.exitcode == 0
"""

ADOPTS = """
import subprocess, sys, time
from holdfast.processes import tree
from holdfast.worker import lifetime

lifetime.adopt_orphans()
middle = '''import subprocess
print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid)'''
orphan = int(subprocess.run([sys.executable, "-c", middle], stdout=subprocess.PIPE).stdout)
assert [child.pid for child in tree.children()] == [orphan]
assert tree.kill(tree.children()) == ()
assert not tree.children()
"""

STARTS_A_SERVER = """
import sys, time
from pathlib import Path
from holdfast.processes import tree

if __name__ == "__main__":
    with tree.owned(Path(sys.argv[1]), {}):
        time.sleep(600)
"""


LOGS_FROM_ANOTHER_GROUP = """
import fcntl, os, sys, termios
from holdfast.worker import lifetime

terminal = os.open(sys.argv[1], os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
settings = termios.tcgetattr(terminal)
settings[3] |= termios.TOSTOP
termios.tcsetattr(terminal, termios.TCSANOW, settings)
lifetime.leave_group()  # which a process that leads its session cannot
child = os.fork()
if not child:
    lifetime.leave_group()
    lifetime.leave_group()
    os.write(terminal, b"a line")
    os._exit(os.getpgid(0) != os.getpid())
_, status = os.waitpid(child, os.WUNTRACED)
assert os.WIFEXITED(status), status
sys.exit(os.waitstatus_to_exitcode(status))
"""


LEFT_BY_ITS_FIRST_THREAD = """
import ctypes, platform, threading
threading.Thread(target=threading.Event().wait).start()
exit_of_a_thread = 60 if platform.machine() == "x86_64" else 93
ctypes.CDLL(None).syscall(exit_of_a_thread, 0)
"""


@contextmanager
def program(directory: Path, text: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A running program; what it started is ended in any case."""
    path = directory / "program.py"
    path.write_text(text)
    process = subprocess.Popen([sys.executable, str(path), *arguments])
    family: set[psutil.Process] = set()
    try:
        yield process
    finally:
        family |= descendants(process.pid)
        process.kill()
        process.wait()
        tree.kill(family)


def engine_children(pid: int) -> set[psutil.Process]:
    """Its descendants but the resource tracker, which ends when its pipe does."""
    return {child for child in descendants(pid) if not tree._is_resource_tracker(child)}


def assert_ends_its_children(process: subprocess.Popen[bytes]) -> None:
    """Killed, it takes its children with it."""
    children = engine_children(process.pid)
    assert children
    process.send_signal(signal.SIGKILL)
    wait_until(
        lambda: not any(map(exits.is_alive, children)),
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: f"still running: {children}",
    )


def test_a_spawned_process_ends_while_it_starts(tmp_path: Path) -> None:
    """It is tied before it imports what it needs."""
    with program(tmp_path, SPAWNS, str(tmp_path / "runs")) as process:
        wait_until(
            lambda: engine_children(process.pid),
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: "no child",
        )
        assert_ends_its_children(process)


def test_a_spawned_process_ends_while_it_is_busy(tmp_path: Path) -> None:
    """The kernel ends a process that never returns to Python's loop."""
    running = tmp_path / "runs"
    with program(tmp_path, SPAWNS, str(running)) as process:
        wait_until(running.exists, deadline_seconds=DEADLINE_SECONDS, what=lambda: "no start")
        assert_ends_its_children(process)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_what_an_executor_spawns_ends_with_the_process(tmp_path: Path, loop: str) -> None:
    """An EngineCore is spawned there, and the threads last as long as the server's loop."""
    running = tmp_path / "runs"
    with program(tmp_path, SPAWNS_IN_AN_EXECUTOR, str(running), loop) as process:
        wait_until(running.exists, deadline_seconds=DEADLINE_SECONDS, what=lambda: "no start")
        assert_ends_its_children(process)


def test_the_fork_server_ends_while_it_imports(tmp_path: Path) -> None:
    """A front end that is killed in its first second leaves no process that imports vLLM."""
    with program(tmp_path, STARTS_A_SERVER, str(tmp_path)) as process:
        wait_until(
            lambda: engine_children(process.pid),
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: "no fork server",
        )
        assert_ends_its_children(process)


def test_orphans_stay_in_sight(tmp_path: Path) -> None:
    """What a child of ours started is our child when its parent has ended."""
    with program(tmp_path, ADOPTS) as process:
        assert process.wait(DEADLINE_SECONDS) == 0


def test_a_process_that_multiprocessing_did_not_start_is_left_alone() -> None:
    """The parent of Ray's worker is not one of ours: its end means nothing."""
    assert multiprocessing.parent_process() is None
    check = "from holdfast.worker import lifetime; lifetime.end_if_orphan()"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=DEADLINE_SECONDS)


def test_what_a_passing_thread_spawns_outlives_it(tmp_path: Path) -> None:
    """The kernel's parent is a thread, so a process that it starts may not be tied to it."""
    with program(tmp_path, SPAWNS_IN_A_THREAD) as process:
        assert process.wait(DEADLINE_SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTERM])
def test_kill_ends_a_process_that_ignores_signals(number: signal.Signals) -> None:
    """A stopped process and one that was only asked to end are gone when `kill` returns."""
    with sleeping() as process:
        process.send_signal(number)
        assert tree.kill([psutil.Process(process.pid)]) == ()


def test_a_process_lives_until_its_last_thread_has_ended(tmp_path: Path) -> None:
    """Its first thread being gone, the kernel calls it a zombie; only a killed one can be left."""
    with program(tmp_path, LEFT_BY_ITS_FIRST_THREAD) as process:
        seen = psutil.Process(process.pid)
        wait_until(
            lambda: seen.status() == psutil.STATUS_ZOMBIE,
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: f"it is {seen.status()}",
        )
        assert exits.is_alive(seen)
        assert tree.kill([seen]) == ()
        assert not exits.is_alive(seen)
        assert process.poll() is not None


def test_a_process_of_another_group_may_log() -> None:
    """Also to a terminal that stops what writes to it from the background."""
    ours, its = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", LOGS_FROM_ANOTHER_GROUP, os.ttyname(its)],
        start_new_session=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    assert os.read(ours, 100) == b"a line"
    os.close(its)
    os.close(ours)


def test_a_crash_ends_a_process_at_once_with_its_python_stacks() -> None:
    """It does not first look for the names of C functions, which takes half a second and may hang.

    A library that does so may be loaded before or later.
    """
    program = (
        "import ctypes; from holdfast.worker import lifetime\n"
        "def reads_nothing(): ctypes.string_at(0)\n"
        "lifetime.end_at_once_on_crashes()\n"
        "lifetime.end_at_once_on_crashes()\n"  # a forked child does so, too
        "import tvm_ffi\n"
        "reads_nothing()\n"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )
    assert ended.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ended.stderr
    assert "in reads_nothing" in ended.stderr
    assert "Segfault encountered" not in ended.stderr
