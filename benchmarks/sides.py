"""Starts Holdfast and `vllm serve` with the same model and flags, and ends all they made."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, NoReturn

import httpx
import psutil

from holdfast.demo.files import demo_directory, ensure_demo_model
from holdfast.versions import vllm_version
from holdfast.workspace.plan import MIB, SPEC_VARIABLE, WorkspaceSpec

POLL_SECONDS = 0.05
STOP_SECONDS = 60.0
KILL_SECONDS = 10.0
START_SECONDS = 600.0
DEMO_FLAGS = ("--kv-cache-memory-bytes", "256M")
FLAGS_OF_BOTH = ("--host", "127.0.0.1")
QUIET_FLAGS = ("--disable-uvicorn-access-log",)
PLUGIN_SIDE = "vllm serve, our plugin"
"""vLLM's front end over an engine with Holdfast's plugin: it tells what each of the two costs."""
UNLAYERED_SIDE = "no layers"
ENDING_SIDE = "streams end with the engine"
CONSTANT_SIDE = "uvicorn alone"
_COMMANDS = {
    "holdfast": ("-m", "holdfast"),
    UNLAYERED_SIDE: (str(Path(__file__).with_name("unlayered.py")),),
    ENDING_SIDE: ("-m", "holdfast"),
    CONSTANT_SIDE: (str(Path(__file__).with_name("constant.py")),),
}
_FURTHER_FLAGS = {ENDING_SIDE: ("--continue-streams", "off")}
_READY_PATHS = dict.fromkeys(_COMMANDS, "/readyz")
_VLLM_COMMAND, _VLLM_READY_PATH = ("-m", "vllm.entrypoints.cli.main"), "/health"
_NAMES = frozenset({"instance_id"})
"""What of vLLM's configuration names one start."""
_ADMIN_KEY = "the-key-of-the-benchmarks"
_PLAIN_PLUGINS = "holdfast_demo"
"""The plugins of `vllm serve`: what knows the demo model, and nothing else of ours."""


@dataclass(frozen=True, slots=True)
class Server:
    """One running server."""

    side: str
    process: subprocess.Popen[bytes]
    port: int
    began_seconds: float
    deadline_seconds: float
    log: IO[str]

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def front_end(self) -> psutil.Process:
        """The process that answers HTTP; the engine is another."""
        return psutil.Process(self.process.pid)

    def client(self) -> httpx.Client:
        """An HTTP client of it."""
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait, and return how many seconds after the start of the process it was."""
        while not condition():
            elapsed = time.monotonic() - self.began_seconds
            if self.process.poll() is not None or elapsed > self.deadline_seconds:
                self.give_up(f"{self.side} was not {what} after {elapsed:.0f} s")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - self.began_seconds

    def until_listening(self) -> float:
        """Wait until it accepts connections."""
        return self.until(lambda: _is_listening(self.port), "listening")

    def until_ready(self) -> float:
        """Wait until it says so: `/readyz` of Holdfast, `/health` of vLLM."""
        self.until_listening()
        with self.client() as client:
            return self.until(
                lambda: _is_ok(client, _READY_PATHS.get(self.side, _VLLM_READY_PATH)), "ready"
            )

    def resident_mib(self) -> float:
        """Resident memory of the front end alone."""
        return float(self.front_end.memory_info().rss / MIB)

    def peak_resident_mib(self) -> float:
        """The most resident memory the front end has had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(kib) / 1024

    def processor_seconds(self) -> float:
        """What all its processes together have spent so far."""
        return sum(map(_processor_seconds, [self.front_end, *self._descendants()]))

    def front_end_processor_seconds(self) -> float:
        """What the front end alone has spent so far."""
        return _processor_seconds(self.front_end)

    def extra_processor_seconds(self, ask: Callable[[], object], count: int) -> float:
        """What one request costs the front end beyond what it spends in the same time without."""
        began, spent = time.monotonic(), self.front_end_processor_seconds()
        for _ in range(count):
            ask()
        took = time.monotonic() - began
        busy = self.front_end_processor_seconds() - spent
        spent = self.front_end_processor_seconds()
        time.sleep(took)
        return (busy - (self.front_end_processor_seconds() - spent)) / count

    def core(self) -> psutil.Process:
        """The process of the engine."""
        return next(process for process in self._descendants() if _is_core(process))

    def give_up(self, cause: str) -> NoReturn:
        """End the benchmark with the last lines of this server."""
        self.log.seek(0)
        last_lines = "\n".join(self.log.read().splitlines()[-20:])
        sys.exit(f"{last_lines}\nerror: {cause}; its last lines are above.")

    def resolved_config(self) -> dict[str, str]:
        """vLLM's configuration as this server has resolved it, one value for each dotted name."""
        with self.client() as client:
            info = client.get(
                "/server_info",
                params={"config_format": "json"},
                headers={"authorization": f"Bearer {_ADMIN_KEY}"},
                timeout=120,
            )
        if info.is_error:
            self.give_up(f"{self.side} does not tell its configuration: {info.status_code}")
        config = info.json()["vllm_config"]
        return {name: _unnamed(value) for name, value in _flat("", config) if name not in _NAMES}

    def _descendants(self) -> list[psutil.Process]:
        return self.front_end.children(recursive=True)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all servers of one run share."""

    model: str
    flags: tuple[str, ...]
    directory: Path
    """Removed afterwards: learned state, logs and vLLM's second name."""
    deadline_seconds: float = START_SECONDS
    has_access_log: bool = False
    """Whether each request is written to the log; Holdfast has its own line for it."""

    @contextmanager
    def started(self, side: str) -> Iterator[Server]:
        """A server that was just started; when left, it and all it made are gone."""
        port = free_port()
        program = _COMMANDS.get(side, _VLLM_COMMAND)
        command = [sys.executable, *program, "serve", self.model, *self.flags, *FLAGS_OF_BOTH]
        command += _FURTHER_FLAGS.get(side, ())
        if not self.has_access_log:
            command += QUIET_FLAGS
        with (self.directory / f"{side.replace(' ', '-')}.log").open("w+") as log:
            began_seconds = time.monotonic()
            process = subprocess.Popen(
                [*command, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(side),
                process_group=0,
            )
            with _ended(process):
                yield Server(side, process, port, began_seconds, self.deadline_seconds, log)

    @contextmanager
    def ready(self, side: str) -> Iterator[Server]:
        """A server that is ready for requests."""
        with self.started(side) as server:
            server.until_ready()
            yield server

    def _environment(self, side: str) -> dict[str, str]:
        paths = [str(self.directory), os.environ.get("PYTHONPATH", "")]
        common = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HOLDFAST_LEARNED_DIR": str(self.directory / "learned"),
            "VLLM_SERVER_DEV_MODE": "1",  # for the route that tells the resolved configuration
            "HOLDFAST_ADMIN_API_KEY": _ADMIN_KEY,  # which it needs with us
        }
        if side == "vllm serve":
            return {"VLLM_PLUGINS": _PLAIN_PLUGINS, **common}
        return {**common, SPEC_VARIABLE: str(self._spec())} if side == PLUGIN_SIDE else common

    def _spec(self) -> Path:
        """What Holdfast would tell its workers, with what no flag was given for."""
        directory = self.directory / "stats"
        directory.mkdir(exist_ok=True)
        WorkspaceSpec(str(directory), 1, 0, 0.1, "alongside", None).write(directory / "spec.json")
        return directory / "spec.json"


