"""Which GPUs are found, without vLLM."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.doctor.gpus import Gpu, find_gpus


def test_torch_is_not_imported_where_there_is_no_gpu(tmp_path: Path) -> None:
    """The doctor is quick there: neither torch nor vLLM is loaded."""
    script = (
        "import sys; from pathlib import Path; from holdfast.doctor.gpus import find_gpus\n"
        "import holdfast.doctor.command\n"
        f"assert find_gpus(Path({str(tmp_path)!r})).gpus == ()\n"
        "assert not {'torch', 'vllm', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


OLD_DRIVER = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 12020). "
    "Please update your GPU driver. (Triggered internally at /pytorch/c10/cuda/x.cpp:119.)"
)
UNEXPECTED = (
    "CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda "
    "functions before calling NumCudaDevices() that might have already set an error?"
)
NO_FABRIC_MANAGER = f"{UNEXPECTED} Error 802: system not yet initialized"
MISMATCH = (
    f"{UNEXPECTED} Error 803: system has unsupported display driver / cuda driver combination"
)
NO_MPS = f"{UNEXPECTED} Error 805: MPS client failed to connect to the MPS control daemon"
UNKNOWN = "CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up ..."


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine whose kernel shows a GPU."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    return tmp_path


def test_a_build_without_cuda_is_named(root: Path) -> None:
    """The torch of the tests is one, unless they run on a GPU."""
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch is a build for CUDA")
    assert "is a build without CUDA" in find_gpus(root).problem


class DeferredCudaCallError(Exception):
    """That of torch."""


def use_torch(monkeypatch: pytest.MonkeyPatch, cuda_version: str | None, **calls: Any) -> None:
    """Have find_gpus import a torch whose `torch.cuda` has these functions."""
    version = SimpleNamespace(cuda=cuda_version)
    given = {"init": lambda: None, "DeferredCudaCallError": DeferredCudaCallError, **calls}
    cuda = SimpleNamespace(**given)
    torch = SimpleNamespace(__version__="2.13.0", version=version, cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.parametrize(
    ("cuda_version", "said", "visible", "seen", "remedy"),
    [
        (None, "", None, "it is a build without CUDA", "install the CUDA builds"),
        ("13.0", OLD_DRIVER, None, "is too old (found version 12020)", "a driver for CUDA 13.0"),
        ("13.0", OLD_DRIVER, "0", "is too old (found version 12020)", "a driver for CUDA 13.0"),
        ("13.0", MISMATCH, None, "Error 803", "a driver for CUDA 13.0"),
        ("13.0", NO_FABRIC_MANAGER, None, "Error 802", "start nvidia-fabricmanager"),
        ("13.0", NO_MPS, None, "Error 805", "/dev/nvidia-uvm exists"),
        ("13.0", UNKNOWN, None, "CUDA unknown error", "/dev/nvidia-uvm exists"),
        ("13.0", "", "MIG-gone", "DEVICES=MIG-gone may name no GPU", "or unset it; a container"),
        ("13.0", "", "0", "CUDA_VISIBLE_DEVICES=0 may name no GPU", "libcuda.so.1"),
        ("13.0", "", "", "CUDA_VISIBLE_DEVICES= names no GPU", "or unset it."),
        ("13.0", "", "-1", "CUDA_VISIBLE_DEVICES=-1 names no GPU", "or unset it."),
        ("13.0", "", None, "torch 2.13.0 cannot use it", "repair the driver"),
        ("13.0", "", None, "torch 2.13.0 cannot use it", "libcuda.so.1"),
    ],
)
def test_why_torch_finds_no_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    cuda_version: str | None,
    said: str,
    visible: str | None,
    seen: str,
    remedy: str,
) -> None:
    """Torch raises nothing, so its build, its warning or the variable has to say it."""

    def is_available() -> bool:
        if said:
            warnings.warn(said, stacklevel=1)
        return False

    use_torch(monkeypatch, cuda_version, is_available=is_available)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    facts = find_gpus(root)
    assert seen in facts.problem
    assert "Triggered" not in facts.problem
    assert not facts.problem.endswith(".")
    assert remedy in facts.remedy


@pytest.mark.parametrize("error", ["ImportError", "OSError", "ValueError"])
def test_a_torch_that_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch, root: Path, error: str
) -> None:
    """Broken libraries of CUDA raise more than ImportError."""
    (root / "torch.py").write_text(f"raise {error}('libcudart.so.13 is not here')")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(root))
    facts = find_gpus(root)
    assert facts.problem == "cannot import torch: libcudart.so.13 is not here"
    assert "--force-reinstall" in facts.remedy


def test_one_full_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Its context cannot be made, so nothing is asked of the two together."""

    def mem_get_info(index: int) -> tuple[int, int]:
        if not index:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be late.")
        return 60, 80

    board = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=81)
    use_torch(
        monkeypatch,
        "13.0",
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda _index: board,
        get_arch_list=lambda: ["sm_90"],
        mem_get_info=mem_get_info,
        can_device_access_peer=lambda _one, _other: True,
    )
    facts = find_gpus(root)
    assert not facts.problem
    assert not facts.are_peers
    assert facts.gpus == (
        Gpu("NVIDIA H100", (9, 0), 81, 0, problem="CUDA error: out of memory"),
        Gpu("NVIDIA H100", (9, 0), 80, 60),
    )


def test_one_lost_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Torch raises no RuntimeError where it counts fewer than it did before."""

    def get_device_properties(index: int) -> SimpleNamespace:
        if index:
            raise AssertionError("Invalid device id")
        return SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=81)

    use_torch(
        monkeypatch,
        "13.0",
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_properties=get_device_properties,
        get_arch_list=lambda: ["sm_90"],
        mem_get_info=lambda _index: (60, 80),
        can_device_access_peer=lambda _one, _other: True,
    )
    assert find_gpus(root).gpus == (
        Gpu("NVIDIA H100", (9, 0), 80, 60),
        Gpu("", None, 0, 0, problem="Invalid device id"),
    )


@pytest.mark.parametrize("error", [DeferredCudaCallError, AssertionError, RuntimeError])
def test_a_driver_that_cannot_be_initialized_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, root: Path, error: type[Exception]
) -> None:
    """It is initialized before the GPUs are counted: until then, torch counts those of NVML."""

    def init() -> None:
        raise error("CUDA call failed lazily: Invalid device id\n\nCUDA call was invoked at:")

    use_torch(monkeypatch, "13.0", is_available=lambda: True, init=init)
    assert find_gpus(root).problem == "CUDA call failed lazily: Invalid device id"
