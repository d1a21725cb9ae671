"""Runs the real `holdfast serve` as users do: a process, a port of its own, a log to read."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from holdfast.processes.environment import LAST_NAME

READY_DEADLINE_SECONDS = 180.0
STOP_DEADLINE_SECONDS = 60.0
KV_CACHE_BYTES = 64 * 1024 * 1024
SMALL = (
    "--enforce-eager",
    f"--kv-cache-memory-bytes={KV_CACHE_BYTES}",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=1024",
)
"""Flags that keep a test engine small and its start short."""
TINY = (
    "--enforce-eager",
    f"--kv-cache-memory-bytes={KV_CACHE_BYTES}",
    "--max-model-len=256",
    "--max-num-seqs=4",
    "--max-num-batched-tokens=128",
)
"""Flags that keep its probe short, too."""
_LISTENING = re.compile(r"listening on (\S+)")

_NATIVE: dict[str, bytes] = {}
"""What the worker of an earlier server was started with, by the name of the file that says it.

Where it is known a worker is forked, which spares each start the seconds of its imports.
"""

Metrics = dict[tuple[str, frozenset[tuple[str, str]]], float]
Greedy = Callable[[str, int], list[int]]
"""Returns this many tokens that follow a prompt."""
Value = TypeVar("Value")


def wait_until(
    condition: Callable[[], Value | None], *, deadline_seconds: float, what: Callable[[], str]
) -> Value:
    """The first true value of `condition`; AssertionError says `what` was awaited in vain."""
    deadline = time.monotonic() + deadline_seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(what())
        time.sleep(0.2)
    return value


class Server:
    """One process that serves, from its start to its end; `running` makes them."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path, port: int = 0) -> None:
        self.process = process
        self._port = port
        # One for all requests: a client loads the certificates of the world when it is made.
        self._client = httpx.Client(timeout=60, trust_env=False)
        self._log_path = log_path
        self.api_key = ""

    def use_key(self, api_key: str) -> None:
        """Say this key from now on."""
        self.api_key = api_key
        self._client.headers["Authorization"] = f"Bearer {api_key}"

    @property
    def log(self) -> str:
        """Everything it has written to standard output and error so far."""
        return self._log_path.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        """The last line that it wrote."""
        return self.log.rstrip().rpartition("\n")[2]

    @property
    def url(self) -> str:
        """Where it listens; waits until it says so."""
        if self._port:
            return f"http://127.0.0.1:{self._port}"
        return str(self.until(lambda: _LISTENING.findall(self.log), "the listener")[0])

    def get(self, path: str, **options: Any) -> httpx.Response:
        """One GET of a path."""
        return self._client.get(f"{self.url}{path}", **options)

    def post(self, path: str, body: Mapping[str, Any], **options: Any) -> httpx.Response:
        """One POST of a JSON body."""
        return self._client.post(f"{self.url}{path}", json=body, **options)

    def completion(
        self, prompt: str | Sequence[int], *, timeout: float = 60, **options: Any
    ) -> httpx.Response:
        """A greedy completion."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **options}
        return self.post("/v1/completions", {"model": self.model, **body}, timeout=timeout)

    @property
    def model(self) -> str:
        """The name it serves its model under."""
        return str(self.get("/v1/models").json()["data"][0]["id"])

    @property
    def is_healthy(self) -> bool:
        """Whether `/health` is 200; False while nobody listens, as vLLM does while it loads."""
        try:
            return self.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def status(self) -> dict[str, Any]:
        """The report of `/statusz`."""
        return dict(self.get("/statusz").json())

    def metrics(self) -> Metrics:
        """Every sample of `/metrics`, by name and labels."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of `holdfast_{name}` with these labels, or KeyError."""
        wanted = set(labels.items())
        values = [
            value
            for (found, its), value in self.metrics().items()
            if found == f"holdfast_{name}" and wanted <= its
        ]
        if not values:
            raise KeyError(name)
        return sum(values)

    def until(
        self,
        condition: Callable[[], Value],
        what: str,
        *,
        deadline_seconds: float = READY_DEADLINE_SECONDS,
    ) -> Value:
        """Wait for `condition`, but not longer than the process lives."""

        def checked() -> Value | None:
            if self.process.poll() is not None:
                raise AssertionError(f"ended before {what}:\n{self.log[-4000:]}")
            try:
                return condition()
            except httpx.TransportError:
                return None

        return wait_until(
            checked,
            deadline_seconds=deadline_seconds,
            what=lambda: f"no {what} in time:\n{self.log[-4000:]}",
        )

    def until_ready(self, *, deadline_seconds: float = READY_DEADLINE_SECONDS) -> None:
        """Wait for `/readyz` to be 200."""
        self.until(
            lambda: self.get("/readyz").status_code == 200,
            "READY",
            deadline_seconds=deadline_seconds,
        )

    @property
    def state(self) -> str:
        """The state it is in."""
        return str(self.get("/livez").json()["state"])

    def until_state(self, state: str) -> None:
        """Wait for a state."""
        self.until(lambda: self.state == state, state)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def close(self) -> None:
        """Close the connections to it."""
        self._client.close()

    def wait(self) -> int:
        """The exit code, once it ends by itself."""
        return self.process.wait(STOP_DEADLINE_SECONDS + READY_DEADLINE_SECONDS)


@contextmanager
def running(
    directory: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "holdfast", "serve"),
    port: int = 0,
) -> Iterator[Server]:
    """A server with state of its own under `directory`; no process of it is left at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    native = directory / "state" / "holdfast" / LAST_NAME
    if _NATIVE and not native.exists():
        native.parent.mkdir(parents=True, exist_ok=True)
        native.write_bytes(_NATIVE[LAST_NAME])
    log_path = directory / f"server-{time.monotonic_ns()}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, *arguments, "--host", "127.0.0.1", f"--port={port}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(directory, environment or {}),
        )
    server = Server(process, log_path, port)
    try:
        yield server
    finally:
        server.close()
        _end(process)
        if native.exists():
            _NATIVE[LAST_NAME] = native.read_bytes()


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port for a server that does not say which one it took; nobody is given it meanwhile.

    Two sockets may be bound to one port where both set SO_REUSEADDR, as servers do, one listens.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield int(sock.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Sight:
    """What a client sees in one state."""

    codes: dict[str, int]
    refusal: httpx.Response
    state_metric: float


@dataclass(frozen=True, slots=True)
class Demo:
    """The demo model, served, and what was seen on its way."""

    server: Server
    sights: dict[str, Sight]
    metrics_at_ready: Metrics
    """Before the first request."""


def descendants(pid: int) -> set[psutil.Process]:
    """Every living process below `pid`."""
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or a zombie that nobody reaps."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _environment(directory: Path, given: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_STATE_HOME": str(directory / "state"),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        **_core_of_this_worker(),
        **given,
    }


def _core_of_this_worker() -> dict[str, str]:
    """A core for the engines of this process of xdist.

    vLLM binds every engine, and what compiles for it, to the first core it finds, on which those of
    all processes would wait for each other while the second one idles (`CPUWorker`, 0.32).
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    cores = sorted(os.sched_getaffinity(0))
    # The first process leaves it to vLLM, as users do.
    return {"VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)])} if number else {}


def _end(process: subprocess.Popen[bytes]) -> None:
    family = descendants(process.pid)
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            family |= descendants(process.pid)
            process.kill()
            process.wait(STOP_DEADLINE_SECONDS)
    for child in family:
        if child.is_running():
            child.kill()
