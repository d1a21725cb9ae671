"""The failure that Holdfast exists for, and its cure, on the same kind of model and prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import left_in_shared_memory
from gpu_check_runs import run_gpu_check
from servers import Server, sooner, wait_until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.shares_engine("learned"),
    pytest.mark.timeout(1700),
]


LONG_PROMPT = [65 + i % 26 for i in range(3000)]


def test_long_prompt_kills_stock_vllm_and_is_answered_by_holdfast(
    second_start: Server, tmp_path: Path
) -> None:
    """Stock: `/health` is 200, the first long prompt kills the engine. Holdfast: it is answered."""
    before = left_in_shared_memory()
    only = ("--only", "stock_engine_dies")
    code, written, output = run_gpu_check(tmp_path, *only, environment=sooner())
    assert code == 0, output
    (stock,) = [check for check in written["checks"] if check["status"] == "passed"]
    measured = {one["name"]: one["value"] for one in stock["measured"]}
    assert measured["answer"] == "HTTP 500"
    assert str(measured["cause"]).startswith("Workspace is locked but allocation from 'model.py:")
    wait_until(  # a neighbour's engine of stock vLLM may have just died as well
        lambda: not _rings_left(before),
        deadline_seconds=60,
        what=lambda: f"the dead engine has left {_rings_left(before)}",
    )
    assert second_start.completion(LONG_PROMPT).status_code == 200
    (rank,) = second_start.status["workspace"]
    assert rank["rejections"] == {"scratch": 0, "persistent": 0, "permute": 0}
    assert rank["growths"] == {"warmup": 0, "sealed": 0, "locked": 0}
    assert rank["is_locked"]


def _rings_left(before: set[Path]) -> list[Path]:
    return [path for path in left_in_shared_memory() - before if path.name.startswith("psm_")]
