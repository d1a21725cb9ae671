"""Notices at once that a generation of the engine has died, and says why as a `records.Death`.

Three things reveal a death: a process that ended, a rank that wrote why it is lost (vLLM waits
300 s for a rank that raised and does not answer), and vLLM itself. All of them are read together a
moment after the first, because one death soon causes others: a worker loses its peer in the middle
of a collective, or its parent. The kernel's count of out-of-memory kills is compared before and
after.
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

from holdfast.labels import DeathCause
from holdfast.processes import forkserver, tree
from holdfast.processes.exits import ExitWatcher, ProcessExit, oom_kills, recorded_exit_code
from holdfast.races import race
from holdfast.records import Death, RankStats, Suspect
from holdfast.worker.crash_records import Cause, read_causes, root_of, was_terminated
from holdfast.worker.step_requests import read_suspects
from holdfast.workspace.stats import read_all

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 0.5
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

_NAN_ERROR = re.compile(r"NaNs detected in logits")
"""vLLM's words with `VLLM_RAISE_ON_LOGIT_NANS`, and those of `worker.nan_rows`."""


@dataclass(frozen=True, slots=True)
class CoreProcess:
    """An EngineCore or another process that vLLM's front end started."""

    name: str
    exit_code: Callable[[], int | None]
    """Returns the exit code; None while it is unknown."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a death."""

    core_names: Mapping[int, str]
    """The names, by pid, of the processes that vLLM's front end starts."""
    exits: tuple[ProcessExit, ...] = ()
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
    """Watches the required processes of one generation: its EngineCores and workers."""

    def __init__(
        self,
        directory: Path,
        processes: Iterable[psutil.Process],
        cores: Mapping[int, CoreProcess],
        *,
        has_errored: Callable[[], bool],
    ) -> None:
        self._directory = directory
        self._cores = cores
        self._has_errored = has_errored
        self._processes = tuple(processes)
        self._watcher = ExitWatcher(self._processes)
        self._had_unexplained_abort = False
        self._has_warned = False
        self._oom_kills = oom_kills()

    async def death(self) -> Death:
        """Wait for the generation's death, and return it within a second."""
        with self._watcher as watcher:
            while not self._is_dead():
                await watcher.wait(POLL_SECONDS)
            seen_seconds = time.monotonic()
            await asyncio.sleep(SETTLE_SECONDS)
            death = classify(self._evidence(watcher, seen_seconds))
            while death.cause == "unknown" and time.monotonic() < seen_seconds + RECHECK_SECONDS:
                # vLLM learns of an exit from a pipe, which closes before the process has ended.
                await watcher.wait(SETTLE_SECONDS)
                death = classify(self._evidence(watcher, seen_seconds))
            return death

    async def death_or_stop(self, stopped_seconds: float) -> Death:
        """Wait for the death, or until a process has been stopped for that long."""
        stop = tree.until_stopped(lambda: self._processes, stopped_seconds)
        async with race(self.death(), stop) as (ended, stopped):
            return ended.result() if ended.done() else Death("stall", stopped.result())

    def report_unexplained_abort(self) -> None:
        """Record that a request was aborted unasked, as by a core that is shutting down.

        A core that got SIGTERM aborts everything in this way for seconds.
        """
        self._had_unexplained_abort = True
        self._watcher.wake()

    def _is_dead(self) -> bool:
        try:
            return bool(
                self._had_unexplained_abort
                or self._watcher.exits()
                or was_terminated(self._directory)
                or any(rank.fatal_error for rank in read_all(self._directory, reads_steps=False))
                or self._has_errored()
            )
        except OSError as error:  # perhaps too many open files: that passes, and is not a death
            if not self._has_warned:
                self._has_warned = True
                logger.warning("cannot inspect the engine's processes: %s", error)
            return False

    def _evidence(self, watcher: ExitWatcher, seen_seconds: float) -> Evidence:
        since_seconds = seen_seconds - RECENT_SECONDS
        return Evidence(
            core_names={pid: core.name for pid, core in self._cores.items()},
            exits=tuple(map(self._with_exit_code, watcher.exits())),
            ranks=read_all(self._directory, reads_steps=False),
            causes=tuple(c for c in read_causes(self._directory) if c.at_seconds > since_seconds),
            was_terminated=self._had_unexplained_abort or was_terminated(self._directory),
            had_oom_kill=oom_kills() > self._oom_kills,
            suspects=read_suspects(self._directory),
        )

    def _with_exit_code(self, exited: ProcessExit) -> ProcessExit:
        if exited.exit_code is not None:
            return exited
        core = self._cores.get(exited.pid)
        code = core.exit_code() if core else None
        recorded = recorded_exit_code(forkserver.exit_codes_directory(), exited.pid)
        return ProcessExit(exited.pid, recorded if code is None else code)


