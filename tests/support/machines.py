"""Records of machines, as the doctor reads them, and commands of the doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.doctor.checks import check_machine
from holdfast.doctor.findings import Finding
from holdfast.doctor.gpus import Gpu, GpuFacts
from holdfast.doctor.machine import Directory, Machine
from holdfast.doctor.parallelism import Layout

GIB = 1024**3
STATE = Directory("/home/holdfast/.local/state/holdfast", "/home/holdfast/state", "ext4", True)

H100 = Gpu("NVIDIA H100", (9, 0), 80 * GIB, 79 * GIB)
GB10 = Gpu("NVIDIA GB10", (12, 1), 120 * GIB, 115 * GIB, is_unified_memory=True)
RTX_PRO = Gpu("NVIDIA RTX PRO 6000", (12, 0), 96 * GIB, 95 * GIB)

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "compute_120")

CUDA = Machine(
    environment={},
    gpu_facts=GpuFacts((H100, H100), ARCHITECTURES, are_peers=True),
    shared_memory_free_bytes=16 * GIB,
    state_directory=STATE,
)
"""Two H100 on NVLink, with nothing wrong."""

SPARK = replace(CUDA, gpu_facts=GpuFacts((GB10,), ARCHITECTURES))
"""A DGX Spark, which vLLM's default share of its memory leaves too little."""
LESS_MEMORY = Layout(gpu_memory_utilization=0.85)
"""What a DGX Spark has enough for."""

CPU = replace(CUDA, is_cpu_build=True, gpu_facts=GpuFacts())
"""A machine without a GPU and with vLLM's build for it."""


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}
TWO = Layout(tensor_parallel_size=2)
SIZED = ("--kv-cache-memory-bytes", "1G")
"""Flags with which the memory in use on the machine of the test does not matter."""


def found(machine: Machine, layout: Layout = Layout()) -> dict[str, Finding]:  # noqa: B008 - frozen
    """Return the findings about a machine by name."""
    return {finding.name: finding for finding in check_machine(machine, layout)}


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
