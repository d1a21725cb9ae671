"""Each hazard of a machine and its environment, from records of machines."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

from holdfast.doctor import checks, gpu_checks
from holdfast.doctor.checks import (
    DEFAULT_CALL_CHUNK_MIB,
    check_environment,
    check_machine,
    least_shared_bytes,
)
from holdfast.doctor.findings import Severity, has_failed
from holdfast.doctor.gpus import GpuFacts
from holdfast.doctor.machine import Directory, Machine, NumaMemory, read_machine
from holdfast.doctor.parallelism import Layout, read_layout
from machines import (
    CPU,
    CUDA,
    EXPANDABLE,
    GB10,
    GIB,
    LESS_MEMORY,
    SPARK,
    TWO,
    found,
)

MIB = 1024**2


@pytest.mark.parametrize(
    ("machine", "layout"), [(CUDA, TWO), (SPARK, LESS_MEMORY), (CPU, Layout())]
)
def test_a_sound_machine_has_no_finding(machine: Machine, layout: Layout) -> None:
    """Two H100, a DGX Spark and a machine without a GPU, each as it should be."""
    assert {finding.severity for finding in check_machine(machine, layout)} == {Severity.OK}


def test_everything_but_ok_has_a_remedy() -> None:
    """What is wrong is never named without what to change."""
    worst = replace(
        SPARK,
        environment=EXPANDABLE,
        vllm_version="0.31.0",
        gpu_facts=GpuFacts((replace(GB10, free_bytes=GIB),), ("sm_90",)),
        shared_memory_free_bytes=0,
        state_directory=None,
        missing_build_tools=("g++",),
    )
    layout = Layout(tensor_parallel_size=2, may_sleep=True)
    bad = [one for one in check_machine(worst, layout) if one.severity is not Severity.OK]
    assert len(bad) == 10
    assert all(finding.remedy for finding in bad)


@pytest.mark.parametrize(
    ("machine", "free_bytes", "layout", "severity"),
    [
        (CUDA, 64 * MIB, TWO, "failure"),
        (CUDA, 64 * MIB, Layout(pipeline_parallel_size=2), "failure"),
        (CUDA, 64 * MIB, Layout(executor="mp"), "failure"),
        (CUDA, 240 * MIB, TWO, "failure"),
        (CUDA, 241 * MIB, TWO, "warning"),
        (CUDA, GIB, TWO, "ok"),
        (CUDA, 64 * MIB, Layout(), "ok"),
        (CUDA, 64 * MIB, Layout(2, executor="ray"), "warning"),
        (CPU, 64 * MIB, Layout(), "failure"),
        (CPU, 64 * MIB, Layout(executor="uni"), "failure"),
        (CPU, 241 * MIB, Layout(), "ok"),
        (CPU, 241 * MIB, TWO, "warning"),
    ],
)
def test_shared_memory(machine: Machine, free_bytes: int, layout: Layout, severity: str) -> None:
    """A worker's queue has to fit; on the CPU one rank has a worker process too."""
    machine = replace(machine, shared_memory_free_bytes=free_bytes)
    assert found(machine, layout)["shared-memory"].severity == severity


def test_the_queue_of_a_worker_is_as_large_as_that_of_vllm() -> None:
    """What has to be free is what vLLM asks for, and the larger of its two queues counts."""
    from vllm import envs
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    chunks = inspect.signature(MessageQueue.__init__).parameters
    count, chunk_bytes = chunks["max_chunks"].default, chunks["max_chunk_bytes"].default
    assert least_shared_bytes({}) == count * (chunk_bytes + 2)
    assert envs.VLLM_MQ_MAX_CHUNK_BYTES_MB == DEFAULT_CALL_CHUNK_MIB
    larger = least_shared_bytes({"VLLM_MQ_MAX_CHUNK_BYTES_MB": "32"})
    assert larger == count * (32 * MIB + 2)


