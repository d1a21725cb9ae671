"""Which flags of vLLM a hazard depends on."""

from __future__ import annotations

import pytest

from holdfast.doctor.parallelism import DEFAULT_MEMORY_UTILIZATION, Layout, read_layout
from holdfast.errors import UsageError


def test_the_share_of_memory_is_that_of_vllm() -> None:
    """Where no utilization is given, the doctor counts with vLLM's default."""
    from vllm.config import CacheConfig

    assert CacheConfig.gpu_memory_utilization == DEFAULT_MEMORY_UTILIZATION


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
        (["m", "--kv-cache-memory-bytes", "1G"], Layout(has_kv_cache_size=True)),
        (["m", "--kv-cache-memory=1073741824"], Layout(has_kv_cache_size=True)),
        (["m", "--device-ids", "3, 1"], Layout(device_ids=(3, 1))),
        (["m", "--device-ids=GPU-a,GPU-b"], Layout(device_ids=("GPU-a", "GPU-b"))),
        (["m", "--master-addr", "10.0.0.1"], Layout(master_address="10.0.0.1")),
    ],
)
def test_the_layout_is_read_from_the_flags_of_vllm(arguments: list[str], layout: Layout) -> None:
    """Long, short and joined flags count, and JSON of vLLM's."""
    assert read_layout(arguments) == layout


def test_a_layout_that_cannot_be_read_is_refused() -> None:
    """The flag is named, for vLLM would refuse it too."""
    with pytest.raises(UsageError, match="tensor-parallel-size"):
        read_layout(["m", "-tp", "many"])


@pytest.mark.parametrize("text", ["1,1", "0,GPU-a"])
def test_device_ids_that_vllm_refuses_are_refused(text: str) -> None:
    """Twice the same, or both kinds."""
    with pytest.raises(UsageError, match="device-ids"):
        read_layout(["m", "--device-ids", text])


@pytest.mark.parametrize("share", ["nan", "inf", "0", "-0.5", "1.01", "most"])
def test_a_share_that_vllm_refuses_is_refused(share: str) -> None:
    """No check can count with it."""
    with pytest.raises(UsageError, match="above 0 and at most 1"):
        read_layout(["m", f"--gpu-memory-utilization={share}"])


def test_each_of_several_nodes_has_as_many_ranks() -> None:
    """A node with one rank has a worker process all the same."""
    layout = Layout(tensor_parallel_size=2, pipeline_parallel_size=2, nodes=2)
    assert (layout.ranks, layout.ranks_everywhere) == (2, 4)
    one_each = Layout(tensor_parallel_size=2, nodes=2)
    assert one_each.ranks == 1
    assert one_each.has_worker_processes(is_cpu_build=False)
    assert not Layout().has_worker_processes(is_cpu_build=False)
