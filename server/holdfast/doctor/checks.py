"""What is wrong with this machine, its environment or the flags? Pure functions of records.

A failure means that `holdfast serve` cannot work with these flags; a check that is not sure warns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping

from holdfast.doctor.findings import GIB, Finding, HazardName, failure, gib, ok, warning
from holdfast.doctor.gpu_checks import check_gpus
from holdfast.doctor.machine import Machine
from holdfast.doctor.parallelism import Layout
from holdfast.engine.unsupported import (
    REFUSED_VARIABLES,
    is_on,
    refuse_environment,
)
from holdfast.errors import HoldfastError, UsageError
from holdfast.settings.variable_names import refuse_mistyped_variables
from holdfast.versions import INSTALL_VLLM, is_supported_vllm
from holdfast.workspace.plan import MIB

AMPLE_SHARED_BYTES = GIB
"""NCCL needs more on top, depending on how the GPUs are connected: one segment of 9.2 MiB for each
rank and more in https://github.com/NVIDIA/nccl/issues/1518, none if GPUs reach each other
directly."""
QUEUE_CHUNKS = 10
ANSWER_CHUNK_BYTES = 24 * MIB
DEFAULT_CALL_CHUNK_MIB = 16
_REFUSALS: tuple[HazardName, ...] = ("plugins", "startup-plan")
"""In the order of `REFUSED_VARIABLES`."""
_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs"}
_WHOLE_NUMBERS = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_MQ_MAX_CHUNK_BYTES_MB")
_WORKER_METHODS = ("fork", "spawn")

MachineCheck = Callable[[Machine, Layout], Iterator[Finding]]


def check_machine(machine: Machine, layout: Layout) -> Iterator[Finding]:
    """Yield every finding about this machine, in the order in which a start would meet them."""
    for check in CHECKS:
        yield from check(machine, layout)


def check_environment(
    environment: Mapping[str, str], *, is_demo: bool, unknown: Container[str] = ()
) -> Iterator[Finding]:
    """Yield what is wrong with the variables of this machine or of a manifest.

    The `unknown` variables may be set, but their values cannot be seen.
    """
    for variable, name in zip(REFUSED_VARIABLES, _REFUSALS, strict=True):
        absent = "cannot be checked from here" if variable in unknown else "is not set"
        yield _refusal(environment, variable, name, is_demo=is_demo, absent=absent)
    yield from _check_variables(environment)
    if is_on("VLLM_SERVER_DEV_MODE", environment):
        yield warning(
            "dev-mode",
            "VLLM_SERVER_DEV_MODE adds vLLM's routes for sleep, collective calls and resets, "
            "which anyone with the admin key can use.",
            "unset it, unless you use these routes.",
        )


def shared_memory(
    free_bytes: int,
    layout: Layout,
    environment: Mapping[str, str],
    *,
    is_cpu_build: bool,
    remedy: str,
) -> Finding:
    """Return whether vLLM's queues and what ranks exchange through NCCL fit into /dev/shm."""
    name: HazardName = "shared-memory"
    seen = f"{free_bytes / MIB:.0f} MiB in /dev/shm"
    needed_bytes = least_shared_bytes(environment)
    if layout.has_worker_processes(is_cpu_build=is_cpu_build) and free_bytes < needed_bytes:
        return failure(
            name,
            f"{seen}, but vLLM needs {needed_bytes / MIB:.0f} MiB there for a queue.",
            remedy,
        )
    if layout.ranks <= 1 or free_bytes >= AMPLE_SHARED_BYTES:
        return ok(name, seen)
    return warning(
        name,
        f"{seen} for {layout.ranks} ranks: what they exchange in addition to vLLM's queues "
        "(NCCL's segments) may not fit, which ends a rank with a bus error.",
        remedy,
    )


def least_shared_bytes(environment: Mapping[str, str]) -> int:
    """Return the size of the larger of a worker's two queues; each has to fit when vLLM makes it.

    Each has ten chunks, with a byte for the writer and one for each reader. See `ShmRingBuffer` in
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/distributed/device_communicators/shm_broadcast.py.
    """
    given = environment.get("VLLM_MQ_MAX_CHUNK_BYTES_MB", "")
    call_mib = int(given) if given.isdigit() else DEFAULT_CALL_CHUNK_MIB
    return QUEUE_CHUNKS * (max(ANSWER_CHUNK_BYTES, call_mib * MIB) + 2)


def _refusal(
    environment: Mapping[str, str],
    variable: str,
    name: HazardName,
    *,
    is_demo: bool,
    absent: str,
) -> Finding:
    given = {variable: environment[variable]} if variable in environment else {}
    try:
        refuse_environment(given, is_demo=is_demo)
    except HoldfastError as error:
        return failure(name, error.cause, error.remedy)
    return ok(name, f"{variable}={given[variable]}" if given else f"{variable} {absent}")


def _check_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    for variable, value in environment.items():
        try:
            refuse_mistyped_variables({variable: value})
        except UsageError as error:
            yield failure("variables", error.cause, error.remedy)
    method = environment.get("VLLM_WORKER_MULTIPROC_METHOD")
    if method is not None and method not in _WORKER_METHODS:
        yield failure(
            "variables",
            f"vLLM does not accept VLLM_WORKER_MULTIPROC_METHOD={method}.",
            f"use {' or '.join(_WORKER_METHODS)}, or unset it.",
        )
    for variable in _WHOLE_NUMBERS:
        text = environment.get(variable, "")
        if text and not text.strip().isdigit():
            yield failure(
                "variables", f"{variable}={text} is not a whole number.", "correct it, or unset it."
            )


