"""What a reader of vLLM's shared memory does between two messages."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from holdfast.workspace import spinning
from servers import wait_until

DEADLINE_SECONDS = 20


def until(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, deadline_seconds=DEADLINE_SECONDS, what=lambda: f"not {what}")


def has_passed(moment_seconds: float) -> bool:
    return time.monotonic() > moment_seconds


def has_come(got: list[Any], message: object) -> bool:
    return message in got


@pytest.fixture
def spins_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test: the processes of other tests are as vLLM has them."""
    made = SpinCondition.__init__
    monkeypatch.setattr(made, "__defaults__", made.__defaults__)
    spinning.spin_less()


def test_vllm_spins_for_a_second_and_says_so_by_one_default() -> None:
    """It is the only default, and nobody gives another value."""
    assert SpinCondition.__init__.__defaults__ == (1,)
    assert list(inspect.signature(SpinCondition).parameters)[-1] == "busy_loop_s"
    for made in (MessageQueue.__init__, MessageQueue.create_from_handle):
        assert "busy_loop_s" not in inspect.getsource(made)


@pytest.mark.usefixtures("spins_less")
def test_a_reader_that_sleeps_is_woken_by_the_next_message() -> None:
    """Each of them, however often it fell asleep."""
    writer = MessageQueue(n_reader=1, n_local_reader=1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    condition = reader._spin_condition
    assert condition.busy_loop_s == spinning.SPIN_SECONDS
    got: list[Any] = []

    def read() -> None:
        reader.wait_until_ready()
        for _ in range(3):
            got.append(reader.dequeue(indefinite=True))  # noqa: PERF401 - seen one by one

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    writer.wait_until_ready()
    try:
        for number in range(3):
            until(partial(has_passed, condition.last_read + spinning.SPIN_SECONDS), "asleep")
            writer.enqueue(number)
            until(partial(has_come, got, number), "woken")
    finally:
        reader.shutdown()
        thread.join(DEADLINE_SECONDS)
        writer.shutdown()
    assert got == [0, 1, 2]
