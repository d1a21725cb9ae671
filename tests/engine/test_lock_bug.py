"""The failure that Holdfast exists for, and its cure, on the same model with the same prompt."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import lock_shim
from servers import SMALL, Server, reserved_port, running

pytestmark = pytest.mark.engine


LONG_PROMPT = [65 + i % 26 for i in range(3000)]
STOCK = (sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry")


def test_long_prompt_kills_stock_vllm_and_is_answered_by_holdfast(
    silent_demo: Path, second_start: Server, tmp_path: Path
) -> None:
    """Stock: `/health` is 200, the first long prompt kills the engine. Holdfast: it is answered."""
    environment = lock_shim.install(tmp_path / "shim")
    model = str(silent_demo)
    flags = (*SMALL, "--served-model-name=demo")
    with (
        reserved_port() as port,
        running(
            tmp_path / "stock",
            "--model",
            model,
            *flags,
            environment=environment,
            command=STOCK,
            port=port,
        ) as stock,
    ):
        stock.until(lambda: stock.is_healthy, "stock vLLM")
        assert stock.completion("short").status_code == 200
        assert stock.is_healthy
        assert stock.completion(LONG_PROMPT).status_code == 500
        stock.until(lambda: "Workspace is locked but allocation from" in stock.log, "the assertion")
        stock.wait()
    assert second_start.completion(LONG_PROMPT).status_code == 200
    (rank,) = second_start.status["workspace"]
    assert rank["rejections"] == {"scratch": 0, "persistent": 0, "permute": 0}
    assert rank["growths"] == {"warmup": 0, "sealed": 0, "locked": 0}
    assert rank["is_locked"]
