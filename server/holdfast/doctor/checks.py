"""What is wrong with this machine, its environment or the flags? Pure functions of records.

Where a check cannot be sure, it warns: a failure means that `holdfast serve` as asked cannot work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from holdfast.doctor.findings import Finding, HazardName, failure, ok, warning
from holdfast.doctor.layout import Layout
from holdfast.doctor.machine import Machine
from holdfast.engine.gpus import Gpu
from holdfast.engine.refusals import refuse_environment
from holdfast.errors import HoldfastError
from holdfast.workspace.plan import MIB

GIB = 1024 * MIB
AMPLE_SHARED_BYTES = GIB
LEAST_SHARED_BYTES = MIB
"""Below this not even the first message fits.

How much NCCL takes depends on how the GPUs are connected: one segment of 9.2 MiB for each rank and
more in https://github.com/NVIDIA/nccl/issues/1518, none where they reach each other directly.
"""
SWAP_BYTES = 8 * GIB
"""Below this, an overshoot on a unified-memory machine freezes it before anything is killed."""
CUSTOM_ALL_REDUCE_SIZES = (2, 4, 6, 8, 16)
_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs"}
_CONTAINER_ROOTS = {"overlay", "aufs", "btrfs", "zfs"}
_OFF = {"", "0"}
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*(true|1)", re.IGNORECASE)

Check = Callable[[Machine, Layout], Iterator[Finding]]


def check_machine(machine: Machine, layout: Layout) -> Iterator[Finding]:
    """Every finding about this machine, in the order in which a start would meet them."""
    for check in CHECKS:
        yield from check(machine, layout)


def check_environment(environment: Mapping[str, str], *, is_demo: bool) -> Iterator[Finding]:
    """What is wrong with the variables, of this machine or of a manifest."""
    yield _refusal(environment, "VLLM_PLUGINS", "plugins", is_demo=is_demo)
    yield _refusal(environment, "VLLM_ENABLE_STARTUP_PLAN", "startup-plan", is_demo=is_demo)
    if environment.get("VLLM_SERVER_DEV_MODE", "0") not in _OFF:
        yield warning(
            "dev-mode",
            "VLLM_SERVER_DEV_MODE opens vLLM's routes for sleep, collective calls and resets "
            "to every client.",
            "unset it.",
        )


def _refusal(
    environment: Mapping[str, str], variable: str, name: HazardName, *, is_demo: bool
) -> Finding:
    given = {variable: environment[variable]} if variable in environment else {}
    try:
        refuse_environment(given, is_demo=is_demo)
    except HoldfastError as error:
        return failure(name, error.cause, error.remedy)
    return ok(name, f"{variable}={given[variable]}" if given else f"{variable} is not set")


def _check_vllm(machine: Machine, _layout: Layout) -> Iterator[Finding]:
    version = machine.vllm_version
    if version == "not installed":
        yield failure("vllm", "vLLM is not installed.", "pip install 'holdfast[cuda]'.")
    elif not version.startswith("0.32."):
        yield warning("vllm", f"vLLM {version} was not tried.", "install vllm==0.32.*.")
    else:
        yield ok("vllm", f"vLLM {version}, {'CPU' if machine.is_cpu_build else 'CUDA'} build")


def _check_gpus(machine: Machine, layout: Layout) -> Iterator[Finding]:
    graphics = machine.graphics
    if machine.is_cpu_build:
        if graphics.gpus:
            yield warning(
                "gpu",
                f"{graphics.gpus[0].name} is not used: the installed vLLM is the build for CPUs.",
                "install the CUDA build of vLLM: pip install 'holdfast[cuda]'.",
            )
        return
    if graphics.problem:
        yield failure("gpu", f"{graphics.problem}.", "mend the driver; `nvidia-smi` has to work.")
    elif len(graphics.gpus) < layout.local_ranks:
        yield failure(
            "gpu",
            f"{layout.local_ranks} needed on this node, {len(graphics.gpus)} found.",
            "give the container its GPUs (`--gpus all`), or lower --tensor-parallel-size.",
        )
    else:
        yield ok("gpu", ", ".join(gpu.name for gpu in graphics.gpus))


def _check_architectures(machine: Machine, _layout: Layout) -> Iterator[Finding]:
    if machine.is_cpu_build:
        return
    built_for = machine.graphics.torch_architectures
    for gpu in machine.graphics.gpus:
        name = f"sm_{gpu.architecture[0]}{gpu.architecture[1]}"
        if runs_on := running_build(gpu.architecture, built_for):
            yield ok("gpu-architecture", f"{name} runs what torch has for {runs_on}")
        else:
            yield failure(
                "gpu-architecture",
                f"{gpu.name} is {name}; torch is built for {', '.join(built_for) or 'nothing'}.",
                "install a build of torch and vLLM that names it in torch.cuda.get_arch_list().",
            )


def running_build(architecture: tuple[int, int], built_for: tuple[str, ...]) -> str:
    """The first of torch's builds that runs on a GPU; empty if none does.

    Code for sm_XY runs on every later minor of X, code for sm_XYa on XY alone, that for sm_XYf on
    its family, and compute_XY is compiled anew for everything later
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#application-compatibility).
    """
    for name in built_for:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name):
            kind, major, minor, suffix = match.groups()
            build = (int(major), int(minor))
            if suffix == "a":
                does_run = build == architecture
            elif kind == "compute" and not suffix:
                does_run = build <= architecture
            else:
                does_run = build[0] == architecture[0] and build[1] <= architecture[1]
            if does_run:
                return name
    return ""


def _check_gpu_memory(machine: Machine, layout: Layout) -> Iterator[Finding]:
    if machine.is_cpu_build:
        return
    for gpu in machine.graphics.gpus:
        wanted_bytes = int(gpu.total_bytes * layout.gpu_memory_utilization)
        seen = f"{_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free on {gpu.name}"
        if gpu.free_bytes < wanted_bytes:
            yield failure(
                "gpu-memory",
                f"{seen}, but vLLM refuses to start below {_gib(wanted_bytes)}.",
                "end what holds the rest (an earlier engine may still run), or lower "
                "--gpu-memory-utilization.",
            )
        else:
            yield ok("gpu-memory", f"{seen}; vLLM wants {_gib(wanted_bytes)}")


def _check_unified_memory(machine: Machine, layout: Layout) -> Iterator[Finding]:
    unified: list[Gpu] = [gpu for gpu in machine.graphics.gpus if gpu.is_unified_memory]
    if not unified or machine.is_cpu_build:
        return
    left_bytes = int(unified[0].total_bytes * (1 - layout.gpu_memory_utilization))
    seen = f"{_gib(machine.swap_free_bytes)} of swap free, {_gib(left_bytes)} left to the host"
    if machine.swap_free_bytes < SWAP_BYTES:
        yield warning(
            "unified-memory",
            f"{unified[0].name} shares its memory with the host: {seen}. "
            "What does not fit freezes the machine instead of ending one process.",
            f"add swap of {_gib(SWAP_BYTES)} or more, and lower --gpu-memory-utilization.",
        )
    else:
        yield ok("unified-memory", seen)
    if layout.may_sleep:
        yield warning(
            "sleep-mode",
            f"waking up was reported to take {unified[0].name} down with its host "
            "(https://github.com/vllm-project/vllm/issues/50011).",
            "leave out --enable-sleep-mode.",
        )


def _check_expandable_segments(machine: Machine, layout: Layout) -> Iterator[Finding]:
    yield expandable_segments(
        machine.environment,
        layout,
        is_sure=layout.tensor_parallel_size == 2 and machine.graphics.are_peers,
    )


def expandable_segments(
    environment: Mapping[str, str], layout: Layout, *, is_sure: bool
) -> Finding:
    """Whether graph capture would register memory that no other process can open.

    See https://github.com/vllm-project/vllm/issues/42609. vLLM leaves its custom all-reduce out by
    itself where GPUs cannot reach each other, and with more than two of them where they are not all
    on NVLink, so only two peers are certain.
    """
    name: HazardName = "expandable-segments"
    set_as = [
        f"{variable}={environment[variable]}"
        for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        if _EXPANDABLE.search(environment.get(variable, ""))
    ]
    is_used = (
        layout.tensor_parallel_size in CUSTOM_ALL_REDUCE_SIZES
        and layout.nodes == 1
        and layout.has_custom_all_reduce
        and layout.captures_graphs
    )
    if not set_as or not is_used:
        return ok(name, set_as[0] if set_as else "not asked for")
    return (failure if is_sure else warning)(
        name,
        f"{set_as[0]} with --tensor-parallel-size {layout.tensor_parallel_size}: the custom "
        "all-reduce cannot share such memory between processes and fails in graph capture.",
        "unset it, or add --disable-custom-all-reduce.",
    )


def _check_shared_memory(machine: Machine, layout: Layout) -> Iterator[Finding]:
    remedy = "start the container with --ipc=host or --shm-size 16g."
    yield shared_memory(machine.shared_memory_free_bytes, layout, remedy=remedy)


def shared_memory(free_bytes: int, layout: Layout, *, remedy: str) -> Finding:
    """Whether /dev/shm holds what the ranks of one node exchange there."""
    name: HazardName = "shared-memory"
    ranks = layout.local_ranks
    seen = f"{free_bytes / MIB:.0f} MiB in /dev/shm"
    if ranks == 1 or free_bytes >= AMPLE_SHARED_BYTES:
        return ok(name, seen)
    if free_bytes < LEAST_SHARED_BYTES:
        return failure(name, f"{seen} for the queues of {ranks} ranks.", remedy)
    return warning(
        name,
        f"{seen} for {ranks} ranks: NCCL may not start, and what does not fit later ends a rank "
        "with a bus error.",
        remedy,
    )


def _check_state_directory(machine: Machine, _layout: Layout) -> Iterator[Finding]:
    name: HazardName = "state-directory"
    directory = machine.state_directory
    lost = "what was learned, and which size froze the machine, is forgotten"
    if directory is None:
        yield warning(name, f"--learned-dir none: {lost}.", "name a directory that is kept.")
        return
    seen = f"{directory.path} is on {directory.mount_point} ({directory.filesystem})"
    if not directory.is_writable:
        yield warning(
            name,
            f"{directory.path} cannot be written by this user: {lost}.",
            "let uid 10001, or the user that serves, write to it.",
        )
    elif directory.filesystem in _MEMORY_FILESYSTEMS or (
        machine.is_container and directory.filesystem in _CONTAINER_ROOTS
    ):
        yield warning(
            name, f"{seen}: {lost} with it.", f"mount a volume at {directory.path} (`-v`)."
        )
    else:
        yield ok(name, seen)


def _check_build_tools(machine: Machine, layout: Layout) -> Iterator[Finding]:
    name: HazardName = "build-tools"
    missing = ", ".join(machine.missing_build_tools)
    remedy = "install them: apt-get install g++ python3-dev."
    if not missing:
        yield ok(name, "a compiler and Python.h are there")
    elif machine.is_cpu_build and layout.captures_graphs:
        yield failure(
            name, f"{missing} not found: torch compiles the model for this CPU with it.", remedy
        )
    else:
        yield warning(name, f"{missing} not found: kernels that Triton compiles need it.", remedy)


def _check_cpu_binding(machine: Machine, layout: Layout) -> Iterator[Finding]:
    if not machine.is_cpu_build or layout.local_ranks == 1:
        return
    name: HazardName = "cpu-binding"
    binding = machine.environment.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    seen = f"{layout.local_ranks} ranks on {machine.numa_nodes} NUMA node(s), {binding=}"
    if binding == "auto" and machine.numa_nodes < layout.local_ranks:
        yield failure(
            name,
            f"{seen}: vLLM gives each rank a NUMA node of its own.",
            'name the CPUs of each rank, for example VLLM_CPU_OMP_THREADS_BIND="0|1".',
        )
    else:
        yield ok(name, seen)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


CHECKS: tuple[Check, ...] = (
    _check_vllm,
    _check_gpus,
    _check_architectures,
    _check_gpu_memory,
    _check_unified_memory,
    _check_expandable_segments,
    _check_shared_memory,
    _check_build_tools,
    _check_cpu_binding,
    _check_state_directory,
)
"""Those that need a machine; `check_environment` has the others."""
