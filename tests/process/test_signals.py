"""What SIGTERM and SIGINT do in each state; a real process, with a stand-in for the engine."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

import stand_in_engine
from servers import Server, descendants, has_ended, running, title_of, wait_until

COMMAND = (sys.executable, str(Path(stand_in_engine.__file__)), "serve")
UNPROBED = ("model", "--probe=off", "--learned-dir=none")
ENDLESS = "GET /v1/stream?until=/no/such/file HTTP/1.1\r\nhost: h\r\n\r\n"
DEADLINE_SECONDS = 60.0
BEFORE_NEXT_SCRAPE_SECONDS = 25.0
"""A server that waited for a scrape did so for 30 s."""


def serving(
    directory: Path, *arguments: str, behaviour: str = ""
) -> AbstractContextManager[Server]:
    """A server around the stand-in, with its temporary files in `directory/tmp`."""
    temporary = directory / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {"STAND_IN": behaviour, "TMPDIR": str(temporary)}
    return running(directory, *arguments, environment=environment, command=COMMAND)


def engine_of(server: Server) -> psutil.Process:
    """The child that stands in for the engine, once it runs; Python's own helpers are none."""
    engines = server.until(lambda: _engines_below(server.process.pid), "an engine")
    return engines[0]


def _engines_below(pid: int) -> list[psutil.Process]:
    return [child for child in descendants(pid) if stand_in_engine.STUBBORN in title_of(child)]


@contextmanager
def stream(server: Server, until: Path) -> Iterator[Iterator[str]]:
    """Yield the lines, after the first, of a stream that goes on until there is a file."""
    url = f"{server.url}/v1/stream?until={until}"
    with httpx.stream("GET", url, timeout=DEADLINE_SECONDS) as response:
        lines = response.iter_lines()
        assert next(lines) == "begun"
        yield lines


