"""What the processes of an engine do between two messages of vLLM's shared memory."""

from __future__ import annotations

import inspect
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from holdfast.workspace import futex, spinning
from holdfast.workspace.spinning import WokenCondition
from servers import wait_until

DEADLINE_SECONDS = 20
MESSAGES = 500


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the queues of one test have their files, whose names a socket has room for."""
    with tempfile.TemporaryDirectory(prefix="queues-") as name:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", name)
        yield Path(name)


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues as ours, for one test alone, and readers that sleep at once."""
    monkeypatch.setattr(shm_broadcast, "SpinCondition", SpinCondition)
    monkeypatch.setattr(spinning, "SPIN_SECONDS", 0.0)
    spinning.wake_by_futex()


class Reader(threading.Thread):
    """Reads for as long as it can, and keeps what it got and why it ended."""

    def __init__(self, queue: MessageQueue) -> None:
        super().__init__(daemon=True)
        self.queue = queue
        self.got: list[Any] = []
        self.end = ""

    def run(self) -> None:
        """Until the queue is shut down."""
        self.queue.wait_until_ready()
        try:
            while True:
                self.got.append(self.queue.dequeue(indefinite=True))
        except RuntimeError as error:
            self.end = str(error)


@contextmanager
def read_by(writer: MessageQueue) -> Iterator[Reader]:
    """Somebody who reads what is written; gone when left."""
    reader = Reader(MessageQueue.create_from_handle(writer.export_handle(), 0))
    reader.start()
    writer.wait_until_ready()
    try:
        yield reader
    finally:
        reader.queue.shutdown()
        reader.join(DEADLINE_SECONDS)
        writer.shutdown()


def new_queue() -> MessageQueue:
    return MessageQueue(n_reader=1, n_local_reader=1)


def until_read(reader: Reader, count: int) -> None:
    wait_until(
        lambda: len(reader.got) >= count,
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: f"{len(reader.got)} of {count} messages read",
    )


def test_vllm_uses_of_a_condition_what_ours_has() -> None:
    """The arguments it is made with, too."""
    assert list(inspect.signature(SpinCondition).parameters)[:3] == [
        "is_reader",
        "context",
        "notify_address",
    ]
    used = set(re.findall(r"_spin_condition\.(\w+)", inspect.getsource(MessageQueue)))
    assert used == {name for name in vars(WokenCondition) if not name.startswith("_")}


@pytest.mark.usefixtures("woken")
def test_a_reader_that_sleeps_is_woken_by_each_message() -> None:
    """One by one, and when they come faster than it reads."""
    writer = new_queue()
    with read_by(writer) as reader:
        assert isinstance(reader.queue._spin_condition, WokenCondition)
        for number in range(MESSAGES):
            writer.enqueue(number)
            if number % 50 == 0:
                until_read(reader, number + 1)
        until_read(reader, MESSAGES)
    assert reader.got == list(range(MESSAGES))


@pytest.mark.usefixtures("woken")
def test_a_reader_that_sleeps_ends_with_its_queue() -> None:
    """Another thread of its process shuts it down."""
    with read_by(new_queue()) as reader:
        pass
    assert reader.end == "cancelled"


def test_a_reader_does_as_its_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without our plugin writes as vLLM does."""
    writer = new_queue()
    monkeypatch.setattr(shm_broadcast, "SpinCondition", SpinCondition)
    spinning.wake_by_futex()
    with read_by(writer) as reader:
        assert isinstance(reader.queue._spin_condition, SpinCondition)
        writer.enqueue("hello")
        until_read(reader, 1)


@pytest.mark.usefixtures("woken")
def test_without_a_futex_a_queue_is_as_vllm_has_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose system call nobody knows."""
    monkeypatch.setattr(futex, "_SYSCALLS", {})
    writer = new_queue()
    with read_by(writer) as reader:
        assert not list(directory.glob("*.count"))
        writer.enqueue("hello")
        until_read(reader, 1)
