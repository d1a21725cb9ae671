"""`holdfast doctor`: each hazard of a machine, from records of machines, and one real run."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.doctor import checks, gpu_checks
from holdfast.doctor.checks import check_environment, check_machine
from holdfast.doctor.findings import Finding, Severity, as_lines, has_failed
from holdfast.doctor.gpu_checks import running_build
from holdfast.doctor.machine import Directory, HostMemory, Machine, read_host_memory, read_machine
from holdfast.doctor.parallelism import DEFAULT_MEMORY_UTILIZATION, Layout, read_layout
from holdfast.doctor.shared_memory import DEFAULT_CALL_CHUNK_MIB, least_shared_bytes
from holdfast.errors import UsageError
from holdfast.processes.gpus import Gpu, GpuFacts, find_gpus
from machines import ARCHITECTURES, CPU, CUDA, GB10, GIB, H100, RTX_PRO, SPARK, doctor, findings

MIB = 1024**2
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}
TWO = Layout(tensor_parallel_size=2)
SMALL = ("--kv-cache-memory-bytes", "1G")
"""So that it does not matter what else runs on the machine of the test."""


def found(machine: Machine, layout: Layout = Layout()) -> dict[str, Finding]:  # noqa: B008 - frozen
    return {finding.name: finding for finding in check_machine(machine, layout)}


@pytest.mark.parametrize(("machine", "layout"), [(CUDA, TWO), (SPARK, Layout()), (CPU, Layout())])
def test_a_sound_machine_has_no_finding(machine: Machine, layout: Layout) -> None:
    """Two H100, a DGX Spark and a machine without a GPU, each as it should be."""
    assert {finding.severity for finding in check_machine(machine, layout)} == {Severity.OK}


def test_everything_but_ok_has_a_remedy() -> None:
    """What is wrong is never named without what to change."""
    worst = replace(
        SPARK,
        environment=EXPANDABLE,
        vllm_version="0.31.0",
        graphics=GpuFacts((replace(GB10, free_bytes=GIB),), ("sm_90",)),
        swap_free_bytes=0,
        shared_memory_free_bytes=0,
        state_directory=None,
        missing_build_tools=("g++",),
    )
    layout = Layout(tensor_parallel_size=2, may_sleep=True)
    bad = [one for one in check_machine(worst, layout) if one.severity is not Severity.OK]
    assert len(bad) == 10
    assert all(finding.remedy for finding in bad)


@pytest.mark.parametrize(
    ("graphics", "layout", "severity"),
    [
        (CUDA.graphics, TWO, "failure"),
        (replace(CUDA.graphics, are_peers=False), TWO, "warning"),
        (GpuFacts((H100,) * 4, ARCHITECTURES, are_peers=True), Layout(4), "warning"),
        (CUDA.graphics, Layout(1), "ok"),
        (CUDA.graphics, Layout(3), "ok"),
        (CUDA.graphics, Layout(2, has_custom_all_reduce=False), "ok"),
        (CUDA.graphics, Layout(2, captures_graphs=False), "ok"),
    ],
)
def test_expandable_segments(graphics: GpuFacts, layout: Layout, severity: str) -> None:
    """They fail for sure only where two peers capture their custom all-reduce."""
    machine = replace(CUDA, environment=EXPANDABLE, graphics=graphics)
    assert found(machine, layout)["expandable-segments"].severity == severity
    assert found(CUDA, layout)["expandable-segments"].severity is Severity.OK


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_both_names_of_the_allocator_variable_count(variable: str) -> None:
    """torch reads the old name and the new one."""
    machine = replace(CUDA, environment={variable: "expandable_segments:True"})
    assert found(machine, TWO)["expandable-segments"].severity is Severity.FAILURE


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
    machine = replace(CPU, memory=HostMemory(24 * GIB, 16 * GIB), **changes)
    assert found(machine, layout)["host-memory"].severity == severity


def test_host_memory_does_not_matter_where_the_kv_cache_has_a_size() -> None:
    """vLLM looks at it only to find that size."""
    full = replace(CPU, memory=HostMemory(24 * GIB, GIB))
    assert "host-memory" not in found(full, read_layout(["m", "--kv-cache-memory-bytes", "1G"]))
    assert "host-memory" not in found(full, read_layout(["--demo"]))
    by_variable = replace(full, environment={"VLLM_CPU_KVCACHE_SPACE": "4"})
    assert "host-memory" not in found(by_variable)
    assert "host-memory" not in found(replace(CUDA, memory=HostMemory(24 * GIB, GIB)))


def test_host_memory_is_read_as_vllm_reads_it() -> None:
    """Of one node, with what the kernel would free."""
    from vllm.utils.cpu_resource_utils import get_memory_node_info

    memory, theirs = read_host_memory(), get_memory_node_info()
    assert memory.total_bytes == theirs.total_memory
    assert memory.available_bytes == pytest.approx(theirs.available_memory, rel=0.2)


@pytest.mark.parametrize("limit", ["4294967296", "max"])
def test_host_memory_ends_at_the_limit_of_the_container(tmp_path: Path, limit: str) -> None:
    """What the container uses already is not available either."""
    cgroup = tmp_path / "sys" / "fs" / "cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text(limit)
    (cgroup / "memory.current").write_text(str(3 * GIB))
    memory = read_host_memory(tmp_path)
    assert (memory.total_bytes == 4 * GIB) is (limit != "max")
    assert memory.available_bytes <= GIB or limit == "max"


@pytest.mark.parametrize(
    ("architecture", "built_for", "runs_on"),
    [
        ((9, 0), ("sm_80", "sm_90"), "sm_90"),
        ((12, 1), ("sm_90", "sm_120"), "sm_120"),
        ((12, 1), ("sm_90", "sm_120a"), ""),
        ((12, 1), ("sm_121a",), "sm_121a"),
        ((12, 1), ("sm_120f",), "sm_120f"),
        ((12, 1), ("compute_90",), "compute_90"),
        ((12, 1), ("compute_90a",), ""),
        ((12, 0), ("sm_121",), ""),
        ((8, 9), ("sm_80",), "sm_80"),
        ((9, 0), ("sm_80",), ""),
        ((7, 5), ("sm_80", "compute_80"), ""),
    ],
)
def test_which_build_runs_on_which_gpu(
    architecture: tuple[int, int], built_for: tuple[str, ...], runs_on: str
) -> None:
    """Binary code runs on later minors, virtual code on everything later, `a` on one alone."""
    assert running_build(architecture, built_for) == runs_on


def test_a_gpu_that_torch_is_not_built_for_fails() -> None:
    """The finding names the GPU's architecture and those that torch has."""
    machine = replace(SPARK, graphics=GpuFacts((GB10,), ("sm_80", "sm_90")))
    finding = found(machine)["gpu-architecture"]
    assert finding.severity is Severity.FAILURE
    assert "sm_121" in finding.seen
    assert "sm_80, sm_90" in finding.seen


