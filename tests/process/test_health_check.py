"""`holdfast health` as Docker runs it: a process of its own, beside a server or none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import stand_in_engine
from holdfast import cli
from holdfast.health_check import first_command
from servers import reserved_port, running, wait_until

COMMAND = (sys.executable, str(Path(stand_in_engine.__file__)), "serve")
UNPROBED = ("model", "--probe=off", "--learned-dir=none")
HEADLESS = ("-n2", "-r1", "--headless", "--master-addr=10.0.0.1", "--node-key-file=k")
PROXY = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy"), "http://127.0.0.1:9")


def health(*arguments: str) -> tuple[int, str]:
    """The exit code and the output, where every proxy of the environment is dead."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "health", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **PROXY},
    )
    return done.returncode, done.stdout


def test_a_ready_server_is_healthy(tmp_path: Path) -> None:
    """It is asked at its own port, and past the proxy that the environment names."""
    with running(tmp_path, *UNPROBED, command=COMMAND) as server:
        server.until_ready()
        port = server.url.rpartition(":")[2]
        assert health("--port", port) == (0, "/readyz: HTTP/1.1 200 OK\n")


def test_a_server_that_starts_is_not(tmp_path: Path) -> None:
    """It listens and answers 503."""
    environment = {"STAND_IN": "never-starts"}
    with running(tmp_path, *UNPROBED, command=COMMAND, environment=environment) as server:
        port = server.url.rpartition(":")[2]
        code, output = health(f"--port={port}", "--host=0.0.0.0")
        assert (code, "503" in output) == (1, True)


def test_a_server_on_a_unix_socket_is_asked_there(tmp_path: Path) -> None:
    """As it listens nowhere else."""
    path = tmp_path / "s"
    with running(tmp_path, *UNPROBED, f"--uds={path}", command=COMMAND) as server:
        wait_until(
            lambda: health(f"--uds={path}")[0] == 0,
            deadline_seconds=60,
            what=lambda: server.log,
        )


def test_nobody_there_is_not_healthy() -> None:
    """With the reason in one line, and no traceback."""
    with reserved_port() as port:
        assert health(f"--port={port}") == (1, "/readyz: [Errno 111] Connection refused\n")


def test_a_server_that_says_nothing_is_given_up() -> None:
    """Before Docker kills the check, so that the reason is in what `docker inspect` shows."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        code, output = health(f"--port={sock.getsockname()[1]}")
    assert (code, output) == (1, "/readyz: no answer within 4 s\n")


@pytest.mark.parametrize(
    ("words", "port"),
    [
        (["python3", "/usr/bin/holdfast", "serve", "--demo", "--port", "9000"], 9000),
        (["/sbin/docker-init", "--", "holdfast", "serve", "m", "--port=9000"], 9000),
        (["holdfast", "serve", "m", "--api-key", "***", "--admin-api-key=***"], 8000),
        (["holdfast", "serve", "m", "--served-model-name", ""], 8000),
        (["holdfast", "serve", "m", *HEADLESS], 8001),
        (["holdfast", "follow", "10.0.0.1", "--node-key-file", "k"], 8001),
        (["holdfast", "follow", "serve", "--node-key-file=k", "--port=9000"], 9000),
        (["/bin/bash"], 8000),
    ],
)
def test_the_address_is_that_of_the_first_process(words: list[str], port: int) -> None:
    """A command line is read as the kernel shows it; without a command, the defaults apply."""
    given = first_command(b"".join(word.encode() + b"\0" for word in words))
    assert cli._listen_of(*given).port == port


def test_a_follower_has_no_tls_for_clients() -> None:
    """Though it was started with a copy of the head's command line, which names a certificate."""
    tls = ("--ssl-certfile=c", "--ssl-keyfile=k", "--uds=/s")
    found = cli._listen_of("serve", ["m", *HEADLESS, *tls])
    assert (found.is_tls, found.uds, found.port) == (False, None, 8001)


def test_the_key_of_a_follower_may_be_named_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the check has, too, as both run in one container."""
    monkeypatch.setenv("HOLDFAST_NODE_KEY_FILE", "k")
    assert cli._listen_of("follow", ["10.0.0.1"]).port == 8001


def test_its_help_is_its_own() -> None:
    """It says what the command does, and not how to serve."""
    code, output = health("--help")
    assert code == 0
    assert output.startswith("usage: holdfast health [flags of holdfast serve]\n")
    assert "serve MODEL" not in output


def test_it_imports_nothing_heavy() -> None:
    """What runs every few seconds beside the engine takes little from it."""
    command = [sys.executable, "-X", "importtime", "-m", "holdfast", "health", "--uds=none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "holdfast.health_check" in imported
    heavy = {"vllm", "torch", "asyncio", "httpx", "fastapi", "uvicorn", "yaml", "urllib.request"}
    assert {name.partition(".")[0] for name in imported} & heavy == set()
