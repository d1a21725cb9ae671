"""How long do a start and a recovery take, and how much memory? Beside `vllm serve`.

    python benchmarks/startup.py                         the demo model, three pairs
    python benchmarks/startup.py --pairs 5 --json -- MODEL --max-model-len 4096

Both servers get the same model and flags. They run one after the other, and who is first
alternates. The first pair fills the caches of compiled kernels and Holdfast's learned state, and is
not counted. Every process is ended before the next one starts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import IO, NoReturn

import httpx
import psutil

from holdfast import __version__
from holdfast.demo.files import demo_directory, ensure_demo_model
from holdfast.telemetry.progress import PHASE_LABELS
from holdfast.versions import vllm_version

POLL_SECONDS = 0.05
STOP_SECONDS = 60.0
KILL_SECONDS = 10.0
DEMO_FLAGS = ("--kv-cache-memory-bytes", "256M")
FLAGS_OF_BOTH = ("--host", "127.0.0.1", "--disable-uvicorn-access-log")
SIDES = ("holdfast", "vllm serve")
COMMANDS = {"holdfast": "holdfast", "vllm serve": "vllm.entrypoints.cli.main"}
READY_PATHS = {"holdfast": "/readyz", "vllm serve": "/health"}
MEASURES = {
    "listening_seconds": "listening, s",
    "ready_seconds": "ready, s",
    "unproven_seconds": "ready without the probe, s",
    "recovery_seconds": "engine death to the next answer, s",
    "peak_memory_mib": "peak memory of the front end, MiB",
}


@dataclass(frozen=True, slots=True)
class Start:
    """One start, measured from outside. `ready` is `/readyz` of Holdfast, `/health` of vLLM.

    The recovery of `vllm serve` is the start of another: it ends with its engine.
    """

    listening_seconds: float
    ready_seconds: float
    peak_memory_mib: float
    recovery_seconds: float
    phases_seconds: Mapping[str, float] = field(default_factory=dict)
    """As Holdfast reports them; what no phase covers is `other`."""

    @property
    def unproven_seconds(self) -> float:
        """What the start took beside the probe, which `vllm serve` has not."""
        return self.ready_seconds - self.phases_seconds.get("probe", 0.0)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all starts of one run share."""

    model: str
    flags: tuple[str, ...]
    directory: Path
    """Removed afterwards: learned state, logs and vLLM's second name."""
    deadline_seconds: float

    def pair(self, sides: Sequence[str]) -> dict[str, Start]:
        """One start of each side, in this order."""
        return {side: self.start(side) for side in sides}

    def start(self, side: str) -> Start:
        """Start one server, measure it until it is ready, and end it."""
        port = _free_port()
        command = (sys.executable, "-m", COMMANDS[side], "serve", self.model, *self.flags)
        with (self.directory / "server.log").open("w+") as log:
            began = time.monotonic()
            process = subprocess.Popen(
                [*command, *FLAGS_OF_BOTH, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
            with _ended(process):
                return self._measured(side, process, port, began, log)

    def _measured(
        self, side: str, process: subprocess.Popen[bytes], port: int, began: float, log: IO[str]
    ) -> Start:
        def until(condition: Callable[[], bool], what: str) -> float:
            while not condition():
                elapsed = time.monotonic() - began
                if process.poll() is not None or elapsed > self.deadline_seconds:
                    log.seek(0)
                    _give_up(f"{side} was not {what} after {elapsed:.0f} s", log.read())
                time.sleep(POLL_SECONDS)
            return time.monotonic() - began

        url = f"http://127.0.0.1:{port}"
        listening = until(lambda: _is_listening(port), "listening")
        with httpx.Client(base_url=url, timeout=10, trust_env=False) as client:
            ready = until(lambda: _is_ok(client, READY_PATHS[side]), "ready")
            if side != "holdfast":
                return Start(listening, ready, _peak_memory_mib(process.pid), ready)
            phases, memory_mib = _phases(client, ready), _peak_memory_mib(process.pid)
            recovery = _recovery_seconds(client, process.pid, self.deadline_seconds)
        return Start(listening, ready, memory_mib, recovery, phases)

    def _environment(self) -> dict[str, str]:
        paths = [str(self.directory), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HOLDFAST_LEARNED_DIR": str(self.directory / "learned"),
        }


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


def _free_port() -> int:
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


def _phases(client: httpx.Client, ready_seconds: float) -> dict[str, float]:
    phases = {
        str(name): float(seconds)
        for name, seconds in client.get("/statusz").json()["start"]["phases_s"].items()
    }
    return {**phases, "other": ready_seconds - sum(phases.values())}


def _recovery_seconds(client: httpx.Client, pid: int, deadline_seconds: float) -> float:
    """From the end of EngineCore to the answer of a request that was sent at that moment."""
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "hold", "max_tokens": 1}
    next(p for p in psutil.Process(pid).children(recursive=True) if _is_core(p)).kill()
    began = time.monotonic()
    # The first may be told to come back later; a client does.
    while client.post("/v1/completions", json=body, timeout=deadline_seconds).is_error:
        if time.monotonic() - began > deadline_seconds:
            _give_up(f"no answer {deadline_seconds:.0f} s after the death of the engine", "")
        time.sleep(POLL_SECONDS)
    return time.monotonic() - began


def _is_core(process: psutil.Process) -> bool:
    try:
        return "EngineCore" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _peak_memory_mib(pid: int) -> float:
    """The most resident memory the process itself has had, without its children."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kib) / 1024


def _give_up(cause: str, log: str) -> NoReturn:
    last_lines = "\n".join(log.splitlines()[-20:])
    sys.exit(f"{last_lines}\nstartup: error: {cause}; its last lines are above.")


def summary(pairs: Sequence[Mapping[str, Start]]) -> dict[str, dict[str, list[float]]]:
    """Every value of each measure by side, and the ratio within each pair."""
    found: dict[str, dict[str, list[float]]] = {}
    for measure in MEASURES:
        of = {side: [getattr(pair[side], measure) for pair in pairs] for side in SIDES}
        ratios = [ours / theirs for ours, theirs in zip(*of.values(), strict=True)]
        found[measure] = {**of, "ratio": ratios}
    return found


def table(pairs: Sequence[Mapping[str, Start]]) -> Iterator[str]:
    """Medians, with the least and the most in brackets."""
    yield _row("", *SIDES, "ratio")
    for measure, of in summary(pairs).items():
        digits = 0 if measure == "peak_memory_mib" else 1
        cells = (_spread(of[side], digits) for side in SIDES)
        yield _row(MEASURES[measure], *cells, _spread(of["ratio"], 2))
    yield ""
    yield _row("phases of holdfast, s", "holdfast")
    ours = [pair["holdfast"].phases_seconds for pair in pairs]
    for phase in ours[0]:
        label = PHASE_LABELS.get(phase, phase)
        yield _row(f"  {label}", _spread([phases.get(phase, 0.0) for phases in ours], 1))


def _row(label: str, *cells: str) -> str:
    return (f"{label:<36}" + "".join(f"{cell:<24}" for cell in cells)).rstrip()


def _spread(values: Sequence[float], digits: int) -> str:
    middle, least, most = (f"{f(values):.{digits}f}" for f in (median, min, max))
    return f"{middle} ({least} to {most})" if len(values) > 1 else middle


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Start-up of Holdfast beside `vllm serve`: same model, same flags, same run."
    )
    parser.add_argument("--pairs", type=int, default=3, help="how many are counted (3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="SECONDS", help="for one start (600)"
    )
    parser.add_argument(
        "serve", nargs="*", metavar="MODEL FLAG", help="after `--`; without, the demo model"
    )
    arguments = parser.parse_args()
    if arguments.pairs < 1:
        parser.error("--pairs: at least 1")
    return arguments


def _run(arguments: argparse.Namespace, directory: Path) -> list[dict[str, Start]]:
    """The pairs that count; what is going on is told on standard error."""
    name_vllm(directory)
    model, *flags = arguments.serve or [str(ensure_demo_model(demo_directory())), *DEMO_FLAGS]
    bench = Bench(model, tuple(flags), directory, arguments.timeout)
    pairs = []
    for number in range(arguments.pairs + 1):
        nth = f"pair {number} of {arguments.pairs}" if number else "warm-up pair, not counted"
        print(f"startup: {nth}", file=sys.stderr, flush=True)
        pairs.append(bench.pair(SIDES if number % 2 else SIDES[::-1]))
    return pairs[1:]


def main() -> None:
    """Run the pairs and print what they took."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="holdfast-startup-") as directory:
        pairs = _run(arguments, Path(directory))
    model = Path(arguments.serve[0]).name if arguments.serve else "the demo model"
    versions = {"holdfast": __version__, "vllm": vllm_version()}
    if arguments.json:
        starts = [{side: asdict(start) for side, start in pair.items()} for pair in pairs]
        record = {"model": model, "versions": versions, "pairs": starts}
        print(json.dumps({**record, "cores": os.cpu_count(), "summary": summary(pairs)}, indent=2))
        return
    print(f"Start-up of {model}: pairs: {len(pairs)}, CPU cores: {os.cpu_count()},")
    print(f"Holdfast {__version__}, vLLM {vllm_version()}. Median (least to most).\n")
    print("\n".join(table(pairs)))


if __name__ == "__main__":
    main()
