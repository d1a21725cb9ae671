"""Where the memory of a rank went, as its worker says and the server exports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from servers import Server

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("demo")]


def test_a_real_start_is_explained(demo: Server) -> None:
    """A CPU worker logs its ledger at the end of warm-up, at most 5 percent unexplained."""
    found = re.search(r"unexplained\s+-?[\d.]+ MiB\s+(-?[\d.]+)% of what is in use", demo.log)
    assert found is not None
    assert abs(float(found[1])) <= 5
    for kind in ("weights", "kv_cache", "workspace", "non_torch", "budget", "total"):
        assert demo.metric("memory_bytes", kind=kind) > 0
    with pytest.raises(KeyError):
        demo.metric("memory_bytes", kind="cuda_graphs")
    with pytest.raises(KeyError):
        demo.metric("lamport_workspace_bytes")


def test_the_weights_are_those_of_the_checkpoint(demo: Server) -> None:
    """All of them, also those that vLLM packs. The demo model is served in float32."""
    checkpoint = load_file(Path(demo.status["configuration"]["model"]) / "model.safetensors")
    weights_bytes = sum(4 * weight.numel() for weight in checkpoint.values())
    assert demo.metric("memory_bytes", kind="weights") >= weights_bytes
