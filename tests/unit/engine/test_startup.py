"""A start that cannot go on is seen from outside: a process is stopped, or one it needs is gone."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from holdfast.engine.launch import startup
from holdfast.engine.launch.construction import FailureOfStart, constructed, explained
from holdfast.engine.launch.startup import until_stuck
from holdfast.errors import EngineStartError, HostFullError, PluginMissingError
from holdfast.nodes.actions import GenerationLost
from holdfast.nodes.remote_ranks import RemoteRanks
from holdfast.processes import cleanup, forkserver
from holdfast.records import Death, RankStats
from holdfast.worker.crash_records import Cause
from holdfast.worker.ipc_names import SHARED_MEMORY
from holdfast.workspace.plan import WorkspaceSpec
from holdfast.workspace.stats import StatsWriter
from sample_status import a_rank
from sleepers import mapping

DEADLINE_SECONDS = 60.0
LOOKS = 20
"""Far more than it takes to miss something."""
SLEEPS = "import time; print(flush=True); time.sleep(600)"
FORKS = f"import os; os.fork(); {SLEEPS}"


@contextmanager
def child(*words: str, program: str = SLEEPS) -> Iterator[psutil.Process]:
    """A process that does nothing, with these words in its title."""
    command = [sys.executable, "-c", program, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        shown = psutil.Process(process.pid)
        try:
            assert process.stdout is not None
            process.stdout.readline()  # for a moment after its start a process has no title yet
            yield shown
        finally:
            for forked in shown.children():
                forked.kill()
            process.kill()


async def _stuck(
    family: Callable[[], frozenset[psutil.Process]],
    started_before: frozenset[int] = frozenset(),
) -> str:
    async with asyncio.timeout(DEADLINE_SECONDS):
        return await until_stuck(family, 0.0, started_before)


def test_what_the_processes_of_a_start_map_is_recorded_at_each_look(tmp_path: Path) -> None:
    """A look comes before they are killed, however early the start fails."""
    path = SHARED_MEMORY / f"vllm_offload_{uuid4().hex}.mmap"
    with mapping(path) as process:
        family = frozenset({process})
        assert startup.recorded(lambda: family, tmp_path) == family
        cleanup.remove(tmp_path)
        assert not path.exists()


def test_a_stopped_process_is_named() -> None:
    """Whichever it is."""
    with child() as living, child() as stopped:
        stopped.send_signal(signal.SIGSTOP)
        reason = asyncio.run(_stuck(lambda: frozenset({living, stopped})))
    assert f"process {stopped.pid} was stopped" in reason


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gone has been gone for long enough at once, and is looked for often."""
    monkeypatch.setattr(forkserver, "exit_codes_directory", lambda: tmp_path)
    monkeypatch.setattr(startup, "GONE_SECONDS", 0.0)
    monkeypatch.setattr(startup, "POLL_SECONDS", 0.01)
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "0")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker_TP1"])
def test_a_core_or_worker_that_is_gone_is_missed(title: str) -> None:
    """vLLM may wait for its word without end."""
    looks = iter(range(1000))

    def family(process: psutil.Process) -> frozenset[psutil.Process]:
        if next(looks) == 1:  # it was seen at the first look
            process.kill()
        return frozenset({process})

    with child(title) as process:
        reason = asyncio.run(_stuck(lambda: family(process)))
    assert reason == "a process of the engine ended without a message"


@pytest.mark.usefixtures("impatient")
def test_one_that_was_killed_before_the_first_look_is_noticed(tmp_path: Path) -> None:
    """The fork server knows; those of the previous start do not count."""
    for pid in ("2", "3"):
        (tmp_path / pid).write_text(str(-signal.SIGKILL))
    assert _is_waiting(frozenset, started_before=frozenset({2, 3}))
    reason = asyncio.run(_stuck(frozenset, frozenset({2})))
    assert reason == "a process of the engine ended without a message"


