"""Records of machines, as the doctor reads them, and commands of the doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.doctor.machine import Directory, Machine
from holdfast.processes.gpus import Gpu, GpuFacts

GIB = 1024**3
STATE = Directory("/home/holdfast/.local/state/holdfast", "/home/holdfast/state", "ext4", True)

H100 = Gpu("NVIDIA H100", (9, 0), 80 * GIB, 79 * GIB)
GB10 = Gpu("NVIDIA GB10", (12, 1), 120 * GIB, 115 * GIB, is_unified_memory=True)
RTX_PRO = Gpu("NVIDIA RTX PRO 6000", (12, 0), 96 * GIB, 95 * GIB)

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "compute_120")

CUDA = Machine(
    environment={},
    graphics=GpuFacts((H100, H100), ARCHITECTURES, are_peers=True),
    swap_free_bytes=16 * GIB,
    shared_memory_free_bytes=16 * GIB,
    state_directory=STATE,
)
"""Two H100 on NVLink, with nothing wrong."""

SPARK = replace(CUDA, graphics=GpuFacts((GB10,), ARCHITECTURES))
"""A DGX Spark with nothing wrong."""

CPU = replace(CUDA, is_cpu_build=True, graphics=GpuFacts())
"""A machine without a GPU and with vLLM's build for it."""


def doctor(
    *arguments: str, environment: Mapping[str, str] | None = None, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """One run of `holdfast doctor` on the machine of the test; `given` is its standard input."""
    return subprocess.run(
        [sys.executable, "-m", "holdfast", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        input=given,
        env={**os.environ, **(environment or {})},
    )


def findings(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What a run with `--json` found."""
    return list(json.loads(done.stdout)["findings"])
