"""An engine that has grown old is replaced when nobody asks, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers import SMALL, running

REACHED = "so it is restarted after 10 s without a request"


@pytest.mark.timeout(600)
def test_an_old_engine_is_replaced_at_a_quiet_moment(tmp_path: Path) -> None:
    """Its client is answered by the old one as long as it goes on asking."""
    flags = ("--demo", *SMALL, "--probe=quick", "--recycle-after=60s", "--log-format=console")
    with running(tmp_path, *flags) as server:
        server.until_ready()
        server.until(
            lambda: server.completion([7] * 20).status_code == 200 and REACHED in server.log,
            "the age",
        )
        for _ in range(20):
            assert server.completion([7] * 20).status_code == 200
        assert server.generation == 1
        server.until(lambda: server.generation == 2, "the next engine")
        server.until_ready()
        assert server.completion([7] * 20).status_code == 200
        assert server.metric("engine_recycles_total", reason="age") == 1
        assert server.metric("engine_recycles_total") == 1
        assert server.metric("requests_lost_total") == 0
