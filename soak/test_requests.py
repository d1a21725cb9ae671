"""2,000 requests of random shape after READY, on four forms of the demo model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.demo.files import ensure_demo_model
from holdfast.demo.switches import DemoFault, DemoSwitches
from random_requests import MAX_TOKENS, PEAK_TOKENS, send_random_requests, workspace_totals
from servers import SMALL, running

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "2000"))
MIB = 1024 * 1024
FORMS = {
    "declared": DemoSwitches(),
    "learned": DemoSwitches(declares_need=False),
    "non-monotone": DemoSwitches(
        faults=(DemoFault("step_tokens", PEAK_TOKENS, "scratch", 16 * MIB, until=PEAK_TOKENS),)
    ),
    "persistent": DemoSwitches(faults=(DemoFault("context", 512, "persistent", MIB),)),
}


@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("form", FORMS)
def test_random_requests_after_ready_change_no_workspace(form: str, tmp_path: Path) -> None:
    """Any length, cache hit, concurrency, n and log-probs: nothing grows and nothing is refused."""
    model = ensure_demo_model(tmp_path / "models", FORMS[form])
    with running(tmp_path, str(model), *SMALL, "--learned-restart=always") as server:
        server.until_ready()
        before = workspace_totals(server)
        send_random_requests(server, REQUESTS, seed=11, longest_tokens=MAX_TOKENS)
        after = workspace_totals(server)
    assert after == before
    # No reservation can hold a resource: one that warm-up did not make, the probe makes.
    assert [rank["growths"]["locked"] for rank in before] == [form == "persistent"]
    assert [set(rank["rejections"].values()) for rank in before] == [{0}]
