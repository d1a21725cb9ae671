"""What vLLM's message queues keep while their reader is busy."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.utils.network_utils import get_open_zmq_ipc_path

from holdfast.patches.engine import read_notifications
from holdfast.patches.patch import original

TELLING_BYTES = 40 << 10
"""What notifications that are not looked at hold after seconds; a queue holds less."""
MOST_READS = 64_000
_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class HeapUse(ctypes.Structure):
    """What glibc tells of its heap (https://man7.org/linux/man-pages/man3/mallinfo.3.html)."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def heap_bytes() -> int:
    """How much of its heap this process uses."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = HeapUse
    return int(mallinfo2().uordblks)


@contextmanager
def conditions() -> Iterator[tuple[SpinCondition, SpinCondition]]:
    """The two ends of what a queue is notified by: of its writer and of its reader."""
    context, address = zmq.Context(), get_open_zmq_ipc_path()
    try:
        writer = SpinCondition(is_reader=False, context=context, notify_address=address)
        yield writer, SpinCondition(is_reader=True, context=context, notify_address=address)
    finally:
        context.destroy(linger=0)


@pytest.fixture
def _read_as_vllm() -> Iterator[None]:
    yield
    SpinCondition.record_read = original(SpinCondition, "record_read")


@pytest.mark.usefixtures("_read_as_vllm")
def test_a_busy_reader_keeps_no_notifications() -> None:
    """vLLM's own keeps more with each until it idles for a second; ours looks once a second."""
    with conditions() as (writer, reader):

        def kept_bytes(reads: int) -> int:
            before = heap_bytes()
            for _ in range(reads):
                writer.notify()
                reader.record_read()
                reader.last_read -= 1  # a second later
                time.sleep(
                    0.0001
                )  # the pace of a queue, not a wait: ZeroMQ drops what comes faster
            reader.last_read -= 1
            time.sleep(0.2)  # ZeroMQ's own thread may be late
            reader.record_read()
            return heap_bytes() - before

        kept_bytes(1000)  # what sockets make once
        reads = 8000
        while kept_bytes(reads) < TELLING_BYTES:
            reads *= 2
            assert reads <= MOST_READS, "vLLM's reader keeps none: the patch may go"
        read_notifications()
        assert kept_bytes(reads) < TELLING_BYTES / 2
