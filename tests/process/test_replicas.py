"""Servers that share a directory, each a process with its own stand-in for an engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import httpx
import pytest

import stand_in_engine
from servers import Server, running

COMMAND = (sys.executable, str(Path(stand_in_engine.__file__)), "serve")
KEY, LIMITED = "the-key-of-alice", "the-key-of-a-limited-client"


def serving(directory: Path, *arguments: str) -> AbstractContextManager[Server]:
    """A server with its log and its temporary files in a directory of its own."""
    return running(directory, "model", "--probe=off", *arguments, command=COMMAND)


def ask(server: Server, prompt: str, key: str = KEY) -> httpx.Response:
    """A completion, for which the server starts a new engine if the prompt ends this one."""
    headers = {"authorization": f"Bearer {key}"}
    return server.post("/v1/completions", {"prompt": prompt}, headers=headers)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Server]]:
    """Three servers with one state directory."""
    shared = (f"--learned-dir={tmp_path / 'state'}", f"--api-key={KEY}")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(tmp_path / name, *shared)) for name in ("a", "b", "c")
        ]
        for server in servers:
            server.until_ready()
        yield servers


def until_learned(server: Server) -> None:
    """Return when it has learned of a quarantine from the files of the others."""
    server.until(lambda: "another server has quarantined 1 requests" in server.log, "the others")


def test_no_poison_is_multiplied(replicas: list[Server]) -> None:
    """A request that ends engines meets two, whichever they are; the third server stays up."""
    first, second, third = replicas
    assert ask(first, f"{stand_in_engine.POISON}#1").status_code == 422
    # Quarantined if the second server knew of the first death by then, else suspected there too.
    answer = ask(second, f"{stand_in_engine.POISON}#2")
    assert answer.status_code == 422
    knew = "Requests like this one have ended the engine" in answer.text
    for server in (first, third) if knew else replicas:
        until_learned(server)
    for server in replicas:
        answer = ask(server, f"{stand_in_engine.POISON}#3")
        assert answer.status_code == 422, answer.text
    assert sum(server.metric("engine_deaths_total") for server in replicas) == 2
    assert third.metric("engine_deaths_total") == 0
    assert all(ask(server, "hold").json() == {"tokens": 1} for server in replicas)


def test_what_was_used_today_outlives_the_server(tmp_path: Path) -> None:
    """A key whose tokens are used up is refused by the next server, too."""
    keys = tmp_path / "keys"
    keys.write_text(f"alice: {KEY}\nlimited: {LIMITED} max_tokens_per_day=4\n")
    flags = (f"--api-key-file={keys}", f"--usage-dir={tmp_path / 'usage'}", "--learned-dir=none")
    with serving(tmp_path / "first", *flags) as server:
        server.until_ready()
        # Each request has a prompt and an answer of one token.
        assert [ask(server, "hold", LIMITED).status_code for _ in range(3)] == [200, 200, 429]
        assert server.metric("key_output_tokens_total", key="limited") == 2
        assert server.stop() == 0
    with serving(tmp_path / "second", *flags) as server:
        server.until_ready()
        refused = ask(server, "hold", LIMITED)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 24 * 3600
        assert ask(server, "hold").status_code == 200
        assert server.metric("key_requests_total", key="limited") == 0


def test_a_second_server_on_one_usage_directory_is_exit_2(tmp_path: Path) -> None:
    """Its last line says what to change."""
    flags = (f"--api-key={KEY}", f"--usage-dir={tmp_path / 'usage'}", "--learned-dir=none")
    with serving(tmp_path / "first", *flags) as first:
        first.until_ready()
        with serving(tmp_path / "second", *flags) as second:
            assert second.process.wait(60) == 2
            assert "another server writes to it" in second.last_line
            assert "a directory of its own" in second.last_line