def _check_vllm(machine: Machine, _layout: Layout) -> Iterator[Finding]:
    version = machine.vllm_version
    if version == "not installed":
        yield failure("vllm", "vLLM is not installed.", f"{INSTALL_VLLM}.")
    elif not is_supported_vllm(version):
        yield warning("vllm", f"vLLM {version} is untested with Holdfast.", f"{INSTALL_VLLM}.")
    else:
        yield ok("vllm", f"vLLM {version}, {'CPU' if machine.is_cpu_build else 'CUDA'} build")


def _check_shared_memory(machine: Machine, layout: Layout) -> Iterator[Finding]:
    remedy = "start the container with --ipc=host or --shm-size 16g."
    yield shared_memory(
        machine.shared_memory_free_bytes,
        layout,
        machine.environment,
        is_cpu_build=machine.is_cpu_build,
        remedy=remedy,
    )


def _check_packages(machine: Machine, _layout: Layout) -> Iterator[Finding]:
    if not machine.has_plugin:
        yield failure(
            "plugins",
            "holdfast is not among the installed vllm.general_plugins: no rank would report its "
            "workspaces.",
            "install Holdfast with pip; PYTHONPATH alone is not enough.",
        )
    if machine.is_cpu_build and machine.cuda_packages:
        yield warning(
            "vllm",
            f"{', '.join(machine.cuda_packages)}: built for CUDA; with them, transformers cannot "
            "be imported beside vLLM's CPU build.",
            f"pip uninstall {' '.join(one.split()[0] for one in machine.cuda_packages)}",
        )


def _check_host_memory(machine: Machine, layout: Layout) -> Iterator[Finding]:
    is_sized = layout.has_kv_cache_size or machine.environment.get("VLLM_CPU_KVCACHE_SPACE")
    if not machine.is_cpu_build or is_sized:
        return
    name: HazardName = "host-memory"
    memory = machine.memory
    wanted_bytes = math.ceil(memory.total_bytes * layout.gpu_memory_utilization)
    seen = f"{gib(memory.available_bytes)} of {gib(memory.total_bytes)} available"
    # The CPUs that the variable names may be on another node than the one that was read.
    is_bound = machine.environment.get("VLLM_CPU_OMP_THREADS_BIND", "auto") != "auto"
    if memory.available_bytes < wanted_bytes:
        yield failure(
            name,
            f"{seen}, but vLLM refuses to start below {gib(wanted_bytes)}.",
            "lower --gpu-memory-utilization, which is a share of this memory here, or set "
            "--kv-cache-memory-bytes.",
            is_sure=machine.numa_nodes == 1 or not is_bound,
        )
    else:
        yield ok(name, f"{seen}; vLLM wants {gib(wanted_bytes)}")


def _check_state_directory(machine: Machine, _layout: Layout) -> Iterator[Finding]:
    name: HazardName = "state-directory"
    directory = machine.state_directory
    lost = "what was learned, and which size froze the machine, is lost"
    if directory is None:
        yield warning(
            name, f"--learned-dir none: {lost}.", "name a directory that outlives the server."
        )
        return
    seen = f"{directory.path} is on {directory.mount_point} ({directory.filesystem})"
    if not directory.is_writable:
        yield warning(
            name,
            f"this user cannot write to {directory.path}: {lost}.",
            "give uid 10001, or the user that runs the server, write access.",
        )
    elif directory.filesystem in _MEMORY_FILESYSTEMS or (
        machine.is_container and directory.mount_point == "/"
    ):
        yield warning(
            name, f"{seen}: {lost} with it.", f"mount a volume at {directory.path} (`-v`)."
        )
    else:
        yield ok(name, seen)


def _check_build_tools(machine: Machine, layout: Layout) -> Iterator[Finding]:
    name: HazardName = "build-tools"
    missing = ", ".join(machine.missing_build_tools)
    packages = "g++ python3-dev" + " ninja-build" * ("ninja" in machine.missing_build_tools)
    remedy = f"install them: apt-get install {packages}."
    if not missing:
        yield ok(name, "what compiles kernels is installed")
    elif machine.is_cpu_build and layout.compiles:
        yield failure(
            name, f"{missing} not found: torch needs it to compile the model for this CPU.", remedy
        )
    else:
        yield warning(
            name, f"{missing} not found: Triton or FlashInfer needs it to compile kernels.", remedy
        )


def _check_cpu_binding(machine: Machine, layout: Layout) -> Iterator[Finding]:
    if not machine.is_cpu_build or layout.ranks == 1:
        return
    name: HazardName = "cpu-binding"
    binding = machine.environment.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    seen = f"{layout.ranks} ranks on {machine.numa_nodes} NUMA node(s), {binding=}"
    if binding == "auto" and machine.numa_nodes < layout.ranks:
        yield failure(
            name,
            f"{seen}: vLLM gives each rank its own NUMA node.",
            'name the CPUs of each rank, for example VLLM_CPU_OMP_THREADS_BIND="0|1".',
        )
    else:
        yield ok(name, seen)


CHECKS: tuple[MachineCheck, ...] = (
    _check_vllm,
    _check_packages,
    check_gpus,
    _check_host_memory,
    _check_shared_memory,
    _check_build_tools,
    _check_cpu_binding,
    _check_state_directory,
)
"""The checks that need a machine; `check_environment` has the others."""