@pytest.mark.parametrize("gpu", [H100, GB10, RTX_PRO])
def test_memory_that_something_else_holds_fails(gpu: Gpu) -> None:
    """vLLM refuses to start with less free memory than its share, and so says the doctor."""
    full = replace(gpu, free_bytes=8 * GIB)
    machine = replace(CUDA, graphics=GpuFacts((full,), ARCHITECTURES))
    assert found(machine)["gpu-memory"].severity is Severity.FAILURE
    layout = Layout(gpu_memory_utilization=0.05)
    assert found(machine, layout)["gpu-memory"].severity is Severity.OK


def test_the_share_of_memory_is_that_of_vllm() -> None:
    """Where no utilization is given, the doctor counts with vLLM's default."""
    from vllm.config import CacheConfig

    assert CacheConfig.gpu_memory_utilization == DEFAULT_MEMORY_UTILIZATION


def test_unified_memory_needs_swap() -> None:
    """A DGX Spark without swap is warned of, another machine without swap is not."""
    assert found(replace(SPARK, swap_free_bytes=0))["unified-memory"].severity is Severity.WARNING
    assert "unified-memory" not in found(replace(CUDA, swap_free_bytes=0))


def test_sleep_on_unified_memory_is_warned_of() -> None:
    """Waking up took such machines down."""
    assert found(SPARK, Layout(may_sleep=True))["sleep-mode"].severity is Severity.WARNING
    assert "sleep-mode" not in found(CUDA, Layout(may_sleep=True))


@pytest.mark.parametrize(
    ("graphics", "layout", "severity"),
    [
        (GpuFacts(), Layout(), "failure"),
        (GpuFacts(problem="driver too old"), Layout(), "failure"),
        (CUDA.graphics, Layout(4), "failure"),
    ],
)
def test_gpus_that_are_not_there(graphics: GpuFacts, layout: Layout, severity: str) -> None:
    """The CUDA build needs a GPU for every rank."""
    assert found(replace(CUDA, graphics=graphics), layout)["gpu"].severity == severity


