"""vLLM's V2 model runner, the default on GPUs, on the CPU: its kernels are interpreted."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BACKEND = Path(__file__).parent / "triton_on_cpu"
"""A package with an entry point, as installed: a backend of Triton's for the CPU.

vLLM uses Triton on the CPU only with such a backend, and V2 only with Triton.
"""

NEEDS_TRITON = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton's wheels are for x86-64 alone"
)


def environment() -> dict[str, str]:
    """What a server is started with to have the V2 runner."""
    path = [str(BACKEND), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def main() -> None:
    """Run pytest, given what follows on the command line, with that runner in every engine."""
    os.environ |= environment()
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])  # noqa: S606 - there is nothing for a shell to do


if __name__ == "__main__":
    main()