def required_processes(
    family: Iterable[psutil.Process], cores: Mapping[int, CoreProcess], ranks: Iterable[RankStats]
) -> tuple[psutil.Process, ...]:
    """Return the processes that the engine cannot live without; compilers come and go."""
    pids = {*cores, *(rank.pid for rank in ranks)}
    return tuple(process for process in family if process.pid in pids)


def classify(evidence: Evidence) -> Death:
    """Return the death that the evidence points to."""
    return next(_verdicts(evidence), Death("unknown", "vLLM reports a dead engine"))


def _verdicts(evidence: Evidence) -> Iterator[Death]:
    """Yield every possible conclusion, the best founded first."""
    lost = [rank for rank in evidence.ranks if rank.fatal_error]
    yield from (_raised(rank, evidence) for rank in lost if _is_refused(rank))
    exited = _first_exit(evidence)
    if exited and not _has_raised(exited, evidence):
        yield _ended(exited, evidence)
    yield from (_raised(rank, evidence) for rank in lost)
    if evidence.was_terminated:
        yield Death("terminated", "EngineCore received SIGTERM")
    if cause := root_of(evidence.causes):
        yield _exception(f"process {cause.pid}", cause.error, evidence, cause.pid)
    if exited:
        yield _ended(exited, evidence)


def _first_exit(evidence: Evidence) -> ProcessExit | None:
    """Find the exit that caused the others: a worker ends at once with its core, not vice versa.

    A core that loses its worker ends in an orderly way. A worker that loses its core may abort.
    """
    cores = [exited for exited in evidence.exits if exited.pid in evidence.core_names]
    crashes = [exited for exited in evidence.exits if exited.exit_code in _CRASHES]
    was_core_killed = any(exited.exit_code is None or exited.exit_code < 0 for exited in cores)
    first = cores if was_core_killed else crashes
    return next(iter((*first, *cores, *evidence.exits)), None)


def _has_raised(exited: ProcessExit, evidence: Evidence) -> bool:
    """Whether the process left its own exception, which may have ended it."""
    if any(rank.fatal_error for rank in evidence.ranks if rank.pid == exited.pid):
        return True
    was_killed = exited.exit_code is not None and exited.exit_code < 0
    own = [cause for cause in evidence.causes if cause.pid == exited.pid]
    return not was_killed and any(cause.is_fatal and not cause.is_consequence for cause in own)


def _ended(exited: ProcessExit, evidence: Evidence) -> Death:
    is_core = exited.pid in evidence.core_names
    name = evidence.core_names.get(exited.pid) or _worker_name(exited.pid, evidence.ranks)
    reason = f"{name} (process {exited.pid}) {exited}"
    if evidence.had_oom_kill and exited.exit_code in {None, -signal.SIGKILL}:
        return Death(
            "out_of_memory",
            f"{reason}: the kernel killed it for lack of memory",
            suspects=_suspects(evidence, exited.pid),
        )
    if exited.exit_code == -signal.SIGTERM or (is_core and evidence.was_terminated):
        return Death("terminated", f"{reason} after SIGTERM")
    return Death(
        "core_exit" if is_core else "worker_exit",
        reason,
        blames_requests=exited.exit_code in _CRASHES,
        suspects=_suspects(evidence, exited.pid),
    )


def _raised(rank: RankStats, evidence: Evidence) -> Death:
    where = f"rank {rank.rank} of engine {rank.engine} (process {rank.pid})"
    if _is_refused(rank):
        return Death(
            "workspace_rejection",
            f"{where}: {rank.fatal_error}",
            blames_requests=True,
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
    cause: DeathCause = "worker_exception"
    if _MEMORY_ERROR.search(error):
        cause = "out_of_memory"
    elif _NAN_ERROR.search(error):
        cause = "nan_logits"
    suspects = _suspects(evidence, pid)
    return Death(cause, f"{where}: {error}", blames_requests=True, suspects=suspects)


def _is_refused(rank: RankStats) -> bool:
    """Whether the workspace manager refused the rank's last request, see `growth`."""
    is_refusal = rank.fatal_error.startswith("AssertionError: Workspace is ")
    return is_refusal and rank.last_rejection is not None


def _worker_name(pid: int, ranks: Iterable[RankStats]) -> str:
    rank = next((rank for rank in ranks if rank.pid == pid), None)
    return f"the worker of rank {rank.rank} of engine {rank.engine}" if rank else "a process"