@pytest.mark.usefixtures("impatient")
def test_vllm_has_its_own_time_for_the_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set by a variable, and as long as it lasts nothing is wrong."""
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "600")
    with child("VLLM::Worker_TP1") as worker:
        assert _is_waiting(lambda: frozenset({worker}), at_first=worker.kill)


@pytest.mark.usefixtures("impatient")
def test_what_comes_and_goes_is_not_missed() -> None:
    """A compiler ends when it is done."""
    with child() as compiler:
        assert _is_waiting(lambda: frozenset({compiler}), at_first=compiler.kill)


@pytest.mark.usefixtures("impatient")
def test_what_a_worker_forks_is_not_missed() -> None:
    """It has the worker's title until it executes another program, or for good."""
    with child("VLLM::Worker_TP1", program=FORKS) as worker:
        (forked,) = worker.children()
        assert _is_waiting(lambda: frozenset({worker, forked}), at_first=forked.kill)


def _is_waiting(
    family: Callable[[], frozenset[psutil.Process]],
    at_first: Callable[[], None] = lambda: None,
    started_before: frozenset[int] = frozenset(),
) -> bool:
    """Whether no reason was found, a while after the first look, which `at_first` follows."""
    looks = 0

    def look() -> frozenset[psutil.Process]:
        nonlocal looks
        living, looks = family(), looks + 1
        if looks == 2:
            at_first()
        return living

    async def scene() -> bool:
        watching = asyncio.create_task(until_stuck(look, DEADLINE_SECONDS, started_before))
        async with asyncio.timeout(DEADLINE_SECONDS):
            while looks < LOOKS and not watching.done():
                await asyncio.wait({watching}, timeout=0.01)
        is_waiting = not watching.done()
        watching.cancel()
        return is_waiting

    return asyncio.run(scene())


async def _construct(
    directory: Path,
    construct: Callable[[], None],
    *failures: FailureOfStart,
    is_unified_memory: bool = False,
) -> None:
    """Start an engine without processes."""
    await constructed(
        construct,
        *failures,
        directory=directory,
        processes=frozenset,
        stopped_seconds=DEADLINE_SECONDS,
        is_unified_memory=is_unified_memory,
    )


@pytest.mark.parametrize(
    ("is_unified_memory", "error"), [(True, HostFullError), (False, EngineStartError)]
)
@pytest.mark.parametrize(
    "said",
    [
        "Available memory on node 0 (1.0/8.0 GiB) on startup is less than desired CPU memory",
        "Free memory on device cuda:0 (1.0/8.0 GiB) on startup is less than desired GPU memory",
    ],
)
def test_a_start_that_finds_too_little_of_the_hosts_memory_is_told_apart(
    tmp_path: Path, said: str, error: type[EngineStartError], *, is_unified_memory: bool
) -> None:
    """The next one can wait for it; the memory of a GPU is another matter."""

    def construct() -> None:
        raise ValueError(said)

    with pytest.raises(EngineStartError, match="is less than") as raised:
        asyncio.run(_construct(tmp_path, construct, is_unified_memory=is_unified_memory))
    assert type(raised.value) is error


@pytest.mark.parametrize(
    ("error", "is_shown"),
    [(RuntimeError("CUDA error: unknown error"), True), (ValueError("no memory is left"), False)],
    ids=["unexpected", "for users"],
)
def test_where_an_unexpected_error_ended_a_start_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception, *, is_shown: bool
) -> None:
    """Its message alone explains nothing, and vLLM's line in the log has lost the rest."""
    said = f"{type(error).__name__}: {error}"
    cause = Cause(7, 1.0, "EngineCore failed to start.", said, f"the frames of it\n{said}\n")
    (tmp_path / "7.cause").write_text(json.dumps(asdict(cause)))

    def construct() -> None:
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    with pytest.raises(EngineStartError, match=str(error)):
        asyncio.run(_construct(tmp_path, construct))
    assert ("the frames of it" in caplog.text) == is_shown