def test_a_gpu_that_the_cpu_build_leaves_idle_is_a_warning() -> None:
    """It serves, but not where the operator thinks."""
    assert found(replace(CPU, graphics=SPARK.graphics))["gpu"].severity is Severity.WARNING


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


def test_the_compiler_is_looked_for_where_the_environment_says(tmp_path: Path) -> None:
    """PATH, CC and CXX are those of the environment that serves."""
    nowhere = read_machine({"PATH": str(tmp_path)}, None).missing_build_tools
    assert {"cc", "g++"} <= set(nowhere)
    for name in ("cc", "clang++"):
        (tmp_path / name).touch(mode=0o755)
    found_there = read_machine({"PATH": str(tmp_path)}, None).missing_build_tools
    assert not {"cc", "g++"} & set(found_there)
    named = read_machine({"PATH": str(tmp_path), "CXX": "icpx"}, None).missing_build_tools
    assert "icpx" in named


def test_the_demo_needs_a_plugin_of_its_own() -> None:
    """VLLM_PLUGINS has to name the demo model too, if that is to be served."""
    assert has_failed(list(check_environment({"VLLM_PLUGINS": "holdfast"}, is_demo=True)))


def test_routes_for_developers_are_a_warning() -> None:
    """They stand open to every client."""
    seen = {
        one.name: one for one in check_environment({"VLLM_SERVER_DEV_MODE": "1"}, is_demo=False)
    }
    assert seen["dev-mode"].severity is Severity.WARNING


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        ([], Layout()),
        (["model", "-tp", "2", "--pipeline-parallel-size=3"], Layout(2, 3)),
        (["model", "--tensor-parallel-size", "8", "--nnodes", "1"], Layout(8)),
        (["--disable-custom-all-reduce", "m"], Layout(has_custom_all_reduce=False)),
        (["m", "--enforce-eager"], Layout(captures_graphs=False, compiles=False)),
        (["m", "-cc.cudagraph_mode=NONE"], Layout(captures_graphs=False)),
        (["m", "-cc", '{"cudagraph_mode": "NONE"}'], Layout(captures_graphs=False)),
        (["m", "-pcp", "2"], Layout(prefill_context_parallel_size=2)),
        (["m", "-dp", "4", "-dpl", "4"], Layout(data_parallel_size=4)),
        (["m", "--distributed-executor-backend=ray"], Layout(executor="ray")),
        (["m", "--enable-sleep-mode"], Layout(may_sleep=True, has_cumem_allocator=True)),
        (["m", "--kv-transfer-config", '{"kv_connector": "N"}'], Layout(has_kv_connector=True)),
        (["m", "--gpu-memory-utilization", "0.5"], Layout(gpu_memory_utilization=0.5)),
    ],
)
def test_the_layout_is_read_from_the_flags_of_vllm(arguments: list[str], layout: Layout) -> None:
    """Long, short and joined flags count, and JSON of vLLM's."""
    assert read_layout(arguments) == layout


def test_a_layout_that_cannot_be_read_is_refused() -> None:
    """The flag is named, for vLLM would refuse it too."""
    with pytest.raises(UsageError, match="tensor-parallel-size"):
        read_layout(["m", "-tp", "many"])


@pytest.mark.parametrize("flags", [("-n", "2"), ("--nnodes=2",), ("-dp", "4", "-dpl", "1")])
def test_several_nodes_are_refused(flags: tuple[str, ...]) -> None:
    """Once, as `serve` does, which understands the short forms too."""
    done = doctor("m", "--json", *SMALL, *flags)
    assert done.returncode == 2
    (refusal,) = [one for one in findings(done) if one["name"] == "command-line"]
    assert "not supported" in refusal["seen"]


@pytest.mark.parametrize(
    ("layout", "severity"),
    [(Layout(), "warning"), (TWO, "failure"), (Layout(2, executor="ray"), "warning")],
)
def test_only_gpus_in_use_fail(layout: Layout, severity: str) -> None:
    """The first ones are taken; what is wrong with others is a warning."""
    old = replace(H100, architecture=(7, 0), free_bytes=GIB)
    machine = replace(CUDA, graphics=GpuFacts((H100, old), ARCHITECTURES))
    assert found(machine, layout)["gpu-architecture"].severity == severity
    assert found(machine, layout)["gpu-memory"].severity == severity