@pytest.mark.parametrize(
    ("changes", "layout", "severity"),
    [
        ({}, Layout(), "failure"),
        ({}, Layout(gpu_memory_utilization=0.5), "ok"),
        ({"numa_nodes": 2}, Layout(), "failure"),
        (
            {"numa_nodes": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "8-15"}},
            Layout(),
            "warning",
        ),
    ],
)
def test_host_memory_that_something_else_holds(
    changes: dict[str, Any], layout: Layout, severity: str
) -> None:
    """On the CPU vLLM refuses to start with less available than its share."""
    machine = replace(CPU, memory=NumaMemory(24 * GIB, 16 * GIB), **changes)
    assert found(machine, layout)["host-memory"].severity == severity


def test_host_memory_does_not_matter_where_the_kv_cache_has_a_size() -> None:
    """vLLM looks at it only to find that size."""
    full = replace(CPU, memory=NumaMemory(24 * GIB, GIB))
    assert "host-memory" not in found(full, read_layout(["m", "--kv-cache-memory-bytes", "1G"]))
    assert "host-memory" not in found(full, read_layout(["--demo"]))
    by_variable = replace(full, environment={"VLLM_CPU_KVCACHE_SPACE": "4"})
    assert "host-memory" not in found(by_variable)
    assert "host-memory" not in found(replace(CUDA, memory=NumaMemory(24 * GIB, GIB)))


@pytest.mark.parametrize(
    ("version", "severity"),
    [
        ("0.31.0", "warning"),
        ("0.32.0", "ok"),
        ("0.32.3+cu130", "ok"),
        ("0.33.1", "ok"),
        ("0.34.0", "warning"),
        ("not installed", "failure"),
    ],
)
def test_the_version_of_vllm(version: str, severity: str) -> None:
    """One that was not tried is a warning, none is a failure."""
    assert found(replace(CUDA, vllm_version=version))["vllm"].severity == severity


@pytest.mark.parametrize(
    ("mount_point", "filesystem", "is_container", "severity"),
    [
        ("/state", "ext4", True, "ok"),
        ("/state", "btrfs", True, "ok"),
        ("/", "btrfs", True, "warning"),
        ("/", "overlay", True, "warning"),
        ("/", "overlay", False, "ok"),
        ("/state", "tmpfs", False, "warning"),
    ],
)
def test_a_state_directory_that_is_lost(
    mount_point: str, filesystem: str, is_container: bool, severity: str
) -> None:
    """It has to be on a volume in a container, and on a disk everywhere."""
    directory = Directory("/state", mount_point, filesystem, is_writable=True)
    machine = replace(CUDA, is_container=is_container, state_directory=directory)
    assert found(machine)["state-directory"].severity == severity


def test_a_plugin_that_vllm_does_not_find() -> None:
    """Without its entry point no rank loads it."""
    assert found(replace(CUDA, has_plugin=False))["plugins"].severity is Severity.FAILURE
    assert read_machine({}, None).has_plugin


def test_builds_for_cuda_beside_the_one_for_cpus() -> None:
    """They break the import of transformers; beside the build for CUDA they belong."""
    packages = ("torchvision 0.28.0",)
    finding = found(replace(CPU, cuda_packages=packages))["vllm"]
    assert finding.severity is Severity.WARNING
    assert finding.remedy == "pip uninstall torchvision"
    assert found(replace(CUDA, cuda_packages=packages))["vllm"].severity is Severity.OK


def test_a_state_directory_that_cannot_be_written_is_a_warning() -> None:
    """The start goes on, and learns again each time."""
    directory = Directory("/state", "/state", "ext4", is_writable=False)
    finding = found(replace(CUDA, state_directory=directory))["state-directory"]
    assert finding.severity is Severity.WARNING
    assert "cannot write to" in finding.seen


@pytest.mark.parametrize(
    ("environment", "nodes", "severity"),
    [
        ({}, 1, "failure"),
        ({}, 2, "ok"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, 1, "ok"),
    ],
)
def test_two_ranks_on_one_numa_node(environment: dict[str, str], nodes: int, severity: str) -> None:
    """vLLM's CPU backend binds each rank to a node of its own unless it is told."""
    machine = replace(CPU, environment=environment, numa_nodes=nodes)
    assert found(machine, TWO)["cpu-binding"].severity == severity


