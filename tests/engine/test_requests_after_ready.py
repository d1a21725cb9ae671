"""After READY no request makes a workspace grow: the promise itself."""

from __future__ import annotations

import pytest

from random_requests import send_random_requests, workspace_totals
from servers import Server

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("learned")]

REQUESTS = 100


def test_random_requests_after_ready_change_no_workspace(second_start: Server) -> None:
    """Any length, cache hit, concurrency, n and log-probs: nothing grows and nothing is refused.

    `make soak` sends 2,000 to each of four forms of the demo model.
    """
    before = workspace_totals(second_start)
    send_random_requests(second_start, REQUESTS, seed=5, longest_tokens=2048)
    assert workspace_totals(second_start) == before
    assert [set(rank["growths"].values()) for rank in before] == [{0}]
    assert [set(rank["rejections"].values()) for rank in before] == [{0}]
