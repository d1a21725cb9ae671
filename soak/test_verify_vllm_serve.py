"""`holdfast verify` judges a plain `vllm serve` of the demo model by the same checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import sides
from verified import require_report

PROFILE_SECONDS = 900.0
PROFILES = ("quick", "standard")


def test_vllm_serve_passes(tmp_path: Path) -> None:
    """What needs Holdfast is skipped, and all else passes."""
    with sides.bench_of([], tmp_path).ready("vllm serve") as server:
        for profile in PROFILES:
            report = tmp_path / profile
            command = [sys.executable, "-m", "holdfast", "verify", server.url]
            done = subprocess.run(  # noqa: S603 - our own command line
                [*command, "--profile", profile, "--out", str(report)],
                capture_output=True,
                text=True,
                timeout=PROFILE_SECONDS,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            require_report(json.loads((report / "report.json").read_text()))
