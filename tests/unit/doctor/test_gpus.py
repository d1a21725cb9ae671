"""Which GPUs are found, without vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.doctor.gpus import find_gpus


def test_torch_is_not_imported_where_there_is_no_gpu(tmp_path: Path) -> None:
    """The doctor is quick there: neither torch nor vLLM is loaded."""
    script = (
        "import sys; from pathlib import Path; from holdfast.doctor.gpus import find_gpus\n"
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
