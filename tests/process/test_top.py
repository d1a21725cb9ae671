"""`holdfast top` as people run it: a process of its own, beside a server that comes and goes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import stand_in_engine
from servers import Server, reserved_port, running, wait_until

DEADLINE_SECONDS = 60.0
COMMAND = (sys.executable, str(Path(stand_in_engine.__file__)), "serve")
UNPROBED = ("model", "--probe=off", "--learned-dir=none")
LEAVE_SCREEN, SHOW_CURSOR = "\x1b[?1049l", "\x1b[?25h"
TOP = (sys.executable, "-m", "holdfast", "top")


def top(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One run in a pipe."""
    return subprocess.run(
        [*TOP, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
        env={**os.environ, **environment},
    )


class Terminal:
    """What a run has drawn on a terminal so far."""

    def __init__(self, process: subprocess.Popen[bytes], parent: int) -> None:
        self.process = process
        self.drawn = ""
        self._awaited = 0
        """How much of it was awaited already."""
        self._parent = parent
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def until_drawn(self, text: str) -> None:
        """Wait until a text is drawn, after what was awaited before."""
        wait_until(
            lambda: text in self.drawn[self._awaited :],
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: f"no {text!r} in {self.drawn[self._awaited :]!r}",
        )
        self._awaited = len(self.drawn)

    def end(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit code once all that was drawn is here."""
        self.process.send_signal(number)
        code = self.process.wait(DEADLINE_SECONDS)
        self._reading.join(DEADLINE_SECONDS)
        return code

    def _read(self) -> None:
        while part := _part_of(self._parent):
            self.drawn += part.decode(errors="replace")
        os.close(self._parent)


def _part_of(screen: int) -> bytes:
    try:
        return os.read(screen, 65536)
    except OSError:  # nobody holds the other end
        return b""


@contextmanager
def drawn(arguments: Sequence[str], **more: str) -> Iterator[Terminal]:
    """A run on a terminal; when left, it is gone."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40", **more}
    process = subprocess.Popen(
        [*TOP, *arguments], stdin=child, stdout=child, stderr=child, env=environment
    )
    os.close(child)
    terminal = Terminal(process, parent)
    try:
        yield terminal
    finally:
        if process.poll() is None:
            terminal.end(signal.SIGKILL)


@contextmanager
def served(directory: Path, port: int, *flags: str) -> Iterator[Server]:
    """A ready server at a port."""
    arguments = (*UNPROBED, *flags)
    with running(directory, *arguments, command=COMMAND, port=port) as server:
        server.until_ready()
        yield server


def test_a_pipe_gets_the_status_once(tmp_path: Path) -> None:
    """As text, with and without the flag."""
    with served(tmp_path, 0) as server:
        found = [top(server.url), top(server.url, "--once"), top(f"{server.url}/v1", "--once")]
    for run in found:
        assert (run.returncode, run.stderr) == (0, "")
        assert run.stdout.startswith("READY for ")
        assert "generation 1" in run.stdout
        assert "\x1b" not in run.stdout


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_letter_without_a_code_is_a_question_mark(tmp_path: Path, encoding: str) -> None:
    """In a pipe and on a terminal, whose locale may be C."""
    with served(tmp_path, 0, "--admin-api-key=the-admin-of-this-test") as server:
        told = {"verdict": "passed", "profile": "模型"}
        headers = {"Authorization": "Bearer the-admin-of-this-test"}
        assert httpx.put(f"{server.url}/admin/verify-run", json=told, headers=headers).is_success
        run = top(server.url, PYTHONIOENCODING=encoding)
        with drawn([server.url], PYTHONIOENCODING=encoding) as terminal:
            terminal.until_drawn("READY")
            terminal.until_drawn("??")
            assert terminal.end(signal.SIGINT) == 0
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("READY for ")
    assert "??" in run.stdout


def test_a_wrong_key_is_said(tmp_path: Path) -> None:
    """The right one is read from its file."""
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    key.write_text("# a comment\nthe-key-of-this-test\n")
    wrong.write_text("another-key-than-that\n")
    with served(tmp_path, 0, "--api-key=the-key-of-this-test") as server:
        found = [
            top(server.url, "--once", *flags)
            for flags in ((), (f"--api-key-file={wrong}",), (f"--api-key-file={key}",))
        ]
    assert [run.returncode for run in found] == [2, 2, 0]
    assert "does not accept the key (401)" in found[0].stderr
    assert "another-key-than-that" not in found[1].stdout + found[1].stderr


def test_a_server_without_the_page_is_said(tmp_path: Path) -> None:
    """With the flag that turned it off."""
    with served(tmp_path, 0, "--ui=off") as server:
        run = top(server.url, "--once")
    assert (run.returncode, "--ui off" in run.stderr) == (2, True)


@pytest.mark.parametrize("url", ["http://[::1", "http://spark:abc", "http://:8000", "spark:8000"])
def test_what_is_not_an_address_is_said(url: str) -> None:
    """In one line."""
    run = top(url, "--once")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "is not the address of a server" in run.stderr


def test_nobody_there_is_said_at_once() -> None:
    """A single question is not repeated."""
    with reserved_port() as port:
        run = top(f"http://127.0.0.1:{port}", "--once")
    assert (run.returncode, run.stdout) == (3, "")
    assert "is not reachable" in run.stderr or "connect" in run.stderr


def test_a_terminal_outlasts_a_server_with_another_key(tmp_path: Path) -> None:
    """A person who watches a replacement would otherwise lose what was shown before it."""
    with reserved_port() as port, drawn([f"http://127.0.0.1:{port}"]) as terminal:
        with served(tmp_path, port):
            terminal.until_drawn("READY")
        with served(tmp_path, port, "--api-key=another-key-than-none"):
            terminal.until_drawn("does not accept the key (401); trying again")
        assert terminal.end(signal.SIGINT) == 0


def test_a_terminal_follows_a_server_that_comes_and_goes(tmp_path: Path) -> None:
    """It says that it tries again, and Ctrl-C leaves the terminal as it was."""
    with reserved_port() as port, drawn([f"http://127.0.0.1:{port}"]) as terminal:
        terminal.until_drawn("trying again")
        with served(tmp_path, port) as server:
            terminal.until_drawn("READY")
            server.process.send_signal(signal.SIGTERM)
            server.wait()
        terminal.until_drawn("the server stopped; trying again")
        with served(tmp_path, port):
            terminal.until_drawn("READY")
            assert terminal.end(signal.SIGINT) == 0
    after = terminal.drawn.rpartition(LEAVE_SCREEN)
    assert (after[1], after[2].strip(), SHOW_CURSOR in terminal.drawn) == (LEAVE_SCREEN, "", True)


@pytest.mark.parametrize("command", ["top", "verify"])
def test_a_proxy_that_cannot_be_used_is_bad_usage(command: str) -> None:
    """Without a traceback: the variable may be one that the shell sets for all programs."""
    arguments = [sys.executable, "-m", "holdfast", command, "http://127.0.0.1:1"]
    proxied = {**os.environ, "ALL_PROXY": "socks5://localhost:1080"}
    run = subprocess.run(
        arguments, capture_output=True, text=True, timeout=60, check=False, env=proxied
    )
    assert run.returncode == 2, run.stderr
    assert "ALL_PROXY" in run.stderr
    assert "Traceback" not in run.stderr
