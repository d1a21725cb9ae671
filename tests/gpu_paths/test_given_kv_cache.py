"""A given KV cache size shrinks by what was reserved, and by nothing that vLLM takes anyway."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.v1.worker import workspace

from gpu_paths.fake_memory import GIB, FakeMemory
from gpu_paths.hooked_worker import config, followed, manager
from holdfast.workspace.plan import MIB
from workspace_managers import view

GIVEN_BYTES = 40 * GIB


@pytest.mark.parametrize(
    ("reserved_bytes", "asked_bytes", "deducted_bytes"),
    [
        (0, 3 * GIB, 0),
        (2 * GIB, 0, 2 * GIB),
        (2 * GIB, GIB, GIB),
        (2 * GIB, 2 * GIB, 0),
        (2 * GIB, 3 * GIB, 0),
    ],
)
def test_only_what_nobody_asked_for_is_taken_off(
    reserved_bytes: int,
    asked_bytes: int,
    deducted_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the profile run asks for vLLM would have allocated beside the given size too."""
    FakeMemory().install(monkeypatch)
    given = config(kv_cache_memory_bytes=GIVEN_BYTES)
    with followed(tmp_path, monkeypatch, vllm_config=given, floor_bytes=reserved_bytes) as worker:
        worker.profile = lambda: view(manager(), asked_bytes)
        assert worker.determine_available_memory() == GIVEN_BYTES - deducted_bytes


def test_each_lane_counts_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one lane asks for does not pay for what another one has reserved."""
    FakeMemory().install(monkeypatch)
    given = config(kv_cache_memory_bytes=GIVEN_BYTES)

    def profile() -> None:
        view(manager(), 3 * GIB)
        with workspace.use_workspace_lane(1):
            view(manager(), MIB)

    with followed(
        tmp_path, monkeypatch, vllm_config=given, floor_bytes=GIB, lanes=2, ubatches=2
    ) as worker:
        worker.profile = profile
        # Lane 0 grew beyond its reservation; lane 1 has its own twice, and asked for 1 MiB of it.
        deducted_bytes = 2 * (GIB - MIB)
        assert worker.determine_available_memory() == GIVEN_BYTES - deducted_bytes


def test_what_one_ubatch_asks_for_is_not_taken_off_for_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's V2 runner profiles without a split, and the other ubatch needs its own later."""
    FakeMemory().install(monkeypatch)
    given = config(kv_cache_memory_bytes=GIVEN_BYTES)
    with followed(tmp_path, monkeypatch, vllm_config=given, ubatches=2) as worker:
        worker.profile = lambda: view(manager(), 3 * GIB)
        assert worker.determine_available_memory() == GIVEN_BYTES


def test_a_size_that_the_reservation_exceeds_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag to raise is in the message."""
    FakeMemory().install(monkeypatch)
    given = config(kv_cache_memory_bytes=GIB)
    with (
        followed(tmp_path, monkeypatch, vllm_config=given, floor_bytes=2 * GIB) as worker,
        pytest.raises(ValueError, match=r"reserve 2147483648 bytes.*--kv-cache-memory-bytes"),
    ):
        worker.determine_available_memory()
