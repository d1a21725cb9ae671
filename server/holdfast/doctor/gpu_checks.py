"""What is wrong with the GPUs, given the installed build of vLLM? Pure functions of records."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from holdfast.doctor.findings import GIB, Finding, HazardName, failure, gib, ok, warning
from holdfast.doctor.gpus import Gpu
from holdfast.doctor.machine import Machine
from holdfast.doctor.parallelism import Layout
from holdfast.versions import INSTALL_VLLM

HOST_BYTES = 12 * GIB
"""What a host needs beside a GPU that shares its memory: a tenth of a DGX Spark. Owners of one
report 0.85 to 0.90 as the most that vLLM can have."""
CUSTOM_ALL_REDUCE_SIZES = (2, 4, 6, 8, 16)
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""vLLM reads the first one that is set
(https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/device_allocator/alloc_conf.py)."""
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*(true|1)", re.IGNORECASE)


def check_gpus(machine: Machine, layout: Layout) -> Iterator[Finding]:
    """Yield every finding about GPUs and their memory."""
    for check in CHECKS:
        yield from check(machine, layout)


def _check_count(machine: Machine, layout: Layout) -> Iterator[Finding]:
    gpu_facts = machine.gpu_facts
    if machine.is_cpu_build:
        if gpu_facts.gpus:
            yield warning(
                "gpu",
                f"{gpu_facts.gpus[0].name or 'GPU 0'} is not used: the installed vLLM is the CPU "
                "build.",
                f"install the CUDA build of vLLM: {INSTALL_VLLM} --force-reinstall.",
            )
        return
    if gpu_facts.problem:
        yield failure("gpu", f"{gpu_facts.problem}.", gpu_facts.remedy)
    elif len(gpu_facts.gpus) < layout.ranks:
        yield failure(
            "gpu",
            f"{gpu_count(layout.ranks)} needed on this node, {len(gpu_facts.gpus)} found.",
            f"give the container its GPUs (`--gpus all`){or_fewer_ranks(layout)}.",
            is_sure=not layout.has_ray,
        )
    elif problem := _problem_of_device_ids(layout, len(gpu_facts.gpus)):
        yield failure("gpu", problem, "name a GPU of this node for each rank in --device-ids.")
    else:
        yield from _each_gpu(machine, layout)


def gpu_count(gpus: int) -> str:
    """Return a number of GPUs in words."""
    return f"{gpus} GPU{'s' * (gpus != 1)}"


def or_fewer_ranks(layout: Layout) -> str:
    """Return the rest of a remedy, which names the sizes that can be lower; empty if none can."""
    flags = " or ".join(layout.flags_of_ranks)
    return f", or lower {flags}" if flags else ""


def _each_gpu(machine: Machine, layout: Layout) -> Iterator[Finding]:
    for index, (gpu, is_used) in enumerate(_gpus(machine, layout)):
        if gpu.problem:
            name = f", {gpu.name}," if gpu.name else ""
            yield failure(
                "gpu",
                f"GPU {index}{name} cannot be used: {gpu.problem}.",
                "end the process that holds it, which `nvidia-smi` names, or repair the driver.",
                is_sure=is_used,
            )
    if usable := [gpu.name for gpu in machine.gpu_facts.gpus if not gpu.problem]:
        yield ok("gpu", ", ".join(usable))


def _problem_of_device_ids(layout: Layout, gpus: int) -> str:
    """Return why ranks get no GPU by `--device-ids`; empty if they do. Ray ignores the flag."""
    named = len(layout.device_ids)
    if not named or layout.has_ray:
        return ""
    if named < layout.ranks:
        return f"--device-ids names {named} of the {layout.ranks} GPUs needed on this node."
    visible = "1 is" if gpus == 1 else f"{gpus} are"
    for name in layout.device_ids:
        if isinstance(name, int) and name >= gpus:
            return f"--device-ids names GPU {name}, but {visible} visible, numbered from 0."
    return ""


def _check_architectures(machine: Machine, layout: Layout) -> Iterator[Finding]:
    if machine.is_cpu_build:
        return
    built_for = machine.gpu_facts.torch_architectures
    for gpu, is_used in _gpus(machine, layout):
        if gpu.architecture is None:
            continue
        name = f"sm_{gpu.architecture[0]}{gpu.architecture[1]}"
        if runs_on := running_build(gpu.architecture, built_for):
            yield ok("gpu-architecture", f"{name} runs torch's code for {runs_on}")
        else:
            yield failure(
                "gpu-architecture",
                f"{gpu.name} is {name}; torch is built for {', '.join(built_for) or 'nothing'}.",
                "install a build of torch and vLLM that names it in torch.cuda.get_arch_list().",
                is_sure=is_used,
            )


def _gpus(machine: Machine, layout: Layout) -> Iterator[tuple[Gpu, bool]]:
    """Yield every GPU, and whether it is certain that a rank runs on it.

    Ranks take the first ones, or those of `--device-ids`, whose numbers count what
    `CUDA_VISIBLE_DEVICES` shows (`_resolve_device_ids` in
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/engine/arg_utils.py). Torch does not say
    which UUID is whose.
    """
    gpus = machine.gpu_facts.gpus
    taken = (layout.device_ids or range(len(gpus)))[: layout.ranks]
    for index, gpu in enumerate(gpus):
        yield gpu, index in taken and not layout.has_ray


