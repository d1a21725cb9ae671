"""The subjects with an engine: the demo model, served by Holdfast or by stock vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpu_check import process_tree
from gpu_check.checks import SUBJECTS
from gpu_check.engine import device_memory, packages
from gpu_check.engine.cpu_lock import WARMED_VARIABLE
from gpu_check.engine.servers import Server, free_port, running
from gpu_check.engine.witness import DIRECTORY_VARIABLE, Event, read
from gpu_check.subject_protocol import Errand
from gpu_check.survey import ROOT
from holdfast.demo.files import ensure_demo_model
from holdfast.demo.switches import DemoSwitches

MAX_MODEL_LEN = 8192
SCRATCH_BYTES_PER_TOKEN = 16384
"""So that a long prompt takes 110 MiB, and a short one no more than is reserved."""
RESERVED_MIB = 16
"""Above 10 MiB, see `witness.ADDED_BYTES`."""
_BUDGET_BYTES = 5 << 30
"""The share of the device for an engine that is nearly all KV cache."""
_WARMED_BYTES = 4 << 20
_COMMON_FLAGS = (
    "--served-model-name=demo",
    "--host=127.0.0.1",
    f"--max-model-len={MAX_MODEL_LEN}",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=2048",
    # A prompt that is asked again is computed again, in the same steps.
    "--no-enable-prefix-caching",
)
_CPU_FLAGS = ("--enforce-eager", "--kv-cache-memory-bytes=256M")
_HOLDFAST_FLAGS = ("--learned-dir=none",)
_GROWING_FLAGS = (
    "--probe=off",
    f"--workspace-reserve={RESERVED_MIB}MiB",
    # A prompt grows its workspace chunk by chunk, and every buffer on the way is kept.
    "--workspace-growth-limit=1GiB",
)
_DECLARED = DemoSwitches(scratch_bytes_per_token=SCRATCH_BYTES_PER_TOKEN, stages_decodes=True)
_SILENT = replace(_DECLARED, declares_need=False)


@dataclass(frozen=True, slots=True)
class Engine:
    """A server that is ready, and what was seen of it."""

    server: Server
    errand: Errand
    events_directory: Path
    start_seconds: float
    readings: dict[str, int] = field(default_factory=dict)
    """Bytes in use on the first device, by the moment at which they were read."""

    @property
    def has_device(self) -> bool:
        """Whether it runs on a GPU."""
        return bool(self.errand.machine.devices)

    @property
    def patience(self) -> float:
        """By which deadlines are multiplied."""
        return self.errand.patience

    @property
    def tokens_path(self) -> Path:
        """Where the tokens of one subject are kept for the next."""
        return Path(self.errand.directory) / "tokens.json"

    def events(self) -> list[Event]:
        """What the workers of this server have written."""
        return read(self.events_directory)

    def note_memory(self, moment: str) -> None:
        """Read what is in use on the first device, if there is one."""
        if self.has_device:
            self.readings[moment] = device_memory.used_bytes()

    def tail(self) -> str:
        """The end of the server's log."""
        return self.server.tail()


@contextmanager
def growing(errand: Errand) -> Iterator[Engine]:
    """Holdfast with a need that nobody declared and no probe, so that the first prompts meet it."""
    with _holdfast(errand, _SILENT, *_GROWING_FLAGS) as engine:
        yield engine


@contextmanager
def declared(errand: Errand) -> Iterator[Engine]:
    """Holdfast with a declared need and the whole probe."""
    with _holdfast(errand, _DECLARED) as engine:
        yield engine


@contextmanager
def ranks(errand: Errand) -> Iterator[Engine]:
    """As `growing`, over two devices."""
    with _holdfast(errand, _SILENT, *_GROWING_FLAGS, "--tensor-parallel-size=2") as engine:
        yield engine


@contextmanager
def stock(errand: Errand) -> Iterator[Engine]:
    """Stock vLLM with the same undeclared need; on the CPU its manager is made for it.

    The rings that its engine leaves in shared memory when it dies are removed.
    """
    directory = Path(errand.directory)
    model = ensure_demo_model(directory / "models", _SILENT)
    command = ("vllm.entrypoints.cli.main", "serve", str(model), *_flags(errand))
    environment = {**_environment(directory), "VLLM_PLUGINS": "holdfast_demo"}
    if not errand.machine.devices:
        environment["VLLM_PLUGINS"] += f",{packages.LOCK_PLUGIN}"
        environment[WARMED_VARIABLE] = str(_WARMED_BYTES)
    rings: set[Path] = set()
    try:
        with running("stock", command, environment, directory, free_port()) as server:
            seconds = _until_ready(server, errand, "/health")
            rings = process_tree.shared_memory(server.process.pid)
            yield Engine(server, errand, directory, seconds)
    finally:
        for path in rings:
            path.unlink(missing_ok=True)


@contextmanager
def _holdfast(errand: Errand, switches: DemoSwitches, *flags: str) -> Iterator[Engine]:
    directory = Path(errand.directory)
    events_directory = directory / f"events-{os.getpid()}"
    events_directory.mkdir()
    model = ensure_demo_model(directory / "models", switches)
    command = ("holdfast", "serve", str(model), *_flags(errand), *_HOLDFAST_FLAGS, *flags)
    environment = {**_environment(directory), DIRECTORY_VARIABLE: str(events_directory)}
    readings = {"before": device_memory.used_bytes()} if errand.machine.devices else {}
    with running(errand.subject, command, environment, directory) as server:
        seconds = _until_ready(server, errand, "/readyz")
        yield Engine(server, errand, events_directory, seconds, readings)


def _until_ready(server: Server, errand: Errand, path: str) -> float:
    limit_seconds = next(s.opening_seconds for s in SUBJECTS if s.name == errand.subject)
    deadline_seconds = 0.9 * limit_seconds * errand.patience
    return server.until(lambda: server.answers_200(path), "ready", deadline_seconds)


def _flags(errand: Errand) -> tuple[str, ...]:
    if not errand.machine.devices:
        return (*_COMMON_FLAGS, *_CPU_FLAGS)
    share = _BUDGET_BYTES / min(device.total_bytes for device in errand.machine.devices)
    return (*_COMMON_FLAGS, f"--gpu-memory-utilization={min(0.5, share):.4f}")


def _environment(directory: Path) -> Mapping[str, str]:
    ours = {str(ROOT), str(ROOT / "server")}  # whose other folders are not packages
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p not in ours]
    path = [str(packages.make(directory)), *others]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_STATE_HOME": str(directory / "state"),
        "VLLM_PLUGINS": _PLUGINS,
    }


_PLUGINS = f"holdfast,holdfast_demo,{packages.WITNESS_PLUGIN}"
