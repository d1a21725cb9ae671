"""vLLM's V2 model runner, the default on GPUs, on the CPU: its kernels are interpreted."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

BACKEND = Path(__file__).parent / "triton_on_cpu"
"""A package with entry points, as installed: Triton's backend for the CPU, and a plug-in of vLLM's.

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