def bench_of(given: Sequence[str], directory: Path) -> Bench:
    """The model and flags of the command line; without any, the demo model."""
    name_vllm(directory)
    model, *flags = given or [str(ensure_demo_model(demo_directory())), *DEMO_FLAGS]
    return Bench(model, tuple(flags), directory)


def name_vllm(directory: Path) -> None:
    """Let `vllm serve` find its version: the CPU build is installed under another name.

    Two lines of metadata in a directory on PYTHONPATH are enough; elsewhere nothing changes.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        folder = directory / f"vllm-{vllm_version()}.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm_version()}+cpu\n"
        (folder / "METADATA").write_text(metadata)


def config_difference(
    ours: Mapping[str, str], theirs: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """What two resolved configurations do not agree on: (Holdfast's, that of `vllm serve`)."""
    absent = "absent"
    return {
        name: (ours.get(name, absent), theirs.get(name, absent))
        for name in sorted({*ours, *theirs})
        if ours.get(name, absent) != theirs.get(name, absent)
    }


def end_on_sigterm() -> None:
    """Have SIGTERM unwind, so that no server is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """When left, the process and all its descendants are gone."""
    try:
        yield
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if _is_alive(process) else []
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(KILL_SECONDS)
        psutil.wait_procs(family, timeout=KILL_SECONDS)
        # Also what a server that crashed has left behind: it leads a group of its own.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(family, timeout=KILL_SECONDS)


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _is_ok(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _is_core(process: psutil.Process) -> bool:
    try:
        return "EngineCore" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _processor_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every leaf with its dotted name."""
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    if not items:
        yield name, str(value)
    for key, of_key in items:
        yield from _flat(f"{name}.{key}" if name else str(key), of_key)


def _unnamed(value: str) -> str:
    """Without what differs between two starts of the same server: names, ports and addresses."""
    return re.sub(r"0x[0-9a-f]+|\b[0-9a-f]{8}-[0-9a-f-]{27}\b|\b[0-9a-f]{32}\b", "*", value)
