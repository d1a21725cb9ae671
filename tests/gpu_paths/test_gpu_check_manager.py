"""The kit's checks of a workspace manager: a right one passes, and each wrong one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker import workspace as vllm_workspace

from gpu_check.core import bench, exhaustion, graphs, lives, refusals, residence
from gpu_check.records import CheckFailedError, CheckSkippedError, Measured
from holdfast.workspace import growth
from holdfast.workspace import manager as holdfast_manager
from holdfast.workspace.accounting import RetainedMemory
from holdfast.workspace.buffers import Allocator
from holdfast.workspace.plan import MIB
from replayable_graphs import recorded


@pytest.fixture
def on_graphs(monkeypatch: pytest.MonkeyPatch) -> bench.Bench:
    """The bench of a device with graphs."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    return bench.Bench(torch.device("cpu"), vllm_workspace, holdfast_manager, recorded)


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize(
    "check", [graphs.growth, graphs.no_growth_in_capture, exhaustion.check, refusals.check]
)
def test_a_right_manager_passes(
    on_graphs: bench.Bench, check: Callable[[bench.Bench], Sequence[Measured]]
) -> None:
    """Each check of the manager finds nothing, and says what it measured."""
    assert check(on_graphs)


def test_random_lives_of_a_right_manager_pass(on_graphs: bench.Bench) -> None:
    """Nothing is freed or written to."""
    assert lives.check(on_graphs)[0] == Measured("lives", 5)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is captured while a capture is recorded."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    monkeypatch.setattr(
        holdfast_manager, "_is_capturing", lambda _: _get_current_dispatch_mode() is not None
    )


def test_a_manager_that_frees_what_a_graph_holds_fails(
    on_graphs: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without retired buffers a graph and a random life both meet freed memory."""
    monkeypatch.setattr(RetainedMemory, "retire", lambda *_: None)
    with pytest.raises(RuntimeError, match="nothing is at"):
        graphs.growth(on_graphs)
    with pytest.raises(CheckFailedError, match="was freed"):
        lives.check(on_graphs)


def test_a_manager_that_grows_in_a_capture_fails(on_graphs: bench.Bench) -> None:
    """Here the manager is not told that the stream is captured."""
    with pytest.raises(CheckFailedError, match="grew while the stream was captured"):
        graphs.no_growth_in_capture(on_graphs)


def test_a_manager_with_other_words_fails(
    on_graphs: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both texts stand in the reason."""
    monkeypatch.setattr(growth, "_verdict", lambda *_: "No.")
    with pytest.raises(CheckFailedError, match=r"not allowed after locking.*MB\. No\."):
        refusals.check(on_graphs)


def test_a_device_without_graphs_skips_them(on_graphs: bench.Bench) -> None:
    """A check that is run all the same says why it shows nothing."""
    with pytest.raises(CheckSkippedError, match="captures no graphs"):
        graphs.growth(replace(on_graphs, capture=None))


class CountingDevice:
    """The parts of torch.cuda that `resident_reservation` asks, over what a manager allocates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stolen_bytes: int = 0) -> None:
        self.allocated_bytes = 0
        self.taken_by_others_bytes = 0
        self.stolen_bytes = stolen_bytes
        buffer = Allocator.buffer

        def counted(allocator: Allocator, size_bytes: int, *, is_touched: bool) -> torch.Tensor:
            self.allocated_bytes += size_bytes
            self.taken_by_others_bytes += self.stolen_bytes
            return buffer(allocator, size_bytes, is_touched=is_touched)

        monkeypatch.setattr(Allocator, "buffer", counted)
        for name in ("empty_cache", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.allocated_bytes)
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.mem_get_info)
        shape = SimpleNamespace(is_integrated=False)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: shape)

    def mem_get_info(self) -> tuple[int, int]:
        """Free and in all."""
        return (1 << 40) - self.allocated_bytes - self.taken_by_others_bytes, 1 << 40


def test_a_reservation_that_takes_its_bytes_passes(
    on_graphs: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's count and by the driver's."""
    CountingDevice(monkeypatch)
    found = [one.value for one in residence.check(on_graphs)]
    assert found == [64 * MIB, 64 * MIB, 64 * MIB]


def test_a_reservation_beside_a_neighbour_says_so(
    on_graphs: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose every allocation comes at the same time as ours."""
    CountingDevice(monkeypatch, stolen_bytes=2 * MIB)
    with pytest.raises(CheckFailedError, match="is something else running on it"):
        residence.check(on_graphs)


def test_a_reservation_that_is_not_there_at_once_fails(
    on_graphs: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager that only notes it."""
    CountingDevice(monkeypatch)
    monkeypatch.setattr(holdfast_manager.WorkspaceManager, "reserve", lambda *_: None)
    with pytest.raises(CheckFailedError, match="67108864 bytes were reserved, 0 allocated"):
        residence.check(on_graphs)


def test_a_capture_comes_after_a_run_on_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a first run allocates is not in the graph, and the two streams wait for each other."""
    told: list[str] = []

    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            told.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def entered(thing: Any) -> Iterator[None]:
        told.append(f"enter {thing.name}")
        yield
        told.append(f"leave {thing.name}")

    graph = SimpleNamespace(name="graph", replay=lambda: told.append("replay"))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", entered)
    bench.captured(lambda: told.append("run"))()
    around = ["side waits for current", "enter side", "run", "leave side", "current waits for side"]
    assert told == [*around, "enter graph", "run", "leave graph", "replay"]
