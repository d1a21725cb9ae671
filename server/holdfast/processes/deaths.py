"""Notices at once that a generation of the engine ended, and describes why as a `records.Death`.

Three things reveal a death: a process that ended, a rank that wrote why it is lost (vLLM waits
300 s for a rank that raised and does not answer), and vLLM itself. All of them are read together a
moment after the first, because one death soon causes others: a worker loses its peer in the middle
of a collective, or its parent. The kernel's own count of kills for lack of memory is compared
before and after.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import psutil

from holdfast.processes import forkserver
from holdfast.processes.exit_codes import exit_code
from holdfast.processes.exits import Ending, Endings
from holdfast.records import Death, DeathCause, RankStats, Suspect
from holdfast.worker.crash_records import Cause, read_causes, root_of, was_terminated
from holdfast.worker.step_requests import read_suspects
from holdfast.workspace.stats import read_all


def oom_kills(root: Path = Path("/")) -> int:
    """Count the kills in this process's memory cgroup; without one, those of the machine.

    A container's own count excludes its neighbours' kills (cgroup v2 and v1).
    """
    for path in (*_cgroup_files(root), root / "proc/vmstat"):
        count = _count(path)
        if count is not None:
            return count
    return 0


def _cgroup_files(root: Path) -> Iterator[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, group = line.split(":", 2)
        # Within a container, the mount shows the container's own group at its root.
        for below in (group.lstrip("/"), ""):
            if number == "0":
                yield mounts / below / "memory.events"
            elif "memory" in controllers.split(","):
                yield mounts / "memory" / below / "memory.oom_control"


def _count(path: Path) -> int | None:
    """Read the line `oom_kill N`, which all these files have."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(word[1]) for word in words if word[:1] == ["oom_kill"]), None)


logger = logging.getLogger(__name__)

DOUBT_SECONDS = 0.5
POLL_SECONDS = 0.4
RECENT_SECONDS = 5.0
"""An exception logged earlier than this before a death is unrelated to it."""
SETTLE_SECONDS = 0.05

_CRASHES = frozenset(
    -number
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
)
"""The signals of a process that ended itself: in a kernel, in a library, by an assertion."""
_MEMORY_ERROR = re.compile(
    r"MemoryError:|DefaultCPUAllocator: can't allocate memory"
    # As in "CUDA error: out of memory" and NCCL's "Cuda failure 2 'out of memory'".
    r"|(?i:cuda)[^\n]{0,40}out of memory|CU[A-Z]+_STATUS_ALLOC_FAILED"
)


@dataclass(frozen=True, slots=True)
class Core:
    """An EngineCore or another process that vLLM's front end started."""

    name: str
    exit_code: Callable[[], int | None]
    """Returns the exit code; None while it is unknown."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a death."""

    core_names: Mapping[int, str]
    """The names, by pid, of the processes that vLLM's front end starts."""
    endings: tuple[Ending, ...] = ()
    ranks: tuple[RankStats, ...] = ()
    causes: tuple[Cause, ...] = ()
    """The exceptions logged shortly before."""
    was_terminated: bool = False
    """Whether an EngineCore was asked to end."""
    had_oom_kill: bool = False
    """Whether the kernel killed a process for lack of memory while the engine ran."""
    suspects: Mapping[int, tuple[Suspect, ...]] = field(default_factory=dict)
    """What each engine was running; engines that ran nothing, or nothing known, are left out."""


class DeathWatch:
    """Watches the processes of one generation that must live: its EngineCores and workers."""

    def __init__(
        self,
        directory: Path,
        processes: Iterable[psutil.Process],
        cores: Mapping[int, Core],
        *,
        has_errored: Callable[[], bool],
    ) -> None:
        self._directory = directory
        self._cores = cores
        self._has_errored = has_errored
        self._endings = Endings(processes)
        self._is_accused = False
        self._is_blind = False
        self._oom_kills = oom_kills()

    async def death(self) -> Death:
        """Return the death of the generation within a second of it."""
        with self._endings as endings:
            while not self._is_seen():
                await endings.wait(POLL_SECONDS)
            seen_seconds = time.monotonic()
            await asyncio.sleep(SETTLE_SECONDS)
            death = classified(self._evidence(endings, seen_seconds))
            while death.cause == "unknown" and time.monotonic() < seen_seconds + DOUBT_SECONDS:
                # vLLM learns of an end from a pipe, which closes before the process has ended.
                await endings.wait(SETTLE_SECONDS)
                death = classified(self._evidence(endings, seen_seconds))
            return death

    def accuse_termination(self) -> None:
        """Record that a request was aborted unasked, as by a core that is ending.

        A core that got SIGTERM aborts everything in this way for seconds.
        """
        self._is_accused = True
        self._endings.wake()

    def _is_seen(self) -> bool:
        try:
            return bool(
                self._is_accused
                or self._endings.look()
                or was_terminated(self._directory)
                or any(rank.fatal_error for rank in read_all(self._directory, with_steps=False))
                or self._has_errored()
            )
        except OSError as error:  # too many open files, perhaps: not a death, and it passes
            if not self._is_blind:
                self._is_blind = True
                logger.warning("cannot look at the processes of the engine: %s", error)
            return False

    def _evidence(self, endings: Endings, seen_seconds: float) -> Evidence:
        since_seconds = seen_seconds - RECENT_SECONDS
        return Evidence(
            core_names={pid: core.name for pid, core in self._cores.items()},
            endings=tuple(map(self._with_exit_code, endings.look())),
            ranks=read_all(self._directory, with_steps=False),
            causes=tuple(c for c in read_causes(self._directory) if c.at_seconds > since_seconds),
            was_terminated=self._is_accused or was_terminated(self._directory),
            had_oom_kill=oom_kills() > self._oom_kills,
            suspects=read_suspects(self._directory),
        )

    def _with_exit_code(self, ending: Ending) -> Ending:
        if ending.exit_code is not None:
            return ending
        core = self._cores.get(ending.pid)
        code = core.exit_code() if core else None
        noted = exit_code(forkserver.exit_codes_directory(), ending.pid)
        return Ending(ending.pid, noted if code is None else code)


