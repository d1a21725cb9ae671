"""The kit's checks of a served engine, on the CPU: two starts and one recovery."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_check.checks import CHECKS
from gpu_check.engine.witness import ADDED_BYTES
from gpu_check_runs import run_gpu_check, status_of
from servers import sooner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1700)]

NEED_A_GPU = ("seal_retire_lock", "memory_returned")


def test_what_is_to_be_shown_on_a_gpu_passes_on_the_cpu(tmp_path: Path) -> None:
    """Order, budget, growth, the long prompt, steps, recovery and proof; the rest is named."""
    asked = [check.name for check in CHECKS if check.subject in {"growing", "declared"}]
    code, written, output = run_gpu_check(tmp_path, "--only", *asked, environment=sooner())
    assert code == 0, output
    checks = {check["name"]: check for check in written["checks"]}
    assert [checks[name]["reason"] for name in NEED_A_GPU] == ["torch sees no CUDA device"] * 2
    passed = [name for name, status in status_of(written).items() if status == "passed"]
    assert passed == [name for name in asked if name not in NEED_A_GPU]
    measured = {
        name: {one["name"]: one["value"] for one in check["measured"]}
        for name, check in checks.items()
    }
    assert measured["reservation_in_kv_budget"]["reserved in between"] == ADDED_BYTES
    assert measured["worst_case_proven"]["answers that an engine with growth gave too"]
