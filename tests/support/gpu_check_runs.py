"""Runs the kit for a machine with a GPU as users do: a process, a report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_check.records import Device, Machine

ROOT = Path(__file__).parents[2]
H200 = Device("NVIDIA H200", "9.0", 150_000_000_000, is_integrated=False)
MACHINE = Machine("Linux 6", "x86_64", "3.12.3", "2.13.0+cu130", "13.0", "580", "0.32.0")
"""With all that is needed but a GPU."""
PATIENCE = 4.0
"""By which its deadlines are multiplied: the tests share their machine."""
RUN_SECONDS = 1400.0
"""The kit ends its run then: a start of stock vLLM took eight minutes beside other tests."""


def run_gpu_check(
    directory: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any], str]:
    """The exit code, the report and the output of a run of the kit."""
    command = [sys.executable, "-m", "gpu_check", "--output", str(directory)]
    done = subprocess.run(
        [*command, f"--patience={PATIENCE}", f"--run-seconds={RUN_SECONDS}", *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS + 60,
        check=False,
    )
    path = directory / "report.json"
    written = json.loads(path.read_text()) if path.exists() else {}
    return done.returncode, written, done.stdout + done.stderr


def status_of(written: Mapping[str, Any]) -> dict[str, str]:
    """The status of each check."""
    return {check["name"]: check["status"] for check in written["checks"]}
