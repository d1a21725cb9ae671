"""Faults that strike an engine: signals to its processes, and failures armed in the demo model."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import psutil

from holdfast.atomic_files import is_writer_alive
from holdfast.demo.switches import DemoFault, DemoSwitches
from holdfast.processes.runtime_directory import PREFIX
from holdfast.worker.ipc_names import SHARED_MEMORY, name_prefix
from servers import SMALL, Server, descendants, title_of
from untrained import untrained_demo

MIB = 1024 * 1024
GENERATION = re.compile(r"(?:sem\.)?(hf[a-z2-7]{7})")
"""See `holdfast.worker.ipc_names`."""
FLAGS = (
    *SMALL,
    "--dtype=float32",
    "--tensor-parallel-size=2",
    "--probe=quick",
    "--served-model-name=faulty",
    "--workspace-growth=deny",
    "--log-format=console",
)
"""The flags of a server of the faulty model with two ranks."""
BIND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
CGROUP = Path("/sys/fs/cgroup/memory")
POISON_TOKENS = 6002
"""A prompt of this length ends every engine that computes it."""
REFUSED_BYTES = tuple(int(24 * MIB * 1.2**number) for number in range(20))
"""The sizes that a step requests and is refused, rising, since the last one is reserved by then."""
SLOW_STEP_TOKENS = 1000
"""A step of this many tokens takes long enough for a fault to strike while it runs."""


@dataclass(frozen=True, slots=True)
class FaultyServer:
    """A server with an engine that can fail, and the directory of files that trigger failures."""

    server: Server
    triggers: Path

    def process(self, name: str) -> psutil.Process:
        """Return the first process of the engine with `name` in its title."""
        family = descendants(self.server.process.pid)
        found = [process for process in family if name in title_of(process)]
        return min(found, key=lambda process: process.pid)

    def arm(self, name: str) -> None:
        """Make the next step of the model fail in this way."""
        (self.triggers / name).touch()


def faulty_model(models: Path, triggers: Path, *, raising_rank: int = 1) -> Path:
    """Make a demo model with failures that wait for their trigger, and with slow large steps."""
    triggers.mkdir(parents=True, exist_ok=True)
    faults = (
        DemoFault("step_tokens", 1, "raise", rank=raising_rank, armed_by=str(triggers / "raise")),
        *(
            DemoFault(
                "step_tokens",
                1,
                "scratch",
                scratch_bytes=size,
                rank=0,
                armed_by=str(triggers / f"reject {number}"),
            )
            for number, size in enumerate(REFUSED_BYTES)
        ),
        DemoFault("context", POISON_TOKENS, "raise", rank=raising_rank, until=POISON_TOKENS),
        DemoFault("step_tokens", SLOW_STEP_TOKENS, "slow", rank=0, seconds=0.3),
    )
    return untrained_demo(models, DemoSwitches(faults=faults))


def _sent(number: signal.Signals, name: str) -> Callable[[FaultyServer], None]:
    return lambda faulty: os.kill(faulty.process(name).pid, number)


def _armed(name: str) -> Callable[[FaultyServer], None]:
    return lambda faulty: faulty.arm(name)


def _refused(faulty: FaultyServer) -> None:
    refused = faulty.server.metric("engine_deaths_total", cause="workspace_rejection")
    faulty.arm(f"reject {refused:.0f}")


def _starved(faulty: FaultyServer) -> None:
    """Put the core into a cgroup that may have no more memory, so that the kernel kills it."""
    group = CGROUP / f"holdfast-{faulty.server.process.pid}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(MIB))
    (group / "cgroup.procs").write_text(str(faulty.process("EngineCore").pid))


def can_starve() -> bool:
    """Return whether this machine lets us make such a cgroup."""
    return os.access(CGROUP, os.W_OK) and (CGROUP / "memory.limit_in_bytes").exists()


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to make an engine fail."""

    strike: Callable[[FaultyServer], None]
    cause: str
    """The label `cause` of the death."""
    is_stall: bool = False
    needs_demo: bool = False
    """Whether only the model of `faulty_model` can fail in this way."""


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "SIGKILL core": Fault(_sent(signal.SIGKILL, "EngineCore"), "core_exit"),
        "SIGKILL worker": Fault(_sent(signal.SIGKILL, "Worker"), "worker_exit"),
        "SIGSTOP core": Fault(_sent(signal.SIGSTOP, "EngineCore"), "stall", is_stall=True),
        "SIGSTOP worker": Fault(_sent(signal.SIGSTOP, "Worker"), "stall", is_stall=True),
        "exception": Fault(_armed("raise"), "worker_exception", needs_demo=True),
        "workspace rejection": Fault(_refused, "workspace_rejection", needs_demo=True),
        "SIGTERM core": Fault(_sent(signal.SIGTERM, "EngineCore"), "terminated"),
        "out of memory": Fault(_starved, "out_of_memory"),
    }
)


@dataclass
class OwnSharedMemory:
    """What one server has in shared memory; `temporary` is its TMPDIR, and nobody else's."""

    temporary: Path
    _marks: set[str] = field(default_factory=set)
    _mapped: set[Path] = field(default_factory=set)

    def note(self, server: Server) -> None:
        """Remember what the server has now; each of its generations has to be noted."""
        self._marks |= {name_prefix(one) for one in self.temporary.glob(f"{PREFIX}*/[0-9]*")}
        family = [child.pid for child in descendants(server.process.pid)]
        mapped = _maps_of([server.process.pid, *family])
        self._mapped |= {path for path in SHARED_MEMORY.iterdir() if str(path) in mapped}

    def left(self) -> set[Path]:
        """Return what it had, and no process has any more."""
        left = left_in_shared_memory()
        return {path for path in left if path in self._mapped or _mark(path) in self._marks}


def left_in_shared_memory(directory: Path = SHARED_MEMORY) -> set[Path]:
    """Return what engines have left in /dev/shm: files that no process has mapped or locked.

    `directory` is where this process sees that of another mount namespace.
    """
    mapped = _maps_of(psutil.pids())
    unmapped = {path for path in directory.iterdir() if _mark(path) not in mapped}
    return {path for path in unmapped if not _is_locked(path)}


def _is_locked(path: Path) -> bool:
    try:
        return path.suffix == ".owner" and is_writer_alive(path)
    except (OSError, ValueError):
        return False


def _mark(path: Path) -> str:
    """Return what the names of one engine have in common; for other files, the whole path."""
    found = GENERATION.match(path.name)
    return found[1] if found else str(SHARED_MEMORY / path.name)


def _maps_of(pids: Iterable[int]) -> str:
    return "".join(map(_maps, pids))


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""
