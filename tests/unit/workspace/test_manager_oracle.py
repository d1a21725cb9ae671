"""The workspace manager against an oracle, for any order of what can happen to it."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.worker import workspace

from holdfast.errors import HoldfastError
from holdfast.records import RankStats
from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.plan import Reservation
from holdfast.workspace.stats import StatsWriter, read_stats
from memory_pools import DISCARDED, Graphs, Pool
from oracle import ALIGNMENT_BYTES, MIB, Oracle, Policy, Refusal, offsets
from workspace_managers import CPU, CapturingManager

KIB = 1024
MAX_BYTES = 32 * MIB
SIZES = st.one_of(st.integers(0, 3 * KIB), st.integers(0, 6 * KIB).map(lambda size: size * KIB))
LIMITS = st.one_of(st.integers(0, 2 * KIB), st.integers(0, 16 * KIB)).map(lambda size: size * KIB)
# Sealed and locked: vLLM seals nothing where it captures no graph.
CLOSED = st.sampled_from(
    [(True, True), (True, True), (True, True), (True, False), (False, True), (False, False)]
)
REASONS = {
    "deny": "the growth policy is deny",
    "capture": "captured into a graph",
    "limit": "the growth limit is {:.2f} MB",
}


def small_kernel(manager: WorkspaceManager, sizes: list[int]) -> list[torch.Tensor]:
    """The first of two callers."""
    return manager.get_simultaneous(*[((size,), torch.uint8) for size in sizes])


def large_kernel(manager: WorkspaceManager, sizes: list[int]) -> list[torch.Tensor]:
    """The second caller, with another type: a known spec does not look for its caller."""
    return manager.get_simultaneous(*[((size,), torch.int8) for size in sizes])


awake = precondition(lambda self: not self.oracle.is_asleep)
"""Nothing requests memory while vLLM sleeps."""

limited = precondition(
    lambda self: self.oracle.is_locked and self.oracle.is_sealed and not self.oracle.is_asleep
)
"""The growth limit applies."""


class OracleMachine(RuleBasedStateMachine):
    """Does the same to the manager and to the oracle, and compares them after every step."""

    @initialize(
        ubatches=st.integers(1, 2),
        lanes=st.integers(1, 2),
        policy=st.sampled_from(["deny", "alongside", "alongside"]),
        limit_bytes=st.one_of(LIMITS, LIMITS, st.none()),
        closed=CLOSED,
    )
    def start(
        self,
        ubatches: int,
        lanes: int,
        policy: Policy,
        limit_bytes: int | None,
        closed: tuple[bool, bool],
    ) -> None:
        self.shape = (ubatches, lanes)
        self.oracle = Oracle(ubatches, lanes, policy, limit_bytes)
        self.writer = StatsWriter(Path(self.directory.name), engine=0, rank=0, generation=1)
        self.make()
        self.close(*closed)

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.patches = pytest.MonkeyPatch()
        self.next_mark = 0

    def teardown(self) -> None:
        self.patches.undo()
        self.directory.cleanup()

    def make(self) -> None:
        """A new manager in the place of what was there, bound to the stats of the rank."""
        self.pool = pool = Pool()
        self.manager = CapturingManager(CPU, *self.shape, alloc_context=lambda: pool)
        self.manager.is_in_capture = self.oracle.is_capturing
        self.manager.bind(self.writer, self.oracle.policy, self.oracle.given_limit_bytes)
        self.earlier_rejections = dict(self.oracle.rank.rejections)
        self.graphs = Graphs()
        self.contents: list[tuple[torch.Tensor, int]] = []
        self.current: dict[int, tuple[torch.Tensor, int]] = {}
        self.resources: dict[tuple[int, str], torch.Tensor] = {}

    def close(self, is_sealed: bool, is_locked: bool) -> None:
        """Go where most rules apply: locked, with a resource and with a retired buffer."""
        self.resource(0, "a", 64, is_said=True)
        self.grow(0, 4 * KIB)
        if is_sealed:
            self.seal()
            self.grow(0, 4 * KIB)
        if is_locked:
            self.lock(None)
        if is_sealed and is_locked:
            self.grow_to_the_limit(0, 1)  # is refused, and the refusal names the limit

    @contextmanager
    def acting_in(self, index: int) -> Iterator[int]:
        """As the thread of a ubatch and the context of a lane; yields the slot that they have."""
        index %= len(self.oracle.slots)
        ubatch, lane = divmod(index, self.shape[1])
        self.patches.setattr(workspace, "dbo_current_ubatch_id", lambda: ubatch)
        with workspace.use_workspace_lane(lane), self.watching_buffers():
            yield index

    @contextmanager
    def watching_buffers(self) -> Iterator[None]:
        """Where a buffer was replaced: kept once sealed, else gone unless a view needs it."""
        before, marks = self.buffers(), dict(self.current)
        was_sealed = self.oracle.is_sealed  # what the seal itself replaces, no graph has captured
        yield
        after = self.buffers()
        for index, mark in marks.items():
            if before[index] is not after[index]:
                if was_sealed:
                    self.contents.append(mark)
                if self.current[index] is mark:
                    del self.current[index]
        changed = [
            weakref.ref(old)
            for old, new in zip(before, after, strict=True)
            if old is not None and old is not new
        ]
        marks.clear()
        del before, after
        if changed and not was_sealed:
            gc.collect(0)
            assert all(reference() is None for reference in changed), "a replaced buffer is kept"

    def buffers(self) -> list[Any]:
        """The current buffer of each slot."""
        return list(self.manager._current_workspaces)

    def ask(self, index: int, sizes: list[int], *, is_large: bool) -> None:
        """One request of both, and what its views look like."""
        ask = large_kernel if is_large else small_kernel
        expected = self.oracle.request(index, sizes, ask.__name__)
        try:
            views = ask(self.manager, sizes)
        except AssertionError:
            assert expected is not None
            self.check_refusal(expected, ask.__name__)
            return
        assert expected is None, f"not refused: {expected}"
        self.check_views(index, sizes, views)

    def check_views(self, index: int, sizes: list[int], views: list[torch.Tensor]) -> None:
        """Each view lies in the buffer of its slot where vLLM would put it."""
        assert [view.numel() for view in views] == sizes
        buffer = self.manager._current_workspaces[index]
        for view, start in zip(views, offsets(sizes), strict=False):
            if view.numel():
                assert buffer is not None
                assert view.data_ptr() == buffer.data_ptr() + start
                assert start + view.numel() <= buffer.numel()
        largest = max(views, key=torch.Tensor.numel, default=None)
        if largest is not None and largest.numel():
            self.next_mark = self.next_mark % 120 + 1
            largest[0] = largest[-1] = self.next_mark  # all of it would cost too much
            self.current[index] = (largest, self.next_mark)

    def check_refusal(self, expected: Refusal, caller: str) -> None:
        """The stats have it before the caller can catch the error."""
        found = self.stats().last_rejection
        assert found is not None
        assert (found.kind, found.needed_bytes, found.held_bytes) == (
            expected.kind,
            expected.needed_bytes,
            expected.held_bytes,
        )
        assert found.caller.endswith(f":{caller}")
        assert REASONS[expected.reason].format(self.oracle.limit_bytes / MIB) in found.reason

    def stats(self) -> RankStats:
        """What a reader sees."""
        stats = read_stats(self.writer.path, reads_steps=False)
        assert stats is not None
        return stats

    @awake
    @rule(index=st.integers(0, 3), sizes=st.lists(SIZES, max_size=3), is_large=st.booleans())
    def request(self, index: int, sizes: list[int], *, is_large: bool) -> None:
        with self.acting_in(index) as slot:
            self.ask(slot, sizes, is_large=is_large)

    @awake
    @rule(index=st.integers(0, 3), more_bytes=st.sampled_from([1, 4 * KIB, MIB, 3 * MIB]))
    def grow(self, index: int, more_bytes: int) -> None:
        with self.acting_in(index) as slot:
            held_bytes = self.oracle.slots[slot].size_bytes or 0
            if held_bytes < MAX_BYTES:
                self.ask(slot, [held_bytes + more_bytes], is_large=True)

    @limited
    @rule(index=st.integers(0, 3), beyond_bytes=st.sampled_from([-ALIGNMENT_BYTES, 0, 1]))
    def grow_to_the_limit(self, index: int, beyond_bytes: int) -> None:
        room_bytes = self.oracle.room_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES + beyond_bytes
        with self.acting_in(index) as slot:
            larger_bytes = (self.oracle.slots[slot].size_bytes or 0) + 1
            if room_bytes < MAX_BYTES or beyond_bytes > 0:  # what is refused costs nothing
                self.ask(slot, [max(room_bytes, larger_bytes)], is_large=True)

    @limited
    @rule(index=st.integers(0, 3), beyond_bytes=st.sampled_from([-1, 0, 1]))
    def resource_to_the_limit(self, index: int, beyond_bytes: int) -> None:
        size_bytes = self.oracle.room_bytes + beyond_bytes
        with self.acting_in(index) as slot:
            if 0 < size_bytes < MAX_BYTES:
                self.hold(slot, str(size_bytes), size_bytes, is_said=True)

    @awake
    @rule(index=st.integers(0, 3), size_bytes=SIZES)
    def reserve(self, index: int, size_bytes: int) -> None:
        with self.watching_buffers():
            place = index % len(self.oracle.slots)
            is_met = self.oracle.reserve(place, size_bytes)
            reservation = Reservation(self.manager.slots[place], (), size_bytes)
            try:
                self.manager.reserve([reservation])
            except HoldfastError:
                assert not is_met
            else:
                assert is_met

    @awake
    @precondition(lambda self: not self.oracle.is_locked)
    @rule(index=st.integers(0, 3), more_bytes=st.sampled_from([KIB, 4 * MIB]))
    def reserve_in_one_ubatch_and_grow_another(self, index: int, more_bytes: int) -> None:
        held_bytes = self.oracle.slots[index % len(self.oracle.slots)].size_bytes or 0
        if held_bytes < MAX_BYTES:
            self.reserve(index, held_bytes + more_bytes)
            self.grow(index + self.shape[1], 1)

    @awake
    @rule(
        index=st.integers(0, 3),
        key=st.sampled_from("abc"),
        size_kib=st.integers(1, 4 * KIB),
        is_said=st.booleans(),
    )
    def resource(self, index: int, key: str, size_kib: int, *, is_said: bool) -> None:
        key = key.upper() if is_said else key
        with self.acting_in(index) as slot:
            size_bytes = self.oracle.slots[slot].resources.get(key, size_kib * KIB)
            self.hold(slot, key, size_bytes, is_said=is_said)

    def hold(self, slot: int, key: str, size_bytes: int, *, is_said: bool) -> None:
        """Get one resource from both, and check that it is the slot's own."""
        expected = self.oracle.persistent(slot, key, size_bytes, is_said=is_said)
        try:
            tensor = self.make_resource(key, size_bytes, is_said=is_said)
        except AssertionError:
            assert expected is not None
            self.check_refusal(expected, "make_resource")
            return
        assert expected is None
        assert tensor.numel() == size_bytes
        if (slot, key) not in self.resources:
            tensor.fill_(slot + 1)
        assert self.resources.setdefault((slot, key), tensor) is tensor

    def make_resource(self, key: str, size_bytes: int, *, is_said: bool) -> torch.Tensor:
        """Return a resource of a slot, as a layer gets it."""
        if is_said:
            return self.manager.get_persistent(key, (size_bytes,), torch.uint8)
        made = self.manager.get_persistent_resource(
            key, lambda: {"rows": torch.empty(size_bytes, dtype=torch.uint8)}
        )
        return made["rows"]

    @awake
    @precondition(lambda self: not self.oracle.is_capturing)
    @rule()
    def sleep(self) -> None:
        self.oracle.sleep()
        self.pool.sleep()
        self.contents = [(view, DISCARDED) for view, _ in self.contents]
        self.current = {index: (view, DISCARDED) for index, (view, _) in self.current.items()}

    @precondition(lambda self: self.oracle.is_asleep)
    @rule()
    def wake(self) -> None:
        self.oracle.wake()
        assert all(int(tensor.max()) == DISCARDED for tensor in self.pool.tensors() if len(tensor))

    @awake
    @rule()
    def seal(self) -> None:
        with self.watching_buffers():
            self.manager.seal()
            self.oracle.seal()

    @awake
    @rule(is_capturing=st.sampled_from([False, False, True]))
    def capture(self, *, is_capturing: bool) -> None:
        self.oracle.is_capturing = self.manager.is_in_capture = is_capturing

    @awake
    @rule(limit_bytes=st.one_of(st.none(), LIMITS))
    def lock(self, limit_bytes: int | None) -> None:
        with self.watching_buffers():
            self.oracle.lock(limit_bytes)
            self.manager.lock(limit_bytes)

    @awake
    @precondition(lambda self: self.oracle.is_locked)
    @rule()
    def unlock(self) -> None:
        self.oracle.is_locked = False
        self.manager.unlock()

    @rule(policy=st.sampled_from(["deny", "alongside", "alongside"]))
    def change_policy(self, policy: Policy) -> None:
        self.oracle.policy = policy
        self.manager.set_policy(policy)

    @precondition(lambda self: self.oracle.held_bytes)
    @rule(closed=CLOSED)
    def reset(self, closed: tuple[bool, bool]) -> None:
        self.oracle.reset()
        self.make()
        self.close(*closed)

    @invariant()
    def stats_agree(self) -> None:
        stats, rank = self.stats(), self.oracle.rank
        slots = self.oracle.slots
        assert [slot.size_bytes for slot in stats.slots] == [s.size_bytes or 0 for s in slots]
        assert [slot.reserved_bytes for slot in stats.slots] == [s.reserved_bytes for s in slots]
        assert [slot.high_water_bytes for slot in stats.slots] == rank.high_water_bytes
        assert [(slot.ubatch, slot.lane) for slot in stats.slots] == list(self.manager.slots)
        assert stats.retired_bytes == sum(self.oracle.retired)
        assert stats.persistent_bytes == self.oracle.persistent_bytes
        assert (stats.is_sealed, stats.is_locked) == (self.oracle.is_sealed, self.oracle.is_locked)
        assert stats.growths == rank.growths
        assert stats.rejections == rank.rejections
        assert _needs_by_function(stats) == rank.callers

    @invariant()
    def books_agree(self) -> None:
        accounting = self.manager.accounting
        assert accounting.held_bytes == self.oracle.held_bytes
        for kind, count in accounting.rejections.items():
            assert count + self.earlier_rejections[kind] == self.oracle.rank.rejections[kind]

    @invariant()
    def buffers_agree(self) -> None:
        sizes = [0 if buffer is None else buffer.numel() for buffer in self.buffers()]
        assert sizes == [slot.size_bytes or 0 for slot in self.oracle.slots]

    @invariant()
    def no_view_points_into_freed_memory(self) -> None:
        if self.oracle.is_sealed:
            for buffer in self.buffers():
                if buffer is not None:
                    self.graphs.capture(buffer)
        self.graphs.check()
        for view, mark in (*self.contents, *self.current.values()):
            assert int(view[0]) == int(view[-1]) == mark

    @invariant()
    def resources_keep_their_content(self) -> None:
        for (slot, _), tensor in self.resources.items():
            assert int(tensor[0]) == int(tensor[-1]) == slot + 1

    @invariant()
    def all_scratch_and_nothing_else_is_in_the_pool(self) -> None:
        scratch = [*filter(lambda buffer: buffer is not None, self.buffers())]
        scratch += self.manager._retained.retired
        lasting = sorted(tensor.data_ptr() for tensor in self.pool.tensors())
        assert lasting == sorted(buffer.data_ptr() for buffer in scratch)

    @invariant()
    def memos_hold_views_of_the_current_buffer_alone(self) -> None:
        for buffer, memo in zip(self.buffers(), self.manager._memos, strict=True):
            for view in (view for views in memo.values() for view in views if view.numel()):
                storage = view.untyped_storage()
                assert buffer is not None
                assert storage.data_ptr() == buffer.untyped_storage().data_ptr()


def _needs_by_function(stats: RankStats) -> dict[str, int]:
    needs: dict[str, int] = {}
    for caller, needed_bytes in stats.callers.items():
        if not needed_bytes:  # who asks for nothing again is not seen
            continue
        name = caller.rpartition(":")[2]
        needs[name] = max(needs.get(name, 0), needed_bytes)
    return needs


OracleMachine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestManagerAgainstOracle = OracleMachine.TestCase


def test_what_the_seal_replaces_is_freed() -> None:
    """At the seal, a reservation of one ubatch applies to the other, before any capture."""
    machine = OracleMachine()
    calls: list[Callable[[], None]] = [
        lambda: machine.start(2, 1, "alongside", None, closed=(True, True)),
        machine.sleep,
        lambda: machine.reset(closed=(False, False)),
        lambda: machine.reserve(index=1, size_bytes=8 * KIB),
        machine.seal,
        machine.sleep,
        machine.wake,
    ]
    try:
        for call in calls:
            call()
            for agreement in machine.invariants:
                agreement.function(machine)
    finally:
        machine.teardown()
