"""Finds the GPUs of this machine, and the architectures that the installed torch supports.

vLLM is not needed. Importing torch takes a second or two, so it is imported only if the kernel
shows a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

DEVICE_NODES = ("dev/nvidiactl", "dev/nvidia0", "dev/dxg", "dev/nvmap")
"""Below the root; the third is that of WSL, the fourth that of boards with unified memory."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that this process may use."""

    name: str
    architecture: tuple[int, int]
    """The compute capability, (12, 1) for GB10."""
    total_bytes: int
    free_bytes: int
    """What vLLM counts as free; with unified memory, the available memory of the host."""
    is_unified_memory: bool = False


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What the driver and torch report before anything is started."""

    gpus: tuple[Gpu, ...] = ()
    torch_architectures: tuple[str, ...] = ()
    """As torch names them: `sm_90`, `compute_120`."""
    are_peers: bool = False
    """Whether every GPU can reach the memory of every other one."""
    problem: str = ""
    """Why the GPUs cannot be used; empty if they can."""


NO_GPUS = GpuFacts()


def find_gpus(root: Path = Path("/")) -> GpuFacts:
    """Find the GPUs of this machine; torch is imported only if there is one."""
    if not any((root / node).exists() for node in DEVICE_NODES):
        return NO_GPUS
    try:
        import torch  # noqa: PLC0415 - only where there is a GPU to ask about
    except ImportError as error:
        return GpuFacts(problem=f"cannot import torch: {error}")
    try:
        if not torch.cuda.is_available():
            return GpuFacts(problem=f"torch {torch.__version__} cannot use it")
        count = torch.cuda.device_count()
        return GpuFacts(
            gpus=tuple(_gpu(torch, index) for index in range(count)),
            torch_architectures=tuple(torch.cuda.get_arch_list()),
            are_peers=all(
                torch.cuda.can_device_access_peer(one, other)
                for one in range(count)
                for other in range(count)
                if one != other
            ),
        )
    except RuntimeError as error:  # a broken driver, or a lost or full GPU
        return GpuFacts(problem=str(error).splitlines()[0])


def _gpu(torch: object, index: int) -> Gpu:
    cuda = torch.cuda  # type: ignore[attr-defined]  # torch is Any to us
    properties = cuda.get_device_properties(index)
    is_unified = bool(getattr(properties, "is_integrated", False))
    free_bytes, total_bytes = cuda.mem_get_info(index)
    return Gpu(
        name=properties.name,
        architecture=(properties.major, properties.minor),
        total_bytes=total_bytes,
        free_bytes=psutil.virtual_memory().available if is_unified else free_bytes,
        is_unified_memory=is_unified,
    )
