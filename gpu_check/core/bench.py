"""The subject `manager`: Holdfast's workspace manager on a device, over vLLM's one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_check import vllm_file
from gpu_check.subject_protocol import Errand
from holdfast.workspace.plan import MIB, GrowthPolicy, Reservation, Slot, Term

Graph = Callable[[], None]
"""Computes again what was captured, with the same addresses."""
Capture = Callable[[Callable[[], None]], Graph]


@dataclass(frozen=True, slots=True)
class Bench:
    """What a check makes managers with."""

    device: torch.device
    vllm: Any
    """vLLM's module of workspaces."""
    holdfast: Any
    """Ours, which can be imported once vLLM's is."""
    capture: Capture | None
    """Makes a graph of what a function computes; None where the device has no graphs."""

    def manager(
        self,
        policy: GrowthPolicy,
        *,
        limit_bytes: int | None = None,
        ubatches: int = 1,
        lanes: int = 1,
    ) -> Any:
        """A new manager of ours that follows `policy`."""
        manager = self.holdfast.WorkspaceManager(self.device, ubatches, lanes)
        manager.bind(None, policy, limit_bytes)
        return manager

    def vllm_manager(self) -> Any:
        """A new manager of vLLM's own."""
        return self.vllm.WorkspaceManager(self.device)

    def allocated_bytes(self) -> int:
        """What torch has handed out of the device."""
        return int(torch.cuda.memory_allocated(self.device))

    def tail(self) -> str:
        """Nothing: a manager says nothing."""
        return ""


@contextmanager
def opened(errand: Errand) -> Iterator[Bench]:
    """The bench of this process; on the first device, or on the CPU if there is none."""
    module = vllm_file.load(Path(errand.workspace_file))
    from holdfast.workspace import manager  # noqa: PLC0415 - imports the file just loaded

    if not torch.cuda.is_available():
        # vLLM's manager calls it wherever it runs, and its platform for CPUs replaces it too.
        torch.accelerator.empty_cache = lambda: None
        yield Bench(torch.device("cpu"), module, manager, None)
        return
    torch.cuda.set_device(0)
    yield Bench(torch.device("cuda", 0), module, manager, captured)


def captured(function: Callable[[], None]) -> Graph:
    """A CUDA graph of `function`, after the run on a side stream that a capture needs before it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    replay: Graph = graph.replay
    return replay


def view(manager: Any, size_bytes: int) -> torch.Tensor:
    """Workspace of `size_bytes`, as a layer asks for it."""
    (tensor,) = manager.get_simultaneous(((size_bytes,), torch.uint8))
    return tensor


def reservation(slot: Slot, size_mib: int) -> Reservation:
    """A reservation of a slot, as the plan makes it."""
    size_bytes = size_mib * MIB
    return Reservation(slot, (Term("floor", "gpu-check", size_bytes),), size_bytes)
