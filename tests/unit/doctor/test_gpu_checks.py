"""Each hazard of GPUs, from records of machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.doctor.checks import check_machine
from holdfast.doctor.findings import Severity
from holdfast.doctor.gpu_checks import running_build
from holdfast.doctor.gpus import Gpu, GpuFacts
from holdfast.doctor.parallelism import Layout, read_layout
from machines import (
    ARCHITECTURES,
    CPU,
    CUDA,
    EXPANDABLE,
    GB10,
    GIB,
    H100,
    RTX_PRO,
    SPARK,
    TWO,
    found,
)


@pytest.mark.parametrize(
    ("gpu_facts", "layout", "severity"),
    [
        (CUDA.gpu_facts, TWO, "failure"),
        (replace(CUDA.gpu_facts, are_peers=False), TWO, "warning"),
        (GpuFacts((H100,) * 4, ARCHITECTURES, are_peers=True), Layout(4), "warning"),
        (CUDA.gpu_facts, Layout(1), "ok"),
        (CUDA.gpu_facts, Layout(3), "ok"),
        (CUDA.gpu_facts, Layout(2, has_custom_all_reduce=False), "ok"),
        (CUDA.gpu_facts, Layout(2, captures_graphs=False), "ok"),
        (CUDA.gpu_facts, Layout(2, nodes=2), "ok"),
    ],
)
def test_expandable_segments(gpu_facts: GpuFacts, layout: Layout, severity: str) -> None:
    """They fail for sure only where two peers capture their custom all-reduce."""
    machine = replace(CUDA, environment=EXPANDABLE, gpu_facts=gpu_facts)
    assert found(machine, layout)["expandable-segments"].severity == severity
    assert found(CUDA, layout)["expandable-segments"].severity is Severity.OK


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_both_names_of_the_allocator_variable_count(variable: str) -> None:
    """torch reads the old name and the new one."""
    machine = replace(CUDA, environment={variable: "expandable_segments:True"})
    assert found(machine, TWO)["expandable-segments"].severity is Severity.FAILURE


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
    machine = replace(SPARK, gpu_facts=GpuFacts((GB10,), ("sm_80", "sm_90")))
    finding = found(machine)["gpu-architecture"]
    assert finding.severity is Severity.FAILURE
    assert "sm_121" in finding.seen
    assert "sm_80, sm_90" in finding.seen


@pytest.mark.parametrize("gpu", [H100, GB10, RTX_PRO])
def test_memory_that_something_else_holds_fails(gpu: Gpu) -> None:
    """vLLM refuses to start with less free memory than its share, and so says the doctor."""
    full = replace(gpu, free_bytes=8 * GIB)
    machine = replace(CUDA, gpu_facts=GpuFacts((full,), ARCHITECTURES))
    assert found(machine)["gpu-memory"].severity is Severity.FAILURE
    layout = Layout(gpu_memory_utilization=0.05)
    assert found(machine, layout)["gpu-memory"].severity is Severity.OK


EIGHT = replace(
    CUDA, gpu_facts=GpuFacts((replace(H100, free_bytes=0),) * 4 + (H100,) * 4, ARCHITECTURES)
)
"""Eight GPUs, and the first four are full."""


@pytest.mark.parametrize(
    ("flags", "failures", "warnings"),
    [
        ("-tp 4", 4, 0),
        ("-tp 4 --device-ids 4,5,6,7", 0, 4),
        ("-tp 4 --device-ids 7,4,5,6,0", 0, 4),
        ("-tp 2 -dp 2 --device-ids 3,4,5,6", 1, 3),
        ("-tp 4 --device-ids GPU-1,GPU-2,GPU-3,GPU-4", 0, 4),
        ("-tp 4 --device-ids 0,1,2,3 --distributed-executor-backend ray", 0, 4),
    ],
)
def test_the_gpus_that_device_ids_name_are_judged(flags: str, failures: int, warnings: int) -> None:
    """Ranks take them in this order; the doctor does not know which GPU has which UUID."""
    layout = read_layout(["m", *flags.split()])
    severities = [
        each.severity for each in check_machine(EIGHT, layout) if each.name == "gpu-memory"
    ]
    assert severities.count(Severity.FAILURE) == failures
    assert severities.count(Severity.WARNING) == warnings


@pytest.mark.parametrize(
    ("layout", "severity", "seen"),
    [
        (Layout(4, device_ids=(4, 5)), "failure", "--device-ids names 2 of the 4 GPUs"),
        (Layout(2, device_ids=("GPU-1",)), "failure", "--device-ids names 1 of the 2 GPUs"),
        (Layout(2, device_ids=(7, 8)), "failure", "--device-ids names GPU 8, but 8 are visible"),
        (Layout(2, device_ids=(7,), executor="ray"), "ok", ""),
        (Layout(2, device_ids=("GPU-1", "GPU-2")), "ok", ""),
        (Layout(2, device_ids=(6, 7)), "ok", ""),
    ],
)
def test_device_ids_name_a_gpu_for_each_rank(layout: Layout, severity: str, seen: str) -> None:
    """A rank without one ends the start; Ray chooses by itself."""
    finding = found(EIGHT, layout)["gpu"]
    assert finding.severity == severity
    assert seen in finding.seen


@pytest.mark.parametrize(
    ("flags", "severity"),
    [("", "failure"), ("--device-ids 1", "warning"), ("-tp 2", "failure")],
)
def test_a_gpu_that_cannot_be_used_fails_if_a_rank_takes_it(flags: str, severity: str) -> None:
    """Another process has filled the first one; the second is as good as before."""
    full = replace(H100, free_bytes=0, problem="CUDA error: out of memory")
    machine = replace(CUDA, gpu_facts=GpuFacts((full, H100), ARCHITECTURES))
    seen = [*check_machine(machine, read_layout(["m", *flags.split()]))]
    broken, usable = (one for one in seen if one.name == "gpu")
    assert broken.severity == severity
    assert broken.seen == "GPU 0, NVIDIA H100, cannot be used: CUDA error: out of memory."
    assert (usable.severity, usable.seen) == ("ok", "NVIDIA H100")
    (memory,) = (one for one in seen if one.name == "gpu-memory")
    assert memory.severity == "ok"


def test_a_gpu_that_does_not_answer_is_named_by_its_number() -> None:
    """Its architecture is unknown, so nothing is said about it."""
    lost = Gpu("", None, 0, 0, problem="Invalid device id")
    machine = replace(CUDA, gpu_facts=GpuFacts((H100, lost), ARCHITECTURES))
    seen = [*check_machine(machine, TWO)]
    assert [one.seen for one in seen if one.severity is Severity.FAILURE] == [
        "GPU 1 cannot be used: Invalid device id."
    ]
    assert len([one for one in seen if one.name == "gpu-architecture"]) == 1


def test_a_host_that_shares_its_memory_keeps_some() -> None:
    """The default of vLLM leaves too little to a DGX Spark; a GPU with its own may be filled."""
    finding = found(SPARK)["unified-memory"]
    assert finding.severity is Severity.WARNING
    assert "lower --gpu-memory-utilization to 0.90," in finding.remedy
    assert found(SPARK, Layout(gpu_memory_utilization=0.9))["unified-memory"].severity == "ok"
    assert "unified-memory" not in found(CUDA)


def test_a_share_that_decides_nothing_is_not_lowered() -> None:
    """A size of the KV cache leaves the rest to the host; a small board has no share to offer."""
    sized = found(SPARK, Layout(has_kv_cache_size=True))["unified-memory"]
    assert sized.severity == "ok"
    gpu = replace(SPARK.gpu_facts.gpus[0], total_bytes=8 << 30, free_bytes=8 << 30)
    small = replace(SPARK, gpu_facts=replace(SPARK.gpu_facts, gpus=(gpu,)))
    assert "--gpu-memory-utilization to 0.00" not in found(small)["unified-memory"].remedy


def test_sleep_on_unified_memory_is_warned_of() -> None:
    """Waking up took such machines down."""
    assert found(SPARK, Layout(may_sleep=True))["sleep-mode"].severity is Severity.WARNING
    assert "sleep-mode" not in found(CUDA, Layout(may_sleep=True))


@pytest.mark.parametrize(
    ("gpu_facts", "layout", "severity"),
    [
        (GpuFacts(), Layout(), "failure"),
        (GpuFacts(problem="driver too old"), Layout(), "failure"),
        (CUDA.gpu_facts, Layout(4), "failure"),
        (CUDA.gpu_facts, Layout(4, nodes=2), "ok"),
    ],
)
def test_gpus_that_are_not_there(gpu_facts: GpuFacts, layout: Layout, severity: str) -> None:
    """The CUDA build needs a GPU for every rank."""
    assert found(replace(CUDA, gpu_facts=gpu_facts), layout)["gpu"].severity == severity


@pytest.mark.parametrize(
    ("gpu_facts", "layout", "seen"),
    [
        (GpuFacts(), Layout(), "1 GPU needed on this node, 0 found."),
        (SPARK.gpu_facts, Layout(device_ids=(1,)), "--device-ids names GPU 1, but 1 is visible"),
    ],
)
def test_one_gpu_is_singular(gpu_facts: GpuFacts, layout: Layout, seen: str) -> None:
    """Most machines have one."""
    assert seen in found(replace(CUDA, gpu_facts=gpu_facts), layout)["gpu"].seen


@pytest.mark.parametrize(
    ("layout", "remedy"),
    [
        (Layout(4), ", or lower --tensor-parallel-size."),
        (Layout(data_parallel_size=4), ", or lower --data-parallel-size."),
        (Layout(2, 2), ", or lower --tensor-parallel-size or --pipeline-parallel-size."),
        (Layout(), "give the container its GPUs (`--gpus all`)."),
    ],
)
def test_only_sizes_above_one_can_be_lowered(layout: Layout, remedy: str) -> None:
    """The remedy names none that is 1 already."""
    gpus = () if layout == Layout() else (H100,)
    machine = replace(CUDA, gpu_facts=GpuFacts(gpus, ARCHITECTURES))
    assert found(machine, layout)["gpu"].remedy.endswith(remedy)


def test_a_gpu_that_the_cpu_build_leaves_idle_is_a_warning() -> None:
    """It serves, but not where the operator thinks."""
    assert found(replace(CPU, gpu_facts=SPARK.gpu_facts))["gpu"].severity is Severity.WARNING


@pytest.mark.parametrize(
    ("layout", "severity"),
    [(Layout(), "warning"), (TWO, "failure"), (Layout(2, executor="ray"), "warning")],
)
def test_only_gpus_in_use_fail(layout: Layout, severity: str) -> None:
    """The first ones are taken; what is wrong with others is a warning."""
    old = replace(H100, architecture=(7, 0), free_bytes=GIB)
    machine = replace(CUDA, gpu_facts=GpuFacts((H100, old), ARCHITECTURES))
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
