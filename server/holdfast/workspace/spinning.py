"""How does a process of the engine wait for the next message of another?

EngineCore and its workers write to each other through shared memory. A reader of vLLM's calls
`sched_yield` for a second after each message, and sleeps on a socket of ZeroMQ after that; a writer
sends to that socket with each message, whether somebody sleeps or not (`SpinCondition`, 0.32;
vllm-project/vllm#52814, vllm-project/vllm#52916). Where cores are few, each of the three costs:

* A notification takes a tenth of the time between two messages, and wakes four threads. Ours is a
  futex: one system call, and none is lost.
* A second of a core for every pause of the load heats the chip that it shares with the GPU. Half of
  it is above any engine step, and what is asked at once after READY finds the readers awake.
* Who yields a core that others want too gets it back when their slices are over, even if its
  message comes at once. Who sleeps is woken, before them, and takes nothing from them until then.
  So a reader that was kept waiting sleeps until it is called.

docs/benchmarks.md has the measurements.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.workspace.futex import SharedCounter

logger = logging.getLogger("vllm.holdfast")

SPIN_SECONDS = 0.5
CROWDED_SECONDS = 0.002
"""A yield that took so long gave the core to others for their whole slice."""
REMEMBER_SECONDS = 0.1
"""So long a core is taken for crowded, until it is tried again."""
_SCHEME = "ipc://"


class WokenCondition:
    """Stands in for vLLM's `SpinCondition`, between one writer and the readers of one queue.

    `wait` returns when there may be something new, and its caller looks. It is called again when
    there is not, so that a reader that is about to sleep first has its caller look once more: what
    was written before it took the number is seen then, and what comes after changes the number.
    """

    # vLLM closes these with the queue.
    local_notify_socket = read_cancel_socket = write_cancel_socket = None

    def __init__(
        self,
        counter: SharedCounter,
        *,
        is_reader: bool,
        give_way: Callable[[], None] = os.sched_yield,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counter = counter
        self._clock = clock
        self._give_way = give_way
        self._is_reader = is_reader
        self._read_seconds = clock()
        self._crowded_until_seconds = 0.0
        self._number: int | None = None
        """What the counter was when the caller was sent to look for the last time."""

    def record_read(self) -> None:
        """A message was read."""
        self._read_seconds = self._clock()
        self._number = None

    def wait(self, timeout_ms: int | None = None) -> None:
        """Let others run, or sleep for at most `timeout_ms` until the writer notifies."""
        if self._number is not None:
            self._counter.until_other(self._number, timeout_ms)
            self._number = None
        elif not self._spins():
            self._number = self._counter.value

    def notify(self) -> None:
        """Wake all readers."""
        self._counter.add_one()

    def cancel(self) -> None:
        """Have a reader of this process look, called by another of its threads.

        If it is just about to sleep it looks after the time-out, which vLLM gives as 5 s at most.
        """
        if self._is_reader:
            self._counter.add_one()

    def _spins(self) -> bool:
        """Whether the caller should look again at once; others have had the core meanwhile."""
        began = self._clock()
        if began > self._read_seconds + SPIN_SECONDS or began < self._crowded_until_seconds:
            return False
        self._give_way()
        ended = self._clock()
        if ended - began >= CROWDED_SECONDS:
            self._crowded_until_seconds = ended + REMEMBER_SECONDS
        return ended >= self._crowded_until_seconds


def wake_by_futex() -> None:
    """Have the message queues that are made in this process from now on wait as above.

    Where no futex is to be had they are vLLM's, as those of a reader whose writer is.
    """
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415 - vLLM is large

    original = shm_broadcast.SpinCondition

    def condition(is_reader: bool, context: Any, notify_address: str) -> Any:
        path = Path(f"{notify_address.removeprefix(_SCHEME)}.count")
        counter = SharedCounter(path) if is_reader and path.exists() else None
        if not is_reader:
            counter = _made(path)
        if counter is None:
            return original(is_reader, context, notify_address)
        return WokenCondition(counter, is_reader=is_reader)

    shm_broadcast.SpinCondition = condition


def _made(path: Path) -> SharedCounter | None:
    """A new counter, or None if it cannot be had here."""
    try:
        return SharedCounter(path, is_new=True)
    except OSError as error:
        logger.warning("Messages between the engine's processes take longer: %s", error)
        return None