@pytest.mark.parametrize(
    ("environment", "flags", "severity"),
    [
        (EXPANDABLE, [], "failure"),
        (EXPANDABLE, ["--enable-sleep-mode"], "ok"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, [], "ok"),
    ],
)
def test_expandable_segments_with_a_connector(
    environment: dict[str, str], flags: list[str], severity: str
) -> None:
    """vLLM refuses them for a KV cache that is moved, also on one GPU."""
    given = ["m", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}', *flags]
    machine = replace(CUDA, environment=environment)
    assert found(machine, read_layout(given))["expandable-segments"].severity == severity


def test_the_new_name_of_the_allocator_variable_wins() -> None:
    """What the old one asks for is not read then."""
    environment = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512", **EXPANDABLE}
    machine = replace(CUDA, environment=environment)
    assert found(machine, TWO)["expandable-segments"].severity is Severity.OK


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


def test_the_lines_for_people_have_every_finding_and_remedy() -> None:
    """Each source once, each finding with its remedy, and the counts at the end."""
    machine = replace(SPARK, swap_free_bytes=0)
    seen = list(check_machine(machine, Layout()))
    lines = list(as_lines(seen))
    assert lines[0] == "this machine:"
    assert sum("Remedy: " in line for line in lines) == 1
    assert lines[-1] == f"ok: {len(seen) - 1}, warning: 1, failure: 0"


def test_this_machine_is_read(tmp_path: Path) -> None:
    """What the checks look at is there, and the directory is found on its mount."""
    machine = read_machine({"A": "b"}, tmp_path / "not" / "yet")
    assert machine.environment == {"A": "b"}
    assert machine.memory.available_bytes > 0
    assert machine.shared_memory_free_bytes > 0
    directory = machine.state_directory
    assert directory is not None
    assert tmp_path.is_relative_to(directory.mount_point)
    assert directory.filesystem
    assert directory.is_writable


def test_a_directory_is_found_on_the_mount_that_it_would_be_made_on() -> None:
    """It need not exist; without one there is nothing to look for."""
    directory = read_machine({}, Path("/proc/holdfast")).state_directory
    assert directory is not None
    assert directory.filesystem == "proc"
    assert read_machine({}, None).state_directory is None


def test_torch_is_not_imported_where_there_is_no_gpu(tmp_path: Path) -> None:
    """The doctor is quick there: neither torch nor vLLM is loaded."""
    script = (
        "import sys; from pathlib import Path; from holdfast.processes.gpus import find_gpus\n"
        "import holdfast.doctor.command\n"
        f"assert find_gpus(Path({str(tmp_path)!r})).gpus == ()\n"
        "assert not {'torch', 'vllm', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_gpu_that_torch_cannot_use_is_named(tmp_path: Path) -> None:
    """The kernel shows one, the installed torch is a build for CPUs: that is the problem."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU that torch can use")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert "cannot use it" in find_gpus(tmp_path).problem


def test_the_command_is_content_with_this_machine() -> None:
    """A real run ends with 0, and says what it looked at."""
    done = doctor("--demo", "--json")
    assert done.returncode == 0, done.stdout
    assert {"vllm", "plugins", "shared-memory"} <= {one["name"] for one in findings(done)}


def test_the_command_ends_with_2_for_a_failure() -> None:
    """A plug-in list without ours is refused by `serve`, so the doctor's exit code says so."""
    done = doctor("--json", *SMALL, environment={"VLLM_PLUGINS": "other"})
    assert done.returncode == 2
    (failed,) = (one for one in findings(done) if one["severity"] == "failure")
    assert failed["name"] == "plugins"
    assert failed["remedy"]


def test_flags_that_serve_refuses_are_findings() -> None:
    """Each wrong thing is named, and the machine is looked at all the same."""
    done = doctor("./no-such-model", "--drain-timeout", "soon", "--json", *SMALL)
    assert done.returncode == 2
    names = {one["name"] for one in findings(done) if one["severity"] == "failure"}
    assert names == {"command-line", "model"}
    assert "vllm" in {one["name"] for one in findings(done)}


def test_a_wrong_flag_of_the_doctor_is_bad_usage() -> None:
    """It is one line on standard error, as everywhere."""
    done = doctor("--manifest")
    assert done.returncode == 2
    assert done.stderr.startswith("holdfast: error: ")


def test_every_check_is_run() -> None:
    """No check is written and left out of the list."""
    for module, others in ((checks, {"_check_variables", "check_gpus"}), (gpu_checks, set())):
        written = {name for name in vars(module) if name.startswith("_check_")} | others
        assert {check.__name__ for check in module.CHECKS} | others == written
