"""Faults that strike an engine: signals to its processes, and failures armed in the demo model."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from holdfast.atomic_files import is_writer_alive
from holdfast.demo.files import ensure_demo_model
from holdfast.demo.switches import DemoFault, DemoSwitches
from servers import SMALL, Server, descendants

MIB = 1024 * 1024
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only looked at
GENERATION = re.compile(r"(?:sem\.)?(hf[a-z2-7]{7})")
"""See `holdfast.worker.ipc_names`."""
FLAGS = (
    *SMALL,
    "--dtype=float32",
    "--tensor-parallel-size=2",
    "--probe=quick",
    "--served-model-name=ailing",
    "--workspace-growth=deny",
    "--log-format=console",
)
"""Of a server of the ailing model with two ranks."""
BIND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
CGROUP = Path("/sys/fs/cgroup/memory")
POISON_TOKENS = 6002
"""A prompt of this length ends every engine that computes it."""
REFUSED_BYTES = tuple(int(24 * MIB * 1.2**number) for number in range(20))
"""What a step asks for and is refused: more each time, since the last need is reserved by then."""
SLOW_STEP_TOKENS = 1000
"""A step of so many tokens takes long enough for a fault to strike while it runs."""


@dataclass(frozen=True, slots=True)
class Patient:
    """A server with an engine that can be hurt, and where its failures are armed."""

    server: Server
    armoury: Path

    def process(self, name: str) -> psutil.Process:
        """The first process of the engine whose title contains `name`."""
        family = descendants(self.server.process.pid)
        found = [process for process in family if name in _title(process)]
        return min(found, key=lambda process: process.pid)

    def arm(self, name: str) -> None:
        """Have the next step of the model fail so."""
        (self.armoury / name).touch()


def ailing_model(models: Path, armoury: Path) -> Path:
    """The demo model with failures that rest until they are armed, and with slow large steps."""
    armoury.mkdir(parents=True, exist_ok=True)
    faults = (
        DemoFault("step_tokens", 1, "raise", rank=1, armed_by=str(armoury / "raise")),
        *(
            DemoFault(
                "step_tokens",
                1,
                "scratch",
                scratch_bytes=size,
                rank=0,
                armed_by=str(armoury / f"reject {number}"),
            )
            for number, size in enumerate(REFUSED_BYTES)
        ),
        DemoFault("context", POISON_TOKENS, "raise", rank=1, until=POISON_TOKENS),
        DemoFault("step_tokens", SLOW_STEP_TOKENS, "slow", rank=0, seconds=0.3),
    )
    return ensure_demo_model(models, DemoSwitches(faults=faults))


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _sent(number: signal.Signals, name: str) -> Callable[[Patient], None]:
    return lambda patient: os.kill(patient.process(name).pid, number)


def _armed(name: str) -> Callable[[Patient], None]:
    return lambda patient: patient.arm(name)


def _refused(patient: Patient) -> None:
    refused = patient.server.metric("engine_deaths_total", cause="workspace_rejection")
    patient.arm(f"reject {refused:.0f}")


def _starved(patient: Patient) -> None:
    """Put the core into a group of processes that may have no more memory: the kernel kills it."""
    group = CGROUP / f"holdfast-{patient.server.process.pid}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(MIB))
    (group / "cgroup.procs").write_text(str(patient.process("EngineCore").pid))


def can_starve() -> bool:
    """Whether this machine lets us make such a group."""
    return os.access(CGROUP, os.W_OK) and (CGROUP / "memory.limit_in_bytes").exists()


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to hurt an engine."""

    strike: Callable[[Patient], None]
    cause: str
    """The label under which the death is counted."""
    is_stall: bool = False


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "SIGKILL core": Fault(_sent(signal.SIGKILL, "EngineCore"), "core_exit"),
        "SIGKILL worker": Fault(_sent(signal.SIGKILL, "Worker"), "worker_exit"),
        "SIGSTOP core": Fault(_sent(signal.SIGSTOP, "EngineCore"), "stall", is_stall=True),
        "SIGSTOP worker": Fault(_sent(signal.SIGSTOP, "Worker"), "stall", is_stall=True),
        "raise on rank 1": Fault(_armed("raise"), "worker_exception"),
        "workspace rejection": Fault(_refused, "workspace_rejection"),
        "SIGTERM core": Fault(_sent(signal.SIGTERM, "EngineCore"), "terminated"),
        "out of memory": Fault(_starved, "out_of_memory"),
    }
)


def left_in_shared_memory() -> set[Path]:
    """What lies there of engines that have ended; one that runs has mapped something of its own.

    A server that runs has locked the file that says so.
    """
    mapped = "".join(_maps(process) for process in psutil.process_iter())
    unmapped = {path for path in SHARED_MEMORY.iterdir() if _mark(path) not in mapped}
    return {path for path in unmapped if not _is_locked(path)}


def _is_locked(path: Path) -> bool:
    try:
        return path.suffix == ".owner" and is_writer_alive(path)
    except (OSError, ValueError):
        return False


def _mark(path: Path) -> str:
    """What all names of one engine have in common; of others the whole name."""
    found = GENERATION.match(path.name)
    return found[1] if found else str(path)


def _maps(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return ""
