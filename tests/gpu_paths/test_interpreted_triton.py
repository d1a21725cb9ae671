"""The interpreter that runs vLLM's Triton kernels on the CPU, for tests of the V2 runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import v2_runner

pytestmark = v2_runner.NEEDS_TRITON

KERNELS = Path(__file__).with_name("interpreted_kernels.py")
DEADLINE_SECONDS = 240.0


def launched(environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """The kernels, launched in a process of their own."""
    return subprocess.run(
        [sys.executable, str(KERNELS)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


def test_kernels_do_what_they_do_when_compiled() -> None:
    """Masks are made of a scalar's comparison and a block's, counters are cast, NaNs are found."""
    done = launched(v2_runner.environment())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "bits": [1, 0, 1, 0, 1, 1, 0, 0],
        "numbers": [0, 1, 2, 3, 4, 5, 6, 7],
        "nans": [0, 0, 1, 0, 0, 0, 0, 0],
    }


def test_triton_needs_the_fixes() -> None:
    """One that does not makes `fixes.py` shorter."""
    refused = launched({"TRITON_INTERPRET": "1"}).stderr
    assert "mask has unsupported dtype" in refused
    assert "'int' object has no attribute 'to'" in refused
    assert "'NoneType' object has no attribute 'to'" in refused
