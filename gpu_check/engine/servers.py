"""Starts Holdfast and stock vLLM with the demo model, asks them, and ends all they made."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gpu_check import process_tree
from gpu_check.records import TAIL_CHARACTERS, CheckFailedError

ASK_SECONDS = 120.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.2
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxy of the shell leads to a server of this machine."""
_LISTENING = re.compile(r"listening on (?:every address, )?(\S+)")


@dataclass(frozen=True, slots=True)
class Server:
    """One process that serves, and what it writes."""

    process: subprocess.Popen[bytes]
    log_path: Path
    port: int
    """Where stock vLLM was told to listen; Holdfast, told 0, says it in its log."""

    @property
    def log(self) -> str:
        """Everything it has written so far."""
        return self.log_path.read_text(errors="replace")

    def tail(self) -> str:
        """The end of its log."""
        return self.log[-TAIL_CHARACTERS:]

    @property
    def url(self) -> str:
        """Where it listens; empty until it says so."""
        if self.port:
            return f"http://127.0.0.1:{self.port}"
        return next(iter(_LISTENING.findall(self.log)), "")

    def until(self, is_so: Callable[[], bool], what: str, deadline_seconds: float) -> float:
        """Wait for `is_so` while the process lives; how many seconds it took.

        Raises:
            CheckFailedError: it was not so in time, or the process ended.
        """
        began_seconds = time.monotonic()
        while not is_so():
            elapsed_seconds = time.monotonic() - began_seconds
            if self.process.poll() is not None:
                code = self.process.returncode
                self._fail(f"the server ended with exit code {code} before it was {what}")
            if elapsed_seconds > deadline_seconds:
                self._fail(f"the server was not {what} in {deadline_seconds:.0f} s")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began_seconds

    def _fail(self, what: str) -> NoReturn:
        last_line = self.log.rstrip().rpartition("\n")[2]
        raise CheckFailedError(f"{what}; its last line: {last_line}", log_tail=self.tail())

    def answers_200(self, path: str) -> bool:
        """Whether a GET of `path` is answered with 200 now."""
        return bool(self.url) and self.ask(path)[0] == 200

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON of one request; status 0 if nobody answered."""
        try:
            with self.opened(path, body) as response:
                return int(response.status), json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except (OSError, ValueError) as error:
            return 0, str(error)

    def opened(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The response of one request, to be read and closed."""
        request = urllib.request.Request(  # noqa: S310 - a server that was just started here
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        return _OPENER.open(request, timeout=ASK_SECONDS)

    def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        """The greedy continuation of `prompt` by `count` tokens.

        Raises:
            CheckFailedError: it was not answered.
        """
        status, answer = self.ask("/v1/completions", completion(prompt, count))
        if status != 200:
            raise CheckFailedError(f"a prompt of {len(prompt)} tokens: {status} {answer}")
        return list(answer["choices"][0]["token_ids"])

    def status(self) -> dict[str, Any]:
        """The report of Holdfast's `/statusz`."""
        status, answer = self.ask("/statusz")
        if status != 200:
            raise CheckFailedError(f"/statusz: {status} {answer}")
        return dict(answer)

    def cores(self) -> list[int]:
        """The processes of the engine that schedule its steps."""
        below = process_tree.descendants(self.process.pid)
        return [pid for pid in below if b"EngineCore" in _command_line(pid)]

    def stop(self) -> int:
        """End it as an operator does; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def completion(prompt: Sequence[int], count: int) -> dict[str, Any]:
    """The body of a request for exactly `count` greedy tokens."""
    return {
        "model": "demo",
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    port: int = 0,
) -> Iterator[Server]:
    """A server that was just started; when left, it and all that it made are gone."""
    log_path = directory / f"{name}-{time.monotonic_ns()}.log"
    with process_tree.nothing_left(), log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, f"--port={port}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env={**os.environ, **environment},
        )
        server = Server(process, log_path, port)
        try:
            yield server
        finally:
            server.stop()


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""
