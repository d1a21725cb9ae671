"""Where the memory of a rank went, as its worker says and the server exports."""

from __future__ import annotations

import re

import pytest

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
