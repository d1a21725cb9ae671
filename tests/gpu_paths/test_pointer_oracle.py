"""Does every address that a graph captured stay what it was, whatever happens to the manager?

A graph keeps addresses and nothing alive. So of each view that is handed out between seal and lock
the address alone is remembered, and after every later call its memory must be there, belong to
nobody else and, once its buffer is retired, have kept its content.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.v1.worker import ubatching, workspace

from holdfast.errors import HoldfastError
from holdfast.workspace.plan import MIB, Reservation
from memory_pools import DISCARDED, Pool
from workspace_managers import CPU, CapturingManager

LIVES = 1000
CALLS = 30
KIB = 1024
UBATCHES, LANES = 2, 2
SIZES = (1, 300, 4 * KIB, 70 * KIB, 3 * MIB)
DTYPES = (torch.uint8, torch.int8, torch.bfloat16, torch.float32)


@dataclass(slots=True)
class Captured:
    """What a graph knows of a view, and whether its memory lives."""

    slot: int
    address: int
    size_bytes: int
    storage: StorageWeakRef
    retired_content: tuple[int, int] | None = None

    @property
    def ends(self) -> tuple[int, int]:
        """Its first and last byte, as a replay would find them."""
        first, last = self.address, self.address + self.size_bytes - 1
        return ctypes.c_uint8.from_address(first).value, ctypes.c_uint8.from_address(last).value


class Life:
    """One manager after another in one rank, the graphs that were captured, and what is done."""

    def __init__(self, random: Random, *, is_sealing: bool) -> None:
        self.random = random
        self.is_sealing = is_sealing
        self.mark = 0
        self.make()

    def make(self) -> None:
        """A new manager: vLLM drops the graphs with the old one."""
        self.captured: list[Captured] = []
        self.is_capturing = False
        self.pool = pool = Pool()
        self.manager = CapturingManager(CPU, UBATCHES, LANES, alloc_context=lambda: pool)
        limit_bytes = self.random.choice([None, 0, 8 * MIB, 64 * MIB])
        self.manager.bind(None, self.random.choice(["deny", "alongside"]), limit_bytes)

    def live(self) -> None:
        """From the warm-up to the lock, and on."""
        for _ in range(self.random.randint(0, 3)):
            self.do(self.random.choice([self.request, self.reserve, self.hold]))
        self.do(self.seal)
        for _ in range(self.random.randint(1, 10)):
            self.do(self.random.choice([self.request, self.request, self.hold, self.capture]))
        self.do(self.lock)
        later: list[Callable[[], None]] = [
            self.request,
            self.request,
            self.request,
            self.hold,
            self.reserve,
            self.sleep,
            self.seal,
            self.lock,
            self.unlock,
            self.change_policy,
        ]
        for _ in range(CALLS):
            self.do(self.random.choice(later))
        if self.random.random() < 0.3:
            self.reset()
            self.live()

    def do(self, call: Callable[[], None]) -> None:
        """One call, in a slot by chance; what it refuses, it refuses."""
        slot = self.random.randrange(UBATCHES * LANES)
        before = [one.ends for one in self.captured]
        self.slot = slot
        with acting_in(slot), suppress(AssertionError, HoldfastError):
            call()
        self.check(before)

    def check(self, before: list[tuple[int, int]]) -> None:
        """Every captured address is alive, nobody else's, and unchanged where it is retired."""
        current = [buffer for buffer in self.manager._current_workspaces if buffer is not None]
        ranges = [(one.data_ptr(), one.numel()) for one in self.pool.tensors() if one.numel()]
        addresses = {buffer.data_ptr() for buffer in current}
        for one in self.captured:
            assert not one.storage.expired(), f"slot {one.slot}: a captured view is freed"
            owners = [start for start, size in ranges if start <= one.address < start + size]
            assert len(owners) == 1, f"slot {one.slot}: {len(owners)} buffers hold one address"
        for one, ends in zip(self.captured, before, strict=False):
            if self._owner(one, ranges) in addresses:
                continue
            if one.retired_content is None:
                one.retired_content = ends
            assert one.ends == one.retired_content, f"slot {one.slot}: a retired view was written"

    @staticmethod
    def _owner(one: Captured, ranges: list[tuple[int, int]]) -> int:
        return next(start for start, size in ranges if start <= one.address < start + size)

    def request(self) -> None:
        """Some views at once, each written at both ends; captured between seal and lock."""
        specs = [
            ((self.random.choice(SIZES) // dtype.itemsize + 1,), dtype)
            for dtype in self.random.choices(DTYPES, k=self.random.randint(1, 3))
        ]
        views = self.manager.get_simultaneous(*specs)
        self.mark = self.mark % 100 + 1
        for view in views:
            whole = view.view(torch.uint8)
            whole[0] = whole[-1] = self.mark
        if self.is_capturing:
            self.captured += [
                Captured(
                    self.slot,
                    view.data_ptr(),
                    view.nbytes,
                    StorageWeakRef(view.untyped_storage()),
                )
                for view in views
            ]

    def reserve(self) -> None:
        """More for a slot than it has."""
        slot = self.manager.slots[self.slot]
        self.manager.reserve([Reservation(slot, (), self.random.choice(SIZES) + 2 * MIB)])

    def hold(self) -> None:
        """A resource beside scratch."""
        self.manager.get_persistent(self.random.choice("abc"), (4 * KIB,), torch.uint8)

    def seal(self) -> None:
        """Graphs are captured from here to the lock."""
        if self.is_sealing:
            self.manager.seal()
        self.is_capturing = not self.manager._locked

    def capture(self) -> None:
        """The stream is in the middle of a capture, or it is not."""
        self.manager.is_in_capture = not self.manager.is_in_capture

    def lock(self) -> None:
        """Warm-up is over."""
        self.manager.is_in_capture = self.is_capturing = False
        self.manager.lock(self.random.choice([None, 16 * MIB]))

    def unlock(self) -> None:
        """An elastic engine is rebuilt; graphs of an encoder may live, and more are captured."""
        self.manager.unlock()
        self.is_capturing = True

    def change_policy(self) -> None:
        """The front end knows more by now."""
        self.manager.set_policy(self.random.choice(["deny", "alongside"]))

    def sleep(self) -> None:
        """Contents are discarded, addresses stay; waking changes nothing."""
        self.pool.sleep()
        for one in self.captured:
            if one.retired_content is not None:
                one.retired_content = DISCARDED, DISCARDED

    def reset(self) -> None:
        """Nothing outlives its manager."""
        freed = [one.storage for one in self.captured]
        self.make()
        assert all(storage.expired() for storage in freed), "a dropped manager keeps memory"


@contextmanager
def acting_in(slot: int) -> Iterator[None]:
    """As the thread of a ubatch, by vLLM's own table of them, in the context of a lane."""
    ubatch, lane = divmod(slot, LANES)
    thread = threading.get_ident()
    ubatching._THREAD_ID_TO_CONTEXT[thread] = ubatch
    try:
        with workspace.use_workspace_lane(lane):
            yield
    finally:
        del ubatching._THREAD_ID_TO_CONTEXT[thread]


@pytest.fixture(autouse=True)
def _quiet_on_one_thread() -> Iterator[None]:
    """A thousand lives log a lot, and threads of torch wait for each other where others compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("hundred", range(LIVES // 100))
def test_what_a_graph_has_captured_stays_where_it_is(hundred: int) -> None:
    """Through growth, sleep, unlocking, new seals and policies, until the manager is dropped."""
    live(range(hundred * 100, hundred * 100 + 100), is_sealing=True)


def test_the_oracle_sees_what_is_freed() -> None:
    """Without the seal a growth frees what was captured, and that does not pass."""
    with pytest.raises(AssertionError, match="a captured view is freed"):
        live(range(20), is_sealing=False)


def live(numbers: range, *, is_sealing: bool) -> None:
    """The lives of these numbers, each of which is the same every time."""
    for number in numbers:
        try:
            Life(Random(number), is_sealing=is_sealing).live()
        except AssertionError as error:
            raise AssertionError(f"life {number}: {error}") from error