def running_build(architecture: tuple[int, int], built_for: tuple[str, ...]) -> str:
    """Return the first of torch's builds that runs on a GPU; empty if none does.

    Code for sm_XY runs on every later minor of X, for sm_XYa only on XY, for sm_XYf on its family,
    and the driver compiles compute_XY for everything later
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


def _check_memory(machine: Machine, layout: Layout) -> Iterator[Finding]:
    if machine.is_cpu_build:
        return
    for gpu, is_used in _gpus(machine, layout):
        if gpu.problem:
            continue
        wanted_bytes = int(gpu.total_bytes * layout.gpu_memory_utilization)
        seen = f"{gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free on {gpu.name}"
        if gpu.free_bytes < wanted_bytes:
            yield failure(
                "gpu-memory",
                f"{seen}, but vLLM refuses to start below {gib(wanted_bytes)}.",
                "end the process that holds the rest (an earlier engine may still run), or lower "
                "--gpu-memory-utilization.",
                is_sure=is_used,
            )
        else:
            yield ok("gpu-memory", f"{seen}; vLLM wants {gib(wanted_bytes)}")


def _check_unified_memory(machine: Machine, layout: Layout) -> Iterator[Finding]:
    unified: list[Gpu] = [gpu for gpu in machine.gpu_facts.gpus if gpu.is_unified_memory]
    if not unified or machine.is_cpu_build:
        return
    total_bytes = unified[0].total_bytes
    left_bytes = total_bytes - int(total_bytes * layout.gpu_memory_utilization)
    seen = f"{gib(left_bytes)} of {gib(total_bytes)} left to the host"
    if layout.has_kv_cache_size:
        yield ok("unified-memory", "--kv-cache-memory-bytes decides what is left to the host")
    elif left_bytes < HOST_BYTES:
        most = math.floor(100 * (1 - HOST_BYTES / total_bytes)) / 100
        remedy = (
            f"lower --gpu-memory-utilization to {most:.2f}, which leaves {gib(HOST_BYTES)}"
            if most > 0
            else "choose a machine with more memory"
        )
        yield warning(
            "unified-memory",
            f"{unified[0].name} shares its memory with the host: {seen}. Running out of it "
            "freezes the machine instead of ending one process.",
            f"{remedy}; and turn swap off, because it makes --host-memory-guard late.",
        )
    else:
        yield ok("unified-memory", seen)
    if layout.may_sleep:
        yield warning(
            "sleep-mode",
            f"waking up is reported to take {unified[0].name} down with its host "
            "(https://github.com/vllm-project/vllm/issues/50011).",
            "leave out --enable-sleep-mode.",
        )


def _check_expandable_segments(machine: Machine, layout: Layout) -> Iterator[Finding]:
    yield expandable_segments(
        machine.environment,
        layout,
        is_sure=layout.tensor_parallel_size == 2 and machine.gpu_facts.are_peers,
    )


def expandable_segments(
    environment: Mapping[str, str], layout: Layout, *, is_sure: bool
) -> Finding:
    """Return whether graph capture would register memory that no other process can open.

    See https://github.com/vllm-project/vllm/issues/42609. Only two GPUs that are peers are certain
    to fail: vLLM does without its custom all-reduce if GPUs cannot reach each other, and if more
    than two of them are not all on NVLink.
    """
    name: HazardName = "expandable-segments"
    if _is_refused_by_connector(environment, layout):
        return failure(
            name,
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True with --kv-transfer-config: vLLM "
            "does not transfer a KV cache with pages that may move.",
            "unset it, or add --enable-cumem-allocator.",
        )
    variable = next((one for one in _ALLOCATOR_VARIABLES if environment.get(one)), "")
    if not variable or not _EXPANDABLE.search(environment[variable]):
        return ok(name, "not used")
    set_as = f"{variable}={environment[variable]}"
    is_used = (
        layout.tensor_parallel_size in CUSTOM_ALL_REDUCE_SIZES
        and layout.nodes == 1  # it reaches no GPU of another one
        and layout.has_custom_all_reduce
        and layout.captures_graphs
    )
    if not is_used:
        return ok(name, set_as)
    return failure(
        name,
        f"{set_as} with --tensor-parallel-size {layout.tensor_parallel_size}: the custom "
        "all-reduce cannot share such memory between processes and fails in graph capture.",
        "unset it, or add --disable-custom-all-reduce.",
        is_sure=is_sure,
    )


def _is_refused_by_connector(environment: Mapping[str, str], layout: Layout) -> bool:
    # vLLM looks for exactly this text, only in this variable; see `_verify_kv_transfer_compat` in
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/vllm.py.
    return (
        layout.has_kv_connector
        and not layout.has_cumem_allocator
        and "expandable_segments:True" in environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    )


CHECKS = (
    _check_count,
    _check_architectures,
    _check_memory,
    _check_unified_memory,
    _check_expandable_segments,
)
