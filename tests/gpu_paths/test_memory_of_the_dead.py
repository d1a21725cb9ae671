"""Which memory is awaited before a restart? That of the GPUs which the dead engine had."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from vllm.platforms import current_platform, interface
from vllm.third_party import pynvml

from gpu_paths.fake_boards import MIG_UUID
from gpu_paths.fake_memory import GIB
from holdfast.engine.launch.device_memory import (
    HOST_MARGIN_SHARE,
    MARGIN_BYTES,
    device_memory,
    wait_for_last_engine,
)
from holdfast.workspace.plan import MIB

ENGINE_BYTES = 50 * GIB


class FakeDriver:
    """NVML of a machine with GPUs, and which of them it was asked about."""

    def __init__(self) -> None:
        self.used_bytes: dict[int | str, int] = {}
        self.asked: list[int | str] = []
        self.has_memory = True
        self.readings: list[int] = []
        """What is taken next, before `used_bytes`."""

    def memory(self, device: int | str) -> Any:
        """What is taken of a device; GB10 has no memory of its own."""
        self.asked.append(device)
        if not self.has_memory:
            raise pynvml.NVMLError_NotSupported
        used_bytes = self.readings.pop(0) if self.readings else self.used_bytes.get(device, 0)
        return SimpleNamespace(used=used_bytes)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The driver of a CUDA platform that is not there."""
    fake = FakeDriver()
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", fake.memory)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    monkeypatch.setattr(type(current_platform), "device_control_env_var", "CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def layout(
    *, ranks: int = 1, engines: int = 1, assigned: list[int] | None = None
) -> SimpleNamespace:
    """What of vLLM's ParallelConfig says where ranks run."""
    return SimpleNamespace(
        local_world_size=ranks,
        data_parallel_size_local=engines,
        assigned_physical_gpu_ids=assigned,
    )


@pytest.mark.parametrize(
    ("parallel", "visible", "expected"),
    [
        (layout(ranks=2), "", [0, 1]),
        (layout(ranks=2), "5,3,1", [5, 3]),
        (layout(ranks=2, assigned=[2, 3]), "", [2, 3]),
        (layout(ranks=2, assigned=[6, 4]), "4,5,6", [6, 4]),
        (layout(ranks=2, engines=2), "", [0, 1, 2, 3]),
        (layout(engines=2), "7,6", [7, 6]),
        (layout(ranks=2, engines=2, assigned=[4, 5, 6, 7]), "", [4, 5, 6, 7]),
        (layout(), MIG_UUID, [MIG_UUID]),
        (layout(ranks=2), "0", [0]),
    ],
)
def test_the_gpus_of_the_ranks_are_asked(
    parallel: Any,
    visible: str,
    expected: list[int | str],
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that were named, those of each local engine, and no more than can be seen."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    asyncio.run(device_memory(parallel).until_returned())
    assert driver.asked == expected


@pytest.fixture
def assigned_ids() -> Iterator[None]:
    """As a worker publishes them, and no longer than the test."""
    yield
    interface._assigned_physical_gpu_ids = None


@pytest.mark.usefixtures("assigned_ids")
@pytest.mark.parametrize("visible", ["", "3,2,1"])
@pytest.mark.parametrize("assigned", [None, [2, 3, 1]])
def test_the_mapping_is_that_of_vllms_workers(
    visible: str,
    assigned: list[int] | None,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Local rank r runs on what vLLM maps r to."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    asyncio.run(device_memory(layout(ranks=3, assigned=assigned)).until_returned())
    if assigned:
        interface.set_assigned_physical_gpu_ids(assigned)
    ranks = [current_platform.device_id_to_physical_device_id(rank) for rank in range(3)]
    assert driver.asked == ranks


def test_a_neighbour_on_another_gpu_costs_a_recovery_nothing(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """GPU 0 is not the engine's."""
    memory = device_memory(layout(assigned=[1]))
    asyncio.run(memory.until_returned())
    driver.used_bytes = {0: ENGINE_BYTES, 1: MARGIN_BYTES}
    asyncio.run(memory.until_returned(0))
    assert not caplog.records


def test_processes_of_one_engine_each_compare_with_the_first(
    driver: FakeDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A follower has one for each engine; what the first had in use is kept in a file."""
    baseline = tmp_path / "baseline.json"
    driver.used_bytes = {0: GIB}
    wait_for_last_engine(layout(), baseline)
    wait_for_last_engine(layout(), baseline)
    assert not caplog.records
    driver.used_bytes = {0: GIB + ENGINE_BYTES}
    for _ in range(2):
        caplog.clear()
        wait_for_last_engine(layout(), baseline, deadline_seconds=0)
        assert f"{ENGINE_BYTES // MIB} MiB more in use than before" in caplog.text


def test_the_memory_of_a_dead_engine_is_awaited_by_the_next_process(
    driver: FakeDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver gives it back after the process has ended."""
    baseline = tmp_path / "baseline.json"
    wait_for_last_engine(layout(), baseline)
    driver.readings = [ENGINE_BYTES, ENGINE_BYTES, MARGIN_BYTES]
    wait_for_last_engine(layout(), baseline)
    assert (driver.readings, caplog.records) == ([], [])


@pytest.mark.parametrize("content", [None, "", "{", '{"devices": ["1"], "used_bytes": 1}'])
def test_a_baseline_that_is_missing_broken_or_of_other_gpus_is_not_waited_for(
    content: str | None, driver: FakeDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is taken now is what the next engine is compared with."""
    baseline = tmp_path / "baseline.json"
    if content is not None:
        baseline.write_text(content)
    driver.used_bytes = {0: ENGINE_BYTES}
    wait_for_last_engine(layout(), baseline, deadline_seconds=0)
    wait_for_last_engine(layout(), baseline, deadline_seconds=0)
    assert not caplog.records


def test_a_baseline_that_cannot_be_kept_ends_no_engine(driver: FakeDriver, tmp_path: Path) -> None:
    """The disk may be full; the next engine does not wait then."""
    (tmp_path / "a file").touch()
    wait_for_last_engine(layout(), tmp_path / "a file" / "baseline.json")
    assert driver.asked == [0]


@pytest.mark.parametrize(
    ("more_share", "is_told"), [(HOST_MARGIN_SHARE - 0.001, False), (HOST_MARGIN_SHARE * 2, True)]
)
def test_on_unified_memory_neighbours_may_take_a_few_per_cent(
    more_share: float,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_told: bool,
) -> None:
    """It is the host's, whose other processes come and go."""
    driver.has_memory = False
    host = SimpleNamespace(total=120 * GIB, available=100 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    memory = device_memory(layout())
    asyncio.run(memory.until_returned())
    host.available -= int(host.total * more_share)
    asyncio.run(memory.until_returned(0))
    assert bool(caplog.records) == is_told
