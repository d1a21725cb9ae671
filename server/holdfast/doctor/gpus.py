"""Finds the GPUs of this machine, and the architectures that the installed torch supports.

vLLM is not needed. Importing torch takes a second or two, so it is imported only if the kernel
shows a GPU.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from holdfast.versions import INSTALL_VLLM

DEVICE_NODES = ("dev/nvidiactl", "dev/nvidia0", "dev/dxg", "dev/nvmap")
"""Below the root; the third is that of WSL, the fourth that of boards with unified memory."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NO_GPU = {"", "-1"}
"""Values of that variable that hide every GPU."""
_OLD_DRIVER = re.compile(r"too old|Error 80[34]\b")
_NO_FABRIC_MANAGER = re.compile(r"Error 802\b")
_LIBCUDA = "a container needs libcuda.so.1, too (`NVIDIA_DRIVER_CAPABILITIES=compute,utility`)"
_PLACE_IN_TORCH = re.compile(r"\s*\(Triggered internally at [^)]*\)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that this process may use."""

    name: str
    """Empty if the driver does not report it."""
    architecture: tuple[int, int] | None
    """The compute capability, (12, 1) for GB10; None if the driver does not report it."""
    total_bytes: int
    free_bytes: int
    """What vLLM counts as free; with unified memory, the available memory of the host."""
    is_unified_memory: bool = False
    problem: str = ""
    """Why this GPU cannot be used; empty if it can."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What the driver and torch report before anything is started."""

    gpus: tuple[Gpu, ...] = ()
    torch_architectures: tuple[str, ...] = ()
    """As torch names them: `sm_90`, `compute_120`."""
    are_peers: bool = False
    """Whether every GPU can reach the memory of every other one, as far as all can be asked."""
    problem: str = ""
    """Why no GPU can be used; empty if they can."""
    remedy: str = "repair the driver, so that `nvidia-smi` works."
    """What to change if there is a problem."""


NO_GPUS = GpuFacts()


def find_gpus(root: Path = Path("/")) -> GpuFacts:
    """Find the GPUs of this machine; torch is imported only if there is one."""
    if not any((root / node).exists() for node in DEVICE_NODES):
        return NO_GPUS
    try:
        import torch  # noqa: PLC0415 - only where there is a GPU to ask about
    except (ImportError, OSError, ValueError) as error:  # the last two for libraries of CUDA
        return GpuFacts(
            problem=f"cannot import torch: {_first_line(error)}",
            remedy=f"install it again with vLLM: {INSTALL_VLLM} --force-reinstall.",
        )
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            is_available = torch.cuda.is_available()
        if not is_available:
            return _why_unusable(torch, caught)
        torch.cuda.init()  # before it, torch counts the GPUs of NVML, which CUDA may not have
        count = torch.cuda.device_count()
        gpus = tuple(_gpu(torch, index) for index in range(count))
        return GpuFacts(
            gpus=gpus,
            torch_architectures=tuple(torch.cuda.get_arch_list()),
            are_peers=not any(gpu.problem for gpu in gpus)
            and all(
                torch.cuda.can_device_access_peer(one, other)
                for one in range(count)
                for other in range(count)
                if one != other
            ),
        )
    # A broken driver, or a lost GPU.
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        return GpuFacts(problem=_first_line(error))


def _why_unusable(torch: Any, caught: Sequence[warnings.WarningMessage]) -> GpuFacts:
    """Return why torch finds no GPU: it raises nothing, and at most warns."""
    problem = f"torch {torch.__version__} cannot use it"
    if torch.version.cuda is None:
        return GpuFacts(
            problem=f"{problem}: it is a build without CUDA",
            remedy=f"install the CUDA builds of torch and vLLM: {INSTALL_VLLM} --force-reinstall.",
        )
    said = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    if said:
        reason = " ".join(_PLACE_IN_TORCH.sub("", said[0]).split()).rstrip(".")
        return GpuFacts(
            problem=f"{problem}: {reason}", remedy=_remedy_of_driver(reason, torch.version.cuda)
        )
    if (visible := os.environ.get(_VISIBLE)) is None:
        return GpuFacts(
            problem=problem, remedy=f"repair the driver, so that `nvidia-smi` works; {_LIBCUDA}."
        )
    rename = f"name GPUs that `nvidia-smi -L` prints in {_VISIBLE}, or unset it"
    if visible.strip() in _NO_GPU:
        return GpuFacts(
            problem=f"{problem}: {_VISIBLE}={visible} names no GPU", remedy=f"{rename}."
        )
    return GpuFacts(
        problem=f"{problem}: {_VISIBLE}={visible} may name no GPU of this machine",
        remedy=f"{rename}; {_LIBCUDA}.",
    )


def _remedy_of_driver(reason: str, cuda_version: str) -> str:
    if _OLD_DRIVER.search(reason):
        return (
            f"install a driver for CUDA {cuda_version} (`nvidia-smi` prints the CUDA of the "
            "installed one), or builds of torch and vLLM for an older CUDA."
        )
    if _NO_FABRIC_MANAGER.search(reason):
        return "start nvidia-fabricmanager, in the version of the driver."
    return "check that `nvidia-smi` works and that /dev/nvidia-uvm exists, or reload the driver."


def _gpu(torch: Any, index: int) -> Gpu:
    try:
        properties = torch.cuda.get_device_properties(index)
    except (RuntimeError, AssertionError) as error:  # it is lost
        return Gpu("", None, 0, 0, problem=_first_line(error))
    is_unified = bool(getattr(properties, "is_integrated", False))
    problem = ""
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # another process has filled it, or has it for itself
        free_bytes, total_bytes, problem = 0, properties.total_memory, _first_line(error)
    return Gpu(
        name=properties.name,
        architecture=(properties.major, properties.minor),
        total_bytes=total_bytes,
        free_bytes=psutil.virtual_memory().available if is_unified else free_bytes,
        is_unified_memory=is_unified,
        problem=problem,
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
