"""Out of descriptors: the server goes on, and is itself again when there are some."""

from __future__ import annotations

import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

import stand_in_engine
from self_signed import certificate
from servers import Server, running

COMMAND = (sys.executable, str(Path(stand_in_engine.__file__)), "serve")
ADMIN_KEY = "the-admin-key-of-this-test"
UNPROBED = ("model", "--probe=off", "--learned-dir=none")
LOOK_SECONDS = 3.0
"""In which everything looks that looks every second."""


def files_of(pid: int) -> int:
    """How many files a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@contextmanager
def viewing(server: Server) -> Iterator[tuple[httpx.Client, Callable[[], bool]]]:
    """A viewer of the status page. The function changes the page, and returns if it is told.

    The client keeps its connection.
    """
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    run = {"verdict": "passed", "profile": "quick"}
    with (
        httpx.Client(base_url=server.url, timeout=60, headers=headers) as client,
        httpx.stream("GET", f"{server.url}/statusz/stream", timeout=60) as response,
    ):
        lines = response.iter_lines()
        assert any(line == "event: snapshot" for line in lines)
        client.get("/livez")

        def is_told() -> bool:
            assert client.put("/admin/verify-run", json=run).is_success
            return any(line == "event: change" for line in lines)

        yield client, is_told


def seen(server: Server, seconds: float) -> None:
    """Let it run for a while, alive."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert server.process.poll() is None, server.log[-4000:]
        time.sleep(0.1)


def test_without_a_free_descriptor_the_server_goes_on(tmp_path: Path) -> None:
    """Nothing that looks at something ends for what it cannot see."""
    flags = (*UNPROBED, f"--admin-api-key={ADMIN_KEY}")
    with running(tmp_path, *flags, command=COMMAND) as server, ExitStack() as stack:
        server.until_ready()
        client, is_told = stack.enter_context(viewing(server))
        pid = server.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        open_files = files_of(pid)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files // 2, limits[1]))
        for path in ("/livez", "/readyz", "/metrics", "/statusz", "/ui"):
            assert client.get(path).status_code == 200, path
        assert is_told()
        seen(server, LOOK_SECONDS)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        server.until_ready()
        assert server.get("/metrics").status_code == 200
        stack.close()
        assert server.stop() == 0


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_flood_of_silent_connections_leaves_the_server_its_files(
    tmp_path: Path, has_tls: bool
) -> None:
    """More than it may have open; it answers in the midst of them, and ends as it is asked to."""
    cert, key = certificate(tmp_path) if has_tls else ("", "")
    flags = (f"--ssl-certfile={cert}", f"--ssl-keyfile={key}") if has_tls else ()
    limited = ("prlimit", "--nofile=512:512", *COMMAND)
    with running(tmp_path, *UNPROBED, *flags, command=limited) as server, ExitStack() as stack:
        port = int(server.url.rpartition(":")[2])
        client = stack.enter_context(httpx.Client(verify=False, trust_env=False, timeout=60))  # noqa: S501 - nobody vouches for it

        def is_ready() -> bool:
            return client.get(f"{server.url}/readyz").status_code == 200

        server.until(is_ready, "READY")
        for _ in range(800):
            sock = socket.socket()
            stack.enter_context(sock)
            sock.connect(("127.0.0.1", port))
        seen(server, LOOK_SECONDS)
        assert is_ready()
        assert files_of(server.process.pid) < 512
        assert server.stop() == 0