def test_the_reason_of_a_kill_comes_before_the_error_that_it_causes(tmp_path: Path) -> None:
    """The guard of the memory kills the processes that the constructor waits for."""

    async def start() -> None:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[None] = loop.create_future()

        def construct() -> None:
            loop.call_soon_threadsafe(told.set_result, None)
            raise ValueError("a process was killed")

        async def reason() -> EngineStartError:
            await asyncio.wait({told})
            return HostFullError("the host ran out of memory")

        await _construct(tmp_path, construct, reason(), is_unified_memory=True)

    with pytest.raises(HostFullError, match="the host ran out of memory"):
        asyncio.run(start())


TOO_LITTLE = (
    "ValueError: Free memory on device cuda:0 (1.0/8.0 GiB) on startup is less than desired GPU "
    "memory utilization (0.9, 7.2 GiB)."
)


@pytest.mark.parametrize(
    ("is_unified_memory", "error"), [(True, HostFullError), (False, EngineStartError)]
)
def test_too_little_memory_on_another_node_is_that_of_a_host(
    is_unified_memory: bool, error: type[EngineStartError]
) -> None:
    """The next start waits for memory where device and host share it, as on one node."""

    async def start() -> None:
        remote = RemoteRanks(1, ("127.0.0.1", 20001), lambda: None)
        death = Death("worker_exception", TOO_LITTLE)
        remote.lost(GenerationLost(1, "b", str(death), death))
        async with explained(remote, is_unified_memory=is_unified_memory):
            raise EngineStartError("rank 0: connection closed by peer")

    with pytest.raises(EngineStartError, match="node b: ValueError: Free memory") as raised:
        asyncio.run(start())
    assert type(raised.value) is error


WORLD = ((0, 0), (0, 1))
ELSEWHERE = replace(a_rank(), engine=0, rank=1, generation=1, is_locked=True)
"""The rank of another node, as the head needs it."""


@contextmanager
def a_locked_rank(directory: Path) -> Iterator[WorkspaceSpec]:
    """Rank 0, on the head, which is as it has to be."""
    with StatsWriter(directory, engine=0, rank=0, generation=1) as writer:
        writer.update(lambda report: replace(report, is_locked=True))
        yield WorkspaceSpec(str(directory), 1, 0, 0.1, "alongside", None)


@pytest.mark.parametrize(
    "told",
    [(), (replace(ELSEWHERE, is_locked=False),), (replace(ELSEWHERE, generation=0),)],
    ids=["silent", "unlocked", "of another generation"],
)
def test_a_start_without_a_rank_of_another_node_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: tuple[RankStats, ...]
) -> None:
    """READY would say nothing of it; the error names the rank."""
    monkeypatch.setattr(startup, "REPORT_SECONDS", 0.1)

    async def start(spec: WorkspaceSpec) -> None:
        remote = RemoteRanks(1, ("127.0.0.1", 20001), lambda: None)
        remote.changed("other", told)
        await startup.reported_ranks(WORLD, spec, remote)

    with (
        a_locked_rank(tmp_path) as spec,
        pytest.raises(PluginMissingError, match="from rank 1 of engine 0"),
    ):
        asyncio.run(start(spec))


def test_a_start_waits_for_the_lock_of_another_node(tmp_path: Path) -> None:
    """What a rank has written there arrives here a moment later."""

    async def start(spec: WorkspaceSpec) -> tuple[RankStats, ...]:
        remote = RemoteRanks(1, ("127.0.0.1", 20001), lambda: None)
        remote.changed("other", (replace(ELSEWHERE, is_locked=False),))
        asyncio.get_running_loop().call_later(0.1, remote.changed, "other", (ELSEWHERE,))
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await startup.reported_ranks(WORLD, spec, remote)

    with a_locked_rank(tmp_path) as spec:
        ranks = asyncio.run(start(spec))
    assert [(rank.rank, rank.is_locked) for rank in ranks] == [(0, True), (1, True)]
