"""vLLM takes a fake board for the real one, and what the fork server imports leaves it alone."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_paths.fake_boards import BOARDS
from gpu_paths.fake_machine import FakeMachines

pytestmark = pytest.mark.shares_engine("fake machines")

WITH_NVML = ("h100", "h200", "gb10", "rtxpro6000")


def seen() -> dict[str, Any]:
    """What vLLM's platform says of the board."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    return {
        "platform": type(current_platform).__name__,
        "name": current_platform.get_device_name(),
        "capability": list(current_platform.get_device_capability()),
        "is_integrated": current_platform.is_integrated_gpu(),
        "count": current_platform.device_count(),
        "has_triton": HAS_TRITON,
    }


@pytest.mark.parametrize("name", BOARDS)
def test_vllm_believes_in_the_board(machines: FakeMachines, name: str) -> None:
    """It finds it as it finds a real one: by NVML, or by the mark of a board without it."""
    board = BOARDS[name]
    assert machines.ask(name, seen) == {
        "platform": "NvmlCudaPlatform" if board.has_nvml else "NonNvmlCudaPlatform",
        "name": board.name,
        "capability": list(board.capability),
        "is_integrated": board.is_integrated,
        "count": board.count,
        "has_triton": True,
    }


def initialised_by() -> list[list[str]]:
    """Which calls have initialised the driver while the fork server's modules were imported."""
    from gpu_paths.pretended import DRIVER

    return [[call.name, *call.places] for call in DRIVER.calls]


@pytest.mark.parametrize("name", WITH_NVML)
def test_no_import_of_the_fork_server_initialises_the_driver(
    machines: FakeMachines, name: str
) -> None:
    """Else no engine that is forked from it could."""
    assert machines.ask(name, initialised_by) == []


@pytest.mark.parametrize("name", ["mig", "jetson"])
def test_where_nvml_does_not_count_vllm_asks_the_driver(machines: FakeMachines, name: str) -> None:
    """Triton does while vLLM is imported, see `forkserver`; once it does not, that can go."""
    assert "_cuda_getDeviceCount" in {call[0] for call in machines.ask(name, initialised_by)}