def must_live(
    family: Iterable[psutil.Process], cores: Mapping[int, Core], ranks: Iterable[RankStats]
) -> tuple[psutil.Process, ...]:
    """The processes of the family that the engine needs; a compiler comes and goes."""
    pids = {*cores, *(rank.pid for rank in ranks)}
    return tuple(process for process in family if process.pid in pids)


def classified(evidence: Evidence) -> Death:
    """Return the death that the evidence points to."""
    return next(_verdicts(evidence), Death("unknown", "vLLM reports a dead engine"))


def _verdicts(evidence: Evidence) -> Iterator[Death]:
    """Yield every possible conclusion, the best founded first."""
    lost = [rank for rank in evidence.ranks if rank.fatal_error]
    yield from (_raised(rank, evidence) for rank in lost if _is_refused(rank))
    ending = _first_ending(evidence)
    if ending and not _has_raised(ending, evidence):
        yield _ended(ending, evidence)
    yield from (_raised(rank, evidence) for rank in lost)
    if evidence.was_terminated:
        yield Death("terminated", "EngineCore received SIGTERM")
    if cause := root_of(evidence.causes):
        yield _exception(f"process {cause.pid}", cause.error, evidence, cause.pid)
    if ending:
        yield _ended(ending, evidence)


def _first_ending(evidence: Evidence) -> Ending | None:
    """Find the ending that caused the others: a worker ends at once with its core, not vice versa.

    A core that loses its worker ends in an orderly way. A worker that loses its core may abort.
    """
    cores = [ending for ending in evidence.endings if ending.pid in evidence.core_names]
    crashes = [ending for ending in evidence.endings if ending.exit_code in _CRASHES]
    was_core_killed = any(ending.exit_code is None or ending.exit_code < 0 for ending in cores)
    first = cores if was_core_killed else crashes
    return next(iter((*first, *cores, *evidence.endings)), None)


def _has_raised(ending: Ending, evidence: Evidence) -> bool:
    """Whether the process left its own exception, which may have ended it."""
    if any(rank.fatal_error for rank in evidence.ranks if rank.pid == ending.pid):
        return True
    was_killed = ending.exit_code is not None and ending.exit_code < 0
    own = [cause for cause in evidence.causes if cause.pid == ending.pid]
    return not was_killed and any(cause.is_fatal and not cause.is_consequence for cause in own)


def _ended(ending: Ending, evidence: Evidence) -> Death:
    is_core = ending.pid in evidence.core_names
    name = evidence.core_names.get(ending.pid) or _worker_name(ending.pid, evidence.ranks)
    reason = f"{name} (process {ending.pid}) {ending}"
    if evidence.had_oom_kill and ending.exit_code in {None, -signal.SIGKILL}:
        return Death("out_of_memory", f"{reason}: the kernel killed it for lack of memory")
    if ending.exit_code == -signal.SIGTERM or (is_core and evidence.was_terminated):
        return Death("terminated", f"{reason} after SIGTERM")
    return Death(
        "core_exit" if is_core else "worker_exit",
        reason,
        is_accusing=ending.exit_code in _CRASHES,
        suspects=_suspects(evidence, ending.pid),
    )


def _raised(rank: RankStats, evidence: Evidence) -> Death:
    where = f"rank {rank.rank} of engine {rank.engine} (process {rank.pid})"
    if _is_refused(rank):
        return Death(
            "workspace_rejection",
            f"{where}: {rank.fatal_error}",
            is_accusing=True,
            suspects=_suspects(evidence, rank.pid),
        )
    return _exception(where, rank.fatal_error, evidence, rank.pid)


def _suspects(evidence: Evidence, pid: int) -> tuple[Suspect, ...] | None:
    """What ran in the process's engine; in any engine, if its engine is unknown."""
    engine = next((rank.engine for rank in evidence.ranks if rank.pid == pid), None)
    if engine is not None:
        return evidence.suspects.get(engine)
    return tuple(chain.from_iterable(evidence.suspects.values())) or None


def _exception(where: str, error: str, evidence: Evidence, pid: int) -> Death:
    cause: DeathCause = "out_of_memory" if _MEMORY_ERROR.search(error) else "worker_exception"
    suspects = _suspects(evidence, pid)
    return Death(cause, f"{where}: {error}", is_accusing=True, suspects=suspects)


def _is_refused(rank: RankStats) -> bool:
    """Whether the workspace manager refused the rank's last request, see `growth`."""
    is_refusal = rank.fatal_error.startswith("AssertionError: Workspace is ")
    return is_refusal and rank.last_rejection is not None


def _worker_name(pid: int, ranks: Iterable[RankStats]) -> str:
    rank = next((rank for rank in ranks if rank.pid == pid), None)
    return f"the worker of rank {rank.rank} of engine {rank.engine}" if rank else "a process"
