"""A page of an origin that `--allowed-origins` names may read a real server's own answers."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx

import stand_in_engine
from servers import running

COMMAND = (sys.executable, str(Path(stand_in_engine.__file__)), "serve")
PAGE = "https://chat.example.com"


def test_the_flags_reach_the_answers(tmp_path: Path) -> None:
    """Those of all states, and none of vLLM's application."""
    arguments = ("model", "--probe=off", "--learned-dir=none")
    allowed = (f'--allowed-origins=["{PAGE}"]', "--allow-credentials")
    with running(tmp_path, *arguments, *allowed, environment={}, command=COMMAND) as server:
        server.until_state("READY")
        headers = httpx.get(f"{server.url}/statusz", headers={"origin": PAGE}).headers
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["access-control-allow-credentials"] == "true"
