"""What our modules that touch a device make of each board: doctor, rank, ledger, restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_paths.fake_boards import BOARDS, GIB, MIG_UUID
from gpu_paths.fake_machine import FakeMachines
from holdfast.workspace.memory_ledger import MARGIN_BYTES

pytestmark = pytest.mark.shares_engine("fake machines")


def found_by_doctor(root: str) -> list[list[Any]]:
    """Every GPU that `holdfast doctor` finds, after much was read from disk."""
    from pathlib import Path

    from gpu_paths.pretended import DRIVER
    from holdfast.doctor.gpus import find_gpus

    DRIVER.free_bytes = 2**30
    return [
        [
            gpu.name,
            list(gpu.architecture or ()),
            gpu.total_bytes,
            gpu.free_bytes,
            gpu.is_unified_memory,
        ]
        for gpu in find_gpus(Path(root)).gpus
    ]


@pytest.mark.parametrize("name", BOARDS)
def test_the_doctor_sees_the_board(machines: FakeMachines, tmp_path: Path, name: str) -> None:
    """Each GPU that this process may use, with what vLLM takes for free."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    board = BOARDS[name]
    free_bytes = board.total_bytes - GIB if board.is_integrated else GIB
    capability = list(board.capability)
    gpu = [board.name, capability, board.total_bytes, free_bytes, board.is_integrated]
    assert machines.ask(name, found_by_doctor, str(tmp_path)) == [gpu] * board.count


def read_by_a_rank() -> list[Any]:
    """Free and growable bytes, and whether the host's memory is meant, with a full page cache."""
    import torch

    from gpu_paths.pretended import DRIVER
    from holdfast.workspace import memory_ledger

    DRIVER.free_bytes, DRIVER.host_available_bytes = 2**30, 50 * 2**30
    cuda = torch.device("cuda", 0)
    reading = memory_ledger.read_device(cuda)
    return [reading.free_bytes, reading.growable_bytes(0), memory_ledger.is_unified_memory(cuda)]


@pytest.mark.parametrize("name", BOARDS)
def test_a_rank_may_grow_into_what_is_free(machines: FakeMachines, name: str) -> None:
    """Where the memory is the host's, its page cache is free."""
    is_integrated = BOARDS[name].is_integrated
    free_bytes = 50 * GIB if is_integrated else GIB
    answer = machines.ask(name, read_by_a_rank)
    assert answer == [free_bytes, free_bytes - MARGIN_BYTES, is_integrated]


def written_into_the_ledger() -> list[Any]:
    """What a start with 20 GiB in use leaves in it, and what is in use then."""
    from types import SimpleNamespace

    import torch

    from gpu_paths.pretended import DRIVER
    from holdfast.workspace.memory_ledger import MemoryLedger

    free_bytes = DRIVER.board.total_bytes - 20 * 2**30
    is_integrated = DRIVER.board.is_integrated
    DRIVER.free_bytes = 2**30 if is_integrated else free_bytes
    DRIVER.host_available_bytes = free_bytes if is_integrated else 2**30
    runner = SimpleNamespace(model_memory_usage=5 * 2**30)
    worker = SimpleNamespace(device=torch.device("cuda", 0), model_runner=runner)
    stats: Any = SimpleNamespace(update=lambda _: None)
    ledger = MemoryLedger(worker, stats)
    ledger.record_weights(made_workspace_bytes=0)
    ledger.begin_sizing()
    ledger.record_sizing(workspace_bytes=2**30)
    ledger.finish(workspace_bytes=2**30)
    return [ledger.sizes, ledger.used_bytes()]


@pytest.mark.parametrize("name", BOARDS)
def test_the_ledger_counts_what_is_in_use_on_the_board(machines: FakeMachines, name: str) -> None:
    """By the host where the memory is the host's, so that its page cache is nobody's."""
    sizes, used_bytes = machines.ask(name, written_into_the_ledger)
    assert used_bytes == 20 * GIB
    assert sizes == {
        "weights": 5 * GIB,
        "non_torch": 14 * GIB,
        "activation_peak": 0,
        "workspace": GIB,
        "total": BOARDS[name].total_bytes,
    }


def awaited_before_a_restart(visible: str | None) -> list[Any]:
    """Whose memory is awaited for two ranks, what is taken of it, and if the driver was asked."""
    import os
    from types import SimpleNamespace

    from gpu_paths.pretended import DRIVER
    from holdfast.engine.launch import device_memory

    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    DRIVER.calls.clear()
    ranks = SimpleNamespace(
        local_world_size=2, data_parallel_size_local=1, assigned_physical_gpu_ids=None
    )
    names = device_memory._names(ranks)
    taken = device_memory._taken(names)
    return [list(names), taken and taken.used_bytes, len(DRIVER.calls)]


@pytest.mark.parametrize(
    ("name", "visible", "answer"),
    [
        ("h100", None, [["0", "1"], 2 * GIB, 0]),
        ("h100", "2,3", [["2", "3"], 2 * GIB, 0]),
        ("mig", None, [[MIG_UUID], GIB, 0]),
        ("gb10", "0", [["0"], GIB, 0]),
        ("jetson", "0", [["0"], None, 0]),
    ],
)
def test_a_restart_awaits_the_memory_of_its_own_devices(
    machines: FakeMachines, name: str, visible: str | None, answer: list[Any]
) -> None:
    """Asked of NVML, which initialises no driver; of the host where NVML does not tell."""
    assert machines.ask(name, awaited_before_a_restart, visible) == answer