def assert_nothing_left(directory: Path, *children: psutil.Process) -> None:
    """No child runs and no temporary file is left."""
    wait_until(
        lambda: all(map(has_ended, children)),
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: f"still running: {children}",
    )
    assert list((directory / "tmp").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_an_engine_is_replaced_ends_cleanly(
    tmp_path: Path, number: signal.Signals
) -> None:
    """RECOVERING with nothing in flight: exit 0, and the half-started engine is gone."""
    with serving(tmp_path, *UNPROBED, behaviour="starts-once") as server:
        server.until_state("READY")
        engine_of(server).kill()
        server.until_state("RECOVERING")
        children = descendants(server.process.pid)
        assert server.stop(number) == 0
    assert_nothing_left(tmp_path, *children)


def test_a_lost_engine_without_a_restart_left_is_exit_5(tmp_path: Path) -> None:
    """The last line names the cause, and the flag that allows more."""
    with serving(tmp_path, *UNPROBED, "--max-engine-restarts=0") as server:
        server.until_state("READY")
        engine_of(server).kill()
        assert server.wait() == 5
        assert "core_exit" in server.last_line
        assert "--max-engine-restarts" in server.last_line


def test_a_failed_server_waits_for_no_further_scrape(tmp_path: Path) -> None:
    """A client that has asked for metrics regularly, and asks no more, does not delay the end."""
    with serving(tmp_path, *UNPROBED, "--max-engine-restarts=0") as server:
        server.until_state("READY")
        for _ in range(2):
            assert httpx.get(f"{server.url}/metrics", timeout=DEADLINE_SECONDS).status_code == 200
        engine_of(server).kill()
        assert server.process.wait(BEFORE_NEXT_SCRAPE_SECONDS) == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_engine_starts_ends_cleanly(
    tmp_path: Path, number: signal.Signals
) -> None:
    """STARTING: exit 0, and the half-started engine is gone."""
    with serving(tmp_path, *UNPROBED, behaviour="never-starts") as server:
        child = engine_of(server)
        assert server.stop(number) == 0
        assert_nothing_left(tmp_path, child)
        assert "holdfast: error" not in server.log


def test_a_signal_while_probing_ends_cleanly(tmp_path: Path) -> None:
    """PROBING: exit 0 at once, whatever the probe waits for."""
    arguments = ("model", "--probe=quick", "--learned-dir=none")
    with serving(tmp_path, *arguments, behaviour="never-answers") as server:
        server.until_state("PROBING")
        child = engine_of(server)
        assert server.stop() == 0
        assert_nothing_left(tmp_path, child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_running_stream_finishes_and_nobody_new_enters(
    tmp_path: Path, number: signal.Signals
) -> None:
    """READY: the stream goes on to its end, a new request gets 503, and the exit code is 0."""
    with serving(tmp_path, *UNPROBED) as server:
        server.until_ready()
        child = engine_of(server)
        with stream(server, tmp_path / "enough") as lines:
            server.process.send_signal(number)
            server.until_state("DRAINING")
            refused = server.get("/v1/models")
            (tmp_path / "enough").touch()
            assert list(lines)[-1] == "ended"
        assert refused.status_code == 503
        assert refused.headers["x-holdfast-state"] == "DRAINING"
        assert server.wait() == 0
        assert_nothing_left(tmp_path, child)


def test_a_stream_that_outlasts_the_drain_is_cut(tmp_path: Path) -> None:
    """After --drain-timeout the server ends cleanly, even if clients still read."""
    with serving(tmp_path, *UNPROBED, "--drain-timeout=1") as server:
        server.until_ready()
        child = engine_of(server)
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), DEADLINE_SECONDS) as client:
            client.sendall(ENDLESS.encode())
            received = b""
            while b"begun" not in received and (part := client.recv(4096)):
                received += part
            server.process.send_signal(signal.SIGTERM)
            received += b"".join(iter(lambda: client.recv(4096), b""))
        assert received.startswith(b"HTTP/1.1 200")
        assert b"begun" in received
        assert not received.endswith(b"\r\n0\r\n\r\n")
        assert server.wait() == 0
        assert_nothing_left(tmp_path, child)
        assert "Traceback" not in server.log


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(tmp_path: Path, second: signal.Signals) -> None:
    """While draining: 128 + the number of the signal, no engine, no socket, no temporary file."""
    uds = tmp_path / "server.sock"
    with serving(tmp_path, *UNPROBED, f"--uds={uds}", "--drain-timeout=600") as server:
        server.until(lambda: "state: READY" in server.log, "READY")
        child = engine_of(server)
        client = httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), timeout=60)
        url = "http://localhost/v1/stream?until=/no/such/file"
        with client, client.stream("GET", url) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.until(lambda: "state: DRAINING" in server.log, "DRAINING")
            server.process.send_signal(second)
            assert server.wait() == 128 + second
        assert_nothing_left(tmp_path, child)
        assert not list(uds.parent.glob(f"{uds.name}*"))


def test_a_clean_stop_removes_the_unix_socket(tmp_path: Path) -> None:
    """Neither it nor its lock is left."""
    uds = tmp_path / "server.sock"
    with serving(tmp_path, *UNPROBED, f"--uds={uds}") as server:
        server.until(lambda: "state: READY" in server.log, "READY")
        assert uds.is_socket()
        assert server.stop() == 0
        assert not list(uds.parent.glob(f"{uds.name}*"))


def test_a_busy_port_is_known_before_anything_else(tmp_path: Path) -> None:
    """Exit 6, and the one line names the address and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with running(tmp_path, *UNPROBED, command=COMMAND, port=port) as server:
            assert server.wait() == 6
            line = re.escape(f"holdfast: error: 127.0.0.1:{port} is in use") + ".* Remedy: .+"
            assert re.fullmatch(line, server.log.strip())


@pytest.mark.parametrize(
    ("flags", "is_said"), [((), True), (("--api-key", "a-key-of-ours"), False)]
)
def test_a_start_warns_that_anyone_can_use_the_server(
    flags: tuple[str, ...], *, is_said: bool
) -> None:
    """The first line says that anyone can, and the remedy; or that a key is short."""
    with socket.create_server(("0.0.0.0", 0)) as other:  # noqa: S104 - so that the start ends here
        command = [sys.executable, "-m", "holdfast", "serve", *UNPROBED, *flags]
        done = subprocess.run(
            [*command, f"--port={other.getsockname()[1]}"],
            timeout=DEADLINE_SECONDS * 3,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 6
    assert ("WARNING" in done.stderr and "without an API key" in done.stderr) is is_said
    assert ("WARNING" in done.stderr and "shorter than 16 characters" in done.stderr) is not is_said
