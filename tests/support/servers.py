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
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from keep_alive import NO_KEEP_ALIVE

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
NOT_COMPILED = {"TORCH_COMPILE_DISABLE": "1"}
COMPILED = {"TORCH_COMPILE_DISABLE": "0"}
"""vLLM compiles the rank of a log-prob, also of an eager model, in each process of an engine, which
takes seconds at every start (`batched_count_greater_than`, 0.32)."""
_LISTENING = re.compile(r"listening on (?:every address, )?(\S+)")

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
        self._client = httpx.Client(timeout=60, trust_env=False, limits=NO_KEEP_ALIVE)
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

    @property
    def generation(self) -> int:
        """The number of the engine that the state is about."""
        return int(self.status["engine"]["generation"])

    def metrics(self, path: str = "/metrics") -> Metrics:
        """Every sample of a page, by name and labels."""
        families = text_string_to_metric_families(self.get(path).text)
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

    @property
    def sent(self) -> float:
        """How many sequences the engine has, whether it runs them or not; READY only."""
        page = self.metrics()
        running, waiting, held = (
            sum(value for (found, _), value in page.items() if found == name)
            for name in (
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "holdfast_requests_held",
            )
        )
        return running + waiting - held

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


@cache
def forkable() -> Mapping[str, str]:
    """Variables with which every worker is forked from the fork server, at the first start too.

    A worker is spawned, and imports vLLM for seconds, where it needs other native variables than
    the fork server was started with (`holdfast.processes.environment`). vLLM sets these for each
    worker, and a core for each rank, unless it is told to bind none (`OMPProcessManager` and
    `CpuPlatform`, 0.32). It would bind the first rank of every engine to the same core.
    """
    torch = Path(str(find_spec("torch").origin)).parent  # type: ignore[union-attr]  # vLLM needs it
    folders = (torch.parent / "torch.libs", torch / "lib")
    libraries = [str(path) for folder in folders for path in folder.glob("libgomp*.so*")]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
        "LD_PRELOAD": ":".join(libraries[:1]),
    }


def sooner() -> Mapping[str, str]:
    """Variables with which the engines of many tests start sooner.

    None for a test that runs alone, which leaves it to vLLM, as users do.
    """
    return {**forkable(), **NOT_COMPILED} if "PYTEST_XDIST_WORKER" in os.environ else {}


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
    metrics: Metrics
    """Before the request that is refused or, in READY, answered."""
    refusal: httpx.Response
    state_metric: float


@dataclass(frozen=True, slots=True)
class Demo:
    """The demo model, served, and what was seen on its way."""

    server: Server
    sights: dict[str, Sight]


def descendants(pid: int) -> set[psutil.Process]:
    """Every living process below `pid`."""
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def title_of(process: psutil.Process) -> str:
    """Its title, which is its command line unless it chose another; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


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
        **sooner(),
        **given,
    }


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
