"""One start of an engine: the environment of its processes, and why it is stuck or has failed.

vLLM itself waits ten minutes for a process that is stopped or gone (0.32).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from vllm import envs

from holdfast.errors import PluginMissingError
from holdfast.nodes.remote_ranks import RemoteRanks
from holdfast.patches.engine import OPERATORS_DIRECTORY_VARIABLE, prepare_builds
from holdfast.processes import cleanup, exits, forkserver, tree
from holdfast.records import RankStats
from holdfast.worker.crash_records import read_causes, root_of
from holdfast.workspace.plan import SPEC_VARIABLE, WorkspaceSpec
from holdfast.workspace.stats import read_all

ABANDON_DEADLINE_SECONDS = 30.0
ABANDON_POLL_SECONDS = 0.2
NAN_VARIABLE = "VLLM_COMPUTE_NANS_IN_LOGITS"
"""With 1, vLLM counts the NaNs in each row of logits; see `worker.nan_rows`."""
MAX_SOCKET_PATH_LENGTH = 64
"""In characters. Linux allows 107 bytes, and vLLM appends a slash and a UUID."""
NEEDED = ("EngineCore", "::Worker")
"""Parts of the titles of the processes without which no start succeeds."""
SHUTDOWN_SECONDS = 5
"""The default of VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS in vLLM 0.32, for a vLLM without it."""
GONE_SECONDS = 15.0
"""Longer than vLLM itself takes to notice that one of them has ended, where it watches, and then
to end the others by SIGTERM; before that, it waits for them (0.32)."""
POLL_SECONDS = 1.0
REPORT_SECONDS = 10.0
"""The time for what a rank on another node has written to arrive here."""

FindProcesses = Callable[[], frozenset[psutil.Process]]
"""Returns every living process of one engine."""


def prepare(directory: Path, spec: WorkspaceSpec) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # a follower has made it
    spec.write(directory / "spec.json")
    prepare_builds(directory)
    # Inductor precompiles its headers below the temporary directory, wherever its cache is (torch
    # 2.13, `codecache._HEADER_DIR`): without this link every generation spends seconds on it again.
    cache = Path(default_cache_dir())
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / cache.name).symlink_to(cache)


def recorded(processes: FindProcesses, directory: Path) -> frozenset[psutil.Process]:
    """Return an engine's processes, and record which shared memory they leave if they are killed.

    A start that fails may kill them before anything else looks at them.
    """
    found = processes()
    cleanup.record_shared_memory(directory, found)
    return found


def cause_of_failure(directory: Path, started_before: frozenset[int]) -> str:
    """Read why a start failed from what its processes left; a killed process leaves no record.

    The processes with the pids `started_before` belong to another start.
    """
    cause = root_of(read_causes(directory))
    if cause is not None and not cause.is_consequence:
        return cause.error
    killed = exits.first_killed(forkserver.exit_codes_directory(), started_before)
    return killed or (cause.error if cause else "")


async def reported_ranks(
    wanted: tuple[tuple[int, int], ...], spec: WorkspaceSpec, remote: RemoteRanks | None
) -> tuple[RankStats, ...]:
    """Return what all ranks have reported; those of other nodes may take a moment.

    Raises:
        PluginMissingError: one has not.
    """
    local = read_all(Path(spec.stats_directory))
    if remote is None:
        require_every_rank(wanted, local, spec)
        return local
    await remote.until_reported(
        lambda: not _silent(wanted, remote.beside(local), spec), REPORT_SECONDS
    )
    ranks = remote.beside(local)
    require_every_rank(wanted, ranks, spec)
    return ranks


def require_every_rank(
    wanted: tuple[tuple[int, int], ...], ranks: tuple[RankStats, ...], spec: WorkspaceSpec
) -> None:
    if silent := _silent(wanted, ranks, spec):
        missing = ", ".join(f"rank {rank} of engine {engine}" for engine, rank in silent)
        raise PluginMissingError(
            f"the workspace plugin did not report from {missing}",
            remedy="install Holdfast in the environment of every worker, and add `holdfast` to "
            "VLLM_PLUGINS if that is set.",
        )


def _silent(
    wanted: tuple[tuple[int, int], ...], ranks: tuple[RankStats, ...], spec: WorkspaceSpec
) -> list[tuple[int, int]]:
    fresh = {
        (rank.engine, rank.rank)
        for rank in ranks
        if rank.generation == spec.generation and rank.is_locked
    }
    return [place for place in wanted if place not in fresh]


async def abandon(construct: asyncio.Task[Any], processes: FindProcesses) -> None:
    """Kill what the constructor's thread waits for until it returns: no thread can be cancelled."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ABANDON_DEADLINE_SECONDS
    while not construct.done() and loop.time() < deadline:
        # It may wait for the fork server, which belongs to no engine.
        await asyncio.to_thread(forkserver.end_if_stopped)
        await asyncio.to_thread(lambda: tree.kill(processes()))
        await asyncio.wait({construct}, timeout=ABANDON_POLL_SECONDS)
    if construct.done() and construct.exception() is None:
        await asyncio.to_thread(construct.result().shutdown, timeout=0)


