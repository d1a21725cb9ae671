"""How much memory has a worker's device, how much is free, and what may workspaces take of it?

Read by vLLM's own `MemorySnapshot` (0.32, 0.33): where a GPU shares the host's memory, as GB10
does, CUDA counts the page cache as taken, and what the host has available is what is free.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from vllm.platforms import current_platform
from vllm.utils.mem_utils import MemorySnapshot

from holdfast.workspace.plan import MIB

MARGIN_BYTES = 256 * MIB
"""Left free on the device when ranks agree on how much each may grow."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One look at a device. On the CPU nothing is known of what torch keeps."""

    free_bytes: int
    total_bytes: int
    cached_bytes: int = 0
    """Held by torch's allocator and used by no tensor."""
    transient_peak_bytes: int = 0
    """The most that tensors took beyond what they take now, since the peak was reset."""

    @property
    def used_bytes(self) -> int:
        """In use on the device, by whomever."""
        return self.total_bytes - self.free_bytes

    def growable_bytes(self, activation_peak_bytes: int) -> int:
        """What workspaces may take so that the activations of the largest step still fit.

        Torch's cache serves activations first: vLLM empties it around the capture of graphs, so
        that at the lock most of their memory looks free.
        """
        claimed_bytes = max(0, activation_peak_bytes - self.cached_bytes)
        return max(0, self.free_bytes - claimed_bytes - MARGIN_BYTES)


def read_device(device: torch.device) -> DeviceReading:
    """The device's own reading; on the CPU the host's."""
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        return DeviceReading(int(memory.available), int(memory.total))
    snapshot = MemorySnapshot(device=device)
    return DeviceReading(
        free_bytes=int(snapshot.free_memory),
        total_bytes=int(snapshot.total_memory),
        # vLLM's allocator for sleep mode goes past torch's count of what it holds.
        cached_bytes=max(0, int(snapshot.torch_memory - snapshot.torch_allocated)),
        transient_peak_bytes=max(0, int(snapshot.torch_peak - snapshot.torch_allocated)),
    )


def is_unified_memory(device: torch.device) -> bool:
    """Whether filling the device's memory fills the host's, as on GB10 and on the CPU."""
    return device.type == "cpu" or bool(current_platform.is_integrated_gpu(device.index))
