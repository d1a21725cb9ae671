"""Head and follower as processes that are killed and stopped: both sides end the generation."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from holdfast.processes.exits import is_alive
from network_namespaces import ADDRESSES, cable

DEADLINE_SECONDS = 200.0
SUPPORT = Path(__file__).parents[1] / "support"
Event = dict[str, Any]


class Head:
    """A head, and what it says."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._events: queue.Queue[Event] = queue.Queue()
        assert process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()

    def end(self) -> None:
        """Kill it, and read the rest before its pipe is closed."""
        self.process.kill()
        self._reader.join(DEADLINE_SECONDS)

    def _read(self, lines: IO[bytes]) -> None:
        for line in lines:
            self._events.put(json.loads(line))

    def until(self, what: str, **expected: Any) -> Event:
        """The next event of that kind."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            if event["what"] == what and expected.items() <= event.items():
                return event

    def runs(self, generation: int) -> psutil.Process:
        """The worker on the follower, once the generation runs there."""
        return psutil.Process(self.until("ranks", generation=generation)["pid"])


@contextmanager
def process(*words: str, before: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A process of `node_process`, which does not outlive the test, even if it is stopped."""
    command = [*before, sys.executable, str(SUPPORT / "node_process.py"), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        try:
            yield running
        finally:
            running.kill()


@contextmanager
def a_head(
    port: int = 0, host: str = "127.0.0.1", before: Sequence[str] = ()
) -> Iterator[tuple[Head, int]]:
    """A head that listens, and its port."""
    with process("head", host, str(port), before=before) as running:
        head = Head(running)
        try:
            yield head, head.until("listening")["port"]
        finally:
            head.end()


@contextmanager
def a_follower(
    port: int, directory: Path, host: str = "127.0.0.1", before: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A follower of the head at that port."""
    with process("follow", host, str(port), str(directory), before=before) as running:
        yield running


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    """In the next generation, with nobody's help."""
    with a_head() as (head, port), a_follower(port, tmp_path):
        head.runs(1).kill()
        lost = head.until("lost")
        assert (lost["generation"], lost["node"]) == (1, "b")
        assert "was killed by SIGKILL" in lost["reason"]
        assert is_alive(head.runs(2))


def test_a_killed_follower_takes_its_engine_with_it(tmp_path: Path) -> None:
    """The head knows at once, and goes on with the next one that joins."""
    with a_head() as (head, port):
        with a_follower(port, tmp_path) as follower:
            worker = head.runs(1)
            follower.kill()
            assert head.until("lost")["reason"] == "it closed the connection"
            wait_until(lambda: not is_alive(worker))
        with a_follower(port, tmp_path / "again"):
            assert is_alive(head.runs(2))


def test_a_killed_head_leaves_no_engine_on_the_follower(tmp_path: Path) -> None:
    """The follower stays, and joins the head that comes back."""
    with a_head() as (head, port), a_follower(port, tmp_path) as follower:
        worker = head.runs(1)
        head.process.kill()
        wait_until(lambda: not is_alive(worker))
        head.process.wait(DEADLINE_SECONDS)
        with a_head(port) as (successor, _):
            assert is_alive(successor.runs(1))
            assert follower.poll() is None


def test_a_follower_that_is_stopped_is_lost_and_comes_back(tmp_path: Path) -> None:
    """As a machine that freezes does: its connection stays open, and is silent."""
    with a_head() as (head, port), a_follower(port, tmp_path) as follower:
        worker = head.runs(1)
        follower.send_signal(signal.SIGSTOP)
        assert head.until("lost")["reason"].startswith("it answered no heartbeat")
        follower.send_signal(signal.SIGCONT)
        wait_until(lambda: not is_alive(worker))
        assert is_alive(head.runs(2))


def test_a_head_that_is_stopped_is_given_up_and_comes_back(tmp_path: Path) -> None:
    """The follower frees its node meanwhile."""
    with a_head() as (head, port), a_follower(port, tmp_path):
        worker = head.runs(1)
        head.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not is_alive(worker))
        head.process.send_signal(signal.SIGCONT)
        assert head.until("lost")["node"] == "b"
        assert is_alive(head.runs(2))


def test_a_cable_that_is_pulled_ends_the_generation_on_both_sides(tmp_path: Path) -> None:
    """Neither end is told; both free their node, and find together when it is plugged in again."""
    with cable() as link:
        if link is None:
            pytest.skip("this user cannot make network namespaces here")
        address = ADDRESSES[0]
        with (
            a_head(0, address, link.inside(0)) as (head, port),
            a_follower(port, tmp_path, address, link.inside(1)),
        ):
            worker = head.runs(1)
            link.pull()
            assert head.until("lost")["reason"].startswith("it answered no heartbeat")
            wait_until(lambda: not is_alive(worker))
            link.plug()
            assert is_alive(head.runs(2))