def variables(directory: Path) -> dict[str, str]:
    """Return the environment variables of one generation's processes.

    Killed processes leave their temporary files and vLLM's sockets behind, so both go into the
    generation's own directory, unless its path is too long for a Unix socket. Caches do not
    belong there.
    """
    variables = {
        SPEC_VARIABLE: str(directory / "spec.json"),
        NAN_VARIABLE: os.environ.get(NAN_VARIABLE, "1"),
        OPERATORS_DIRECTORY_VARIABLE: tempfile.gettempdir(),
    }
    if len(str(directory)) >= MAX_SOCKET_PATH_LENGTH:
        return variables
    ours = {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{default_cache_dir()}/flash_attention_cute_dsl",
        "TMPDIR": str(directory),
        "TORCHINDUCTOR_CACHE_DIR": default_cache_dir(),
        "VLLM_RPC_BASE_PATH": str(directory),
    }
    # The user's own choices take precedence, except for temporary files.
    kept = {name for name in ours if name in os.environ} - {"TMPDIR"}
    return variables | {name: value for name, value in ours.items() if name not in kept}


async def until_stuck(
    processes: FindProcesses,
    stopped_seconds: float,
    started_before: frozenset[int] = frozenset(),
) -> str:
    """Return the reason once a start cannot go on.

    That is when one of its processes has been stopped for `stopped_seconds`, or a core or worker
    has been gone for longer than vLLM needs to notice it. In a core whose worker dies, one thread
    may wait without end for the queue that another has just closed. One that a signal killed
    before it was looked for has its exit code recorded; those in `started_before` do not count.
    """
    gone_seconds = GONE_SECONDS + getattr(
        envs, "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", SHUTDOWN_SECONDS
    )
    stopped_since: dict[int, float] = {}
    needed: set[psutil.Process] = set()
    gone_since: float | None = None
    while True:
        now = asyncio.get_running_loop().time()
        living = await asyncio.to_thread(processes)
        stopped_since = {pid: stopped_since.get(pid, now) for pid in tree.stopped(living)}
        for pid, since in stopped_since.items():
            if now - since >= stopped_seconds:
                return f"process {pid} was stopped by a signal for {now - since:.0f} s"
        needed |= _needed(living)
        killed = await asyncio.to_thread(
            exits.first_killed, forkserver.exit_codes_directory(), started_before
        )
        is_one_gone = bool(killed) or any(not exits.is_alive(process) for process in needed)
        gone_since = (gone_since or now) if is_one_gone else None
        if gone_since is not None and now - gone_since >= gone_seconds:
            return "a process of the engine ended without a message"
        await asyncio.sleep(POLL_SECONDS)


def _needed(living: frozenset[psutil.Process]) -> frozenset[psutil.Process]:
    """Return the cores and workers.

    What one of them forks has its title until it executes another program, and may end at any time.
    """
    kinds = {process.pid: _kind(process) for process in living}
    return frozenset(
        process
        for process in living
        if kinds[process.pid] and kinds.get(_parent_pid(process)) != kinds[process.pid]
    )


def _kind(process: psutil.Process) -> str:
    """Return the part of `NEEDED` that is in its title; empty if none is."""
    try:
        title = " ".join(process.cmdline())
    except psutil.Error:
        return ""
    return next((part for part in NEEDED if part in title), "")


def _parent_pid(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.Error:
        return 0
