"""The page of a real server, as promtool reads it."""

from __future__ import annotations

import pytest

from ops.prometheus import promtool
from servers import Server

pytestmark = [pytest.mark.engine, pytest.mark.tools, pytest.mark.shares_engine("demo")]


def test_promtool_finds_no_fault_with_our_metrics(demo: Server) -> None:
    """It reads the page whole, and what it complains of are names that vLLM chose."""
    outcome = promtool("check", "metrics", given=demo.get("/metrics").text)
    complaints = outcome.stdout.splitlines()
    assert outcome.returncode in {0, 3}, outcome.stdout
    assert [line for line in complaints if not line.startswith("vllm:")] == []
