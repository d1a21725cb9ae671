"""The workspace manager against its rules, for any order of what can happen to it."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.worker import workspace

from holdfast.workspace.books import NoStats
from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.plan import GrowthPolicy, Reservation

LANES = 2
KIB = 1024
SIZES = st.integers(min_value=0, max_value=6 * KIB).map(lambda size: size * KIB)


class ManagerMachine(RuleBasedStateMachine):
    """Remembers what the manager must not break: contents, addresses and the limit."""

    @initialize(
        policy=st.sampled_from(["deny", "alongside"]),
        limit_bytes=st.integers(min_value=0, max_value=16 * KIB).map(lambda size: size * KIB),
    )
    def start(self, policy: GrowthPolicy, limit_bytes: int) -> None:
        self.manager = WorkspaceManager(torch.device("cpu"), num_lanes=LANES)
        self.manager.bind(NoStats(), policy, limit_bytes)
        self.policy, self.limit_bytes = policy, limit_bytes
        self.locked_bytes: int | None = None
        self.was_sealed_at_lock = False
        self.kept: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.replaced: list[tuple[torch.Tensor, int]] = []
        self.marks: dict[int, tuple[torch.Tensor, int]] = {}
        self.next_mark = 0

    def mark(self, lane: int, view: torch.Tensor) -> None:
        """Write a value of its own into the slot, to be found again after growth."""
        self.next_mark = self.next_mark % 250 + 1
        view.fill_(self.next_mark)
        self.marks[lane] = (view, self.next_mark)

    def buffers(self) -> list[Any]:
        return list(self.manager._current_workspaces)

    def note_replaced(self, before: list[Any]) -> None:
        for lane, (old, new) in enumerate(zip(before, self.buffers(), strict=True)):
            if old is new or old is None:
                continue
            if lane in self.marks:
                self.replaced.append(self.marks.pop(lane))
            if self.manager.is_sealed:
                self.kept.append((weakref.ref(old), old.data_ptr()))

    @rule(lane=st.integers(0, LANES - 1), sizes=st.lists(SIZES, min_size=1, max_size=3))
    def request(self, lane: int, sizes: list[int]) -> None:
        before = self.buffers()
        specs = [((size,), torch.uint8) for size in sizes]
        with workspace.use_workspace_lane(lane):
            try:
                views = self.manager.get_simultaneous(*specs)
            except AssertionError:
                assert self.locked_bytes is not None
                assert self.policy == "deny" or self.manager.is_sealed
                assert all(a is b for a, b in zip(self.buffers(), before, strict=True))
                return
        spans = sorted((view.data_ptr(), view.data_ptr() + view.numel()) for view in views)
        assert [view.numel() for view in views] == sizes
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        self.note_replaced(before)
        del before
        largest = max(views, key=torch.Tensor.numel)
        if largest.numel():
            self.mark(lane, largest)

    @precondition(lambda self: self.locked_bytes is None)
    @rule(lane=st.integers(0, LANES - 1), size_bytes=SIZES)
    def reserve(self, lane: int, size_bytes: int) -> None:
        before = self.buffers()
        self.manager.reserve([Reservation((0, lane), (), size_bytes)])
        assert self.manager.slot_sizes()[0, lane] >= size_bytes
        self.note_replaced(before)

    @rule()
    def seal(self) -> None:
        self.manager.seal()

    @rule()
    def lock(self) -> None:
        if self.locked_bytes is None:
            self.locked_bytes = self.manager.books.held_bytes
            self.was_sealed_at_lock = self.manager.is_sealed
        self.manager.lock()

    @rule()
    def unlock(self) -> None:
        self.locked_bytes = None
        self.manager.unlock()

    @invariant()
    def sizes_are_on_the_books(self) -> None:
        sizes = [0 if buffer is None else buffer.numel() for buffer in self.buffers()]
        assert sizes == self.manager.books.size_bytes
        assert sum(old.numel() for old in self.manager._holdings.retired) == (
            self.manager.books.retired_bytes
        )

    @invariant()
    def the_limit_holds(self) -> None:
        if self.locked_bytes is not None and self.was_sealed_at_lock:
            assert self.manager.books.held_bytes - self.locked_bytes <= self.limit_bytes

    @invariant()
    def retired_buffers_live(self) -> None:
        for reference, address in self.kept:
            buffer = reference()
            assert buffer is not None
            assert buffer.data_ptr() == address

    @invariant()
    def old_views_keep_their_content(self) -> None:
        assert all(bool((view == mark).all()) for view, mark in self.replaced)


ManagerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestManager = ManagerMachine.TestCase
