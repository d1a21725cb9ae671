"""A signal that comes before the server listens, and one that a closed terminal sends."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

import stand_in_engine
from servers import descendants, has_ended, running, wait_until

STAND_IN = (sys.executable, str(Path(stand_in_engine.__file__)), "serve")
UNPROBED = ("model", "--probe=off", "--learned-dir=none")
DEADLINE_SECONDS = 60.0

SIGNALLED = """
import os, runpy, sys
from importlib.abc import MetaPathFinder

module, number = sys.argv[1], int(sys.argv[2])

class Sender(MetaPathFinder):
    def find_spec(self, name, *_):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), number)

sys.meta_path.insert(0, Sender())
sys.argv[1:] = sys.argv[3:]
runpy.run_module("holdfast", run_name="__main__")
"""
"""Sends a signal to itself when a module is about to be imported."""

IN_A_NAMESPACE = ("unshare", "--user", "--pid", "--fork", "--kill-child")
"""As the first process of a container."""


def _can_unshare() -> bool:
    try:
        return subprocess.run([*IN_A_NAMESPACE, "true"], timeout=60, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _is_pythons_trial(path: Path) -> bool:
    """Whether `tempfile` wrote it to see if it may; it stays where a signal comes at once."""
    is_named_so = re.fullmatch(r"[a-z0-9_]{8}", path.name) is not None
    return is_named_so and path.is_file() and path.read_bytes() in {b"", b"blat"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("module", ["holdfast.serve", "uvloop"])
@pytest.mark.parametrize("as_first", [True, False], ids=["first process", "any process"])
def test_a_signal_before_there_is_a_loop_ends_cleanly(
    tmp_path: Path, number: signal.Signals, module: str, *, as_first: bool
) -> None:
    """While the web stack is imported, and when the socket is bound: exit 0, and nothing is left.

    The kernel drops a signal without a handler where the process is the first of its namespace.
    """
    if as_first and not _can_unshare():
        pytest.skip("no namespaces of processes can be made here")
    temporary, uds = tmp_path / "tmp", tmp_path / "server.sock"
    temporary.mkdir()
    served = ["serve", *UNPROBED, f"--uds={uds}"]
    command = [sys.executable, "-c", SIGNALLED, module, str(int(number)), *served]
    done = subprocess.run(
        [*(IN_A_NAMESPACE if as_first else ()), *command],
        env={**os.environ, "TMPDIR": str(temporary), "XDG_STATE_HOME": str(tmp_path)},
        timeout=DEADLINE_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "READY" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(uds.parent.glob(f"{uds.name}*"))
    assert not [path for path in temporary.iterdir() if not _is_pythons_trial(path)]


def test_a_head_waits_for_its_address_until_a_signal(tmp_path: Path) -> None:
    """Nobody has 192.0.2.1 (RFC 5737)."""
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("k" * 32)
    several = ("--nnodes=2", "--master-addr=192.0.2.1", f"--node-key-file={key}")
    with running(tmp_path, *UNPROBED, *several, command=STAND_IN) as server:
        server.until(lambda: "Waiting for it" in server.log, "the wait")
        assert server.stop() == 0


def test_a_hang_up_drains_however_often_it_comes(tmp_path: Path) -> None:
    """A stream that runs is finished, and the exit code is 0."""
    with running(tmp_path, *UNPROBED, command=STAND_IN) as server:
        server.until_ready()
        enough = tmp_path / "enough"
        url = f"{server.url}/v1/stream?until={enough}"
        with httpx.stream("GET", url, timeout=DEADLINE_SECONDS) as response:
            lines = response.iter_lines()
            assert next(lines) == "begun"
            server.process.send_signal(signal.SIGHUP)
            server.until_state("DRAINING")
            server.process.send_signal(signal.SIGHUP)
            enough.touch()
            assert list(lines)[-1] == "ended"
        assert server.wait() == 0


def test_a_hang_up_that_is_ignored_is_ignored(tmp_path: Path) -> None:
    """So `nohup` works: the server goes on, and SIGTERM still drains it."""
    with running(tmp_path, *UNPROBED, command=("nohup", *STAND_IN)) as server:
        server.until_ready()
        server.process.send_signal(signal.SIGHUP)
        server.until_ready()
        assert server.stop() == 0
        assert server.log.count("state: DRAINING") == 1


def test_a_hang_up_of_all_its_processes_leaves_its_helpers(tmp_path: Path) -> None:
    """A closed terminal tells every process: the fork server and the tracker go on till the end."""
    with running(tmp_path, *UNPROBED, command=STAND_IN) as server:
        server.until_ready()
        helpers = {
            child
            for child in descendants(server.process.pid)
            if "multiprocessing" in " ".join(child.cmdline())
        }
        assert len(helpers) == 2
        for helper in helpers:
            helper.send_signal(signal.SIGHUP)
        server.until_ready()
        assert all(helper.status() != psutil.STATUS_ZOMBIE for helper in helpers)
        assert server.stop() == 0


def test_a_lost_resource_tracker_is_no_failure(tmp_path: Path) -> None:
    """A user killed it, or the kernel for want of memory: the end is as clean as without."""
    with running(tmp_path, *UNPROBED, command=STAND_IN) as server:
        server.until_ready()
        (tracker,) = (
            child
            for child in descendants(server.process.pid)
            if "resource_tracker" in " ".join(child.cmdline())
        )
        tracker.kill()
        # The server looks for its end every few seconds, and reaps it.
        server.until(lambda: has_ended(tracker), "the end of the tracker")
        assert server.stop() == 0


@contextmanager
def _in_a_terminal(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a server on a terminal that the test closes; it shows the progress view there."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [*STAND_IN, *UNPROBED, f"--uds={directory / 'server.sock'}"],
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        preexec_fn=_take_terminal,  # noqa: PLW1509 - nothing of this process is running besides
        env={
            **os.environ,
            "TMPDIR": str(directory),
            "XDG_STATE_HOME": str(directory),
            "TERM": "xterm",
        },
    )
    os.close(its)
    family = descendants(process.pid)
    try:
        yield process, ours
    finally:
        family |= descendants(process.pid)
        process.kill()
        process.wait(DEADLINE_SECONDS)
        for child in family:
            if child.is_running():
                child.kill()


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_closed_terminal_ends_it_cleanly(tmp_path: Path) -> None:
    """What it would show can be written nowhere any more, and it drains and ends all the same."""
    with _in_a_terminal(tmp_path) as (process, terminal):
        os.set_blocking(terminal, False)
        shown = bytearray()

        def is_ready() -> bool:
            with suppress(BlockingIOError):
                shown.extend(os.read(terminal, 1 << 20))
            return b"READY: " in shown

        wait_until(is_ready, deadline_seconds=DEADLINE_SECONDS, what=shown.decode)
        family = descendants(process.pid)
        assert family
        os.close(terminal)
        assert process.wait(DEADLINE_SECONDS) == 0
        wait_until(
            lambda: all(map(has_ended, family)),
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: f"still running: {family}",
        )
        assert not list(tmp_path.glob("server.sock*"))
        assert not list(tmp_path.glob("holdfast-*"))
