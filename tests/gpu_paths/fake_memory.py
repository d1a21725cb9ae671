"""A device with nothing but its memory: what torch, the driver and the host say of it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import psutil
import pytest
import torch
from vllm.platforms import current_platform

GIB = 1024**3
DEVICE = torch.device("meta")
"""Buffers on it have sizes and no bytes, so that a plan of any size costs nothing."""


@dataclass
class FakeMemory:
    """The numbers that the sources of a reading answer; change them as memory is taken."""

    total_bytes: int = 80 * GIB
    free_bytes: int = 60 * GIB
    """By the driver; on a board with unified memory the page cache is not in it."""
    available_bytes: int = 100 * GIB
    """By the host."""
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0
    is_integrated: bool = False
    peak_resets: int = 0

    def install(self, patches: pytest.MonkeyPatch) -> None:
        """Let torch, vLLM's platform and psutil answer with these numbers."""
        patches.setattr(
            torch.accelerator, "get_memory_info", lambda *_: (self.free_bytes, self.total_bytes)
        )
        patches.setattr(torch.accelerator, "memory_reserved", lambda _: self.reserved_bytes)
        patches.setattr(torch.accelerator, "memory_stats", lambda _: self._statistics())
        patches.setattr(torch.accelerator, "reset_peak_memory_stats", self._reset_peak)
        patches.setattr(torch.accelerator, "empty_cache", lambda: None)
        patches.setattr(torch.cuda, "mem_get_info", lambda _: (self.free_bytes, self.total_bytes))
        patches.setattr(
            type(current_platform),
            "is_integrated_gpu",
            classmethod(lambda *_: self.is_integrated),
        )
        patches.setattr(
            psutil,
            "virtual_memory",
            lambda: SimpleNamespace(available=self.available_bytes, total=self.total_bytes),
        )

    def _statistics(self) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.allocated_bytes,
            "allocated_bytes.all.peak": self.peak_bytes,
        }

    def _reset_peak(self, _: torch.device) -> None:
        self.peak_resets += 1
        self.peak_bytes = self.allocated_bytes


def gb10(*, page_cache_bytes: int = 0, available_bytes: int = 50 * GIB) -> FakeMemory:
    """128 GB shared with the host; the page cache of the weights takes a part of it."""
    return FakeMemory(
        total_bytes=120 * GIB,
        free_bytes=available_bytes - page_cache_bytes,
        available_bytes=available_bytes,
        is_integrated=True,
    )
