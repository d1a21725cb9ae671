"""An engine that has grown old, or leaks, is replaced when nobody asks, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hostile_run import importable
from servers import SMALL, Server, running

REACHED = "so it is restarted after 10 s without a request"
LEAKS = "--logits-processors=hostile.poison:Poison"
LEAKS_PAST_THE_LIMIT = 16
"""Each is 64 MiB."""
ROOM_MEBIBYTES = 512
"""More than an engine of this size takes beyond its first use."""


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


@pytest.mark.timeout(600)
def test_an_engine_that_leaks_is_replaced(tmp_path: Path) -> None:
    """Its successor holds as much as it did when it was new, and is left alone."""
    with _leaking(tmp_path / "first", "--recycle-after=1TiB") as server:
        new_bytes = server.metric("engine_host_memory_bytes")
    limit_mebibytes = int(new_bytes / 2**20) + ROOM_MEBIBYTES
    with _leaking(tmp_path / "second", f"--recycle-after={limit_mebibytes}MiB") as server:
        for _ in range(LEAKS_PAST_THE_LIMIT):
            leak = {"end_by": "leak"}
            assert server.completion([7] * 20, vllm_xargs=leak).status_code == 200
        server.until(lambda: server.generation == 2, "the next engine")
        server.until_ready()
        assert server.completion([7] * 20).status_code == 200
        assert server.metric("engine_recycles_total", reason="host_memory") == 1
        assert server.metric("engine_host_memory_bytes") < limit_mebibytes * 2**20
        assert server.metric("requests_lost_total") == 0
        assert "that limit is ignored" not in server.log


@contextmanager
def _leaking(directory: Path, *limits: str) -> Iterator[Server]:
    """A server whose worker leaks memory when it is asked to."""
    flags = ("--demo", *SMALL, "--probe=quick", "--log-format=console", LEAKS, *limits)
    directory.mkdir()
    with running(directory, *flags, environment={"PYTHONPATH": importable()}) as server:
        server.until_ready()
        yield server