@pytest.mark.parametrize(
    ("environment", "failed"),
    [
        ({}, set()),
        ({"VLLM_PLUGINS": "holdfast"}, set()),
        ({"VLLM_PLUGINS": "lora_resolver"}, {"plugins"}),
        ({"VLLM_ENABLE_STARTUP_PLAN": "1"}, {"startup-plan"}),
        ({"VLLM_ENABLE_STARTUP_PLAN": "0"}, set()),
    ],
)
def test_variables_under_which_serve_ends_at_once(
    environment: dict[str, str], failed: set[str]
) -> None:
    """What `holdfast serve` refuses, the doctor calls a failure, in the same words."""
    seen = list(check_environment(environment, is_demo=False))
    assert {one.name for one in seen if one.severity is Severity.FAILURE} == failed


@pytest.mark.parametrize(
    ("machine", "layout", "severity"),
    [
        (CPU, Layout(), "failure"),
        (CPU, Layout(captures_graphs=False, compiles=False), "warning"),
        (CUDA, Layout(), "warning"),
    ],
)
def test_a_missing_compiler(machine: Machine, layout: Layout, severity: str) -> None:
    """On the CPU no model is compiled without it, and so none starts unless it is run eagerly."""
    finding = found(replace(machine, missing_build_tools=("g++",)), layout)["build-tools"]
    assert finding.severity == severity
    assert "g++" in finding.seen


def test_a_missing_ninja() -> None:
    """The engine starts without it, and is slower."""
    finding = found(replace(CUDA, missing_build_tools=("ninja",)), Layout())["build-tools"]
    assert finding.severity is Severity.WARNING
    assert "ninja not found" in finding.seen
    assert "ninja-build" in finding.remedy


def test_the_demo_needs_a_plugin_of_its_own() -> None:
    """VLLM_PLUGINS has to name the demo model too, if that is to be served."""
    assert has_failed(list(check_environment({"VLLM_PLUGINS": "holdfast"}, is_demo=True)))


def test_routes_for_developers_are_a_warning() -> None:
    """They change the engine for every client."""
    seen = {
        one.name: one for one in check_environment({"VLLM_SERVER_DEV_MODE": "1"}, is_demo=False)
    }
    assert seen["dev-mode"].severity is Severity.WARNING


@pytest.mark.parametrize(
    "environment",
    [
        {"VLLM_WORKER_MULTIPROC_METHOD": "forkserver"},
        {"VLLM_CPU_KVCACHE_SPACE": "4GiB"},
        {"VLLM_MQ_MAX_CHUNK_BYTES_MB": "x"},
    ],
)
def test_variables_that_vllm_refuses(environment: dict[str, str]) -> None:
    """A start would end at the first look at them."""
    seen = {one.name: one for one in check_environment(environment, is_demo=False)}
    assert seen["variables"].severity is Severity.FAILURE


def test_mistyped_variables_of_ours() -> None:
    """A start refuses the first; here, each is told."""
    environment = {
        "HOLDFAST_API_KEY": "k",
        "HOLDFAST_DRAIN_TIMOUT": "1",
        "HOLDFAST_PORT": "tcp://a",
    }
    seen = [one for one in check_environment(environment, is_demo=False) if one.name == "variables"]
    assert [one.severity for one in seen] == [Severity.FAILURE] * 2
    assert ["VLLM_API_KEY" in seen[0].remedy, "DRAIN_TIMEOUT" in seen[1].remedy] == [True, True]


def test_every_check_is_run() -> None:
    """No check is written and left out of the list."""
    for module, others in ((checks, {"_check_variables", "check_gpus"}), (gpu_checks, set())):
        written = {name for name in vars(module) if name.startswith("_check_")} | others
        assert {check.__name__ for check in module.CHECKS} | others == written
