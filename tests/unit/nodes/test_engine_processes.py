"""The engine's processes on a follower: their end is told at once, and nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from holdfast.nodes.actions import GenerationLost, GenerationOver, RanksChanged
from holdfast.nodes.dialer import Dialer, HeadAddress
from holdfast.nodes.engine_processes import EngineProcesses
from holdfast.nodes.follower import Follower
from holdfast.nodes.messages import Start
from holdfast.processes.exits import is_alive
from holdfast.records import Death, RankStats
from holdfast.worker.ipc_names import SHARED_MEMORY, name_prefix
from node_pairs import FACTS, KEY, SPEC
from node_scenes import DEADLINE_SECONDS, Scene, play

WORKER = """
import pathlib, sys, time
from holdfast.worker.ipc_names import shared_path
from holdfast.workspace.stats import StatsWriter
directory = pathlib.Path(sys.argv[1])
shared = shared_path(directory)
with StatsWriter(directory, engine=0, rank=1, generation=1, shared=shared) as writer:
    if "raise" in sys.argv:
        writer.fatal_error("ValueError: of the worker")
    time.sleep(600)
"""
EXECUTOR = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
time.sleep(600)
"""
ORDER = Start(1, 1, 2, "127.0.0.1", 29500, (), "f", SPEC)
Result = TypeVar("Result")


class Heard:
    """What was reported."""

    def __init__(self) -> None:
        self.ranks: list[RankStats] = []
        self.deaths: list[Death] = []
        self.ended: list[int] = []

    def engine_lost(self, generation: int, death: Death) -> None:
        assert generation == 1
        self.deaths.append(death)

    def engine_ended(self, generation: int) -> None:
        self.ended.append(generation)

    def ranks_changed(self, generation: int, ranks: Sequence[RankStats]) -> None:
        assert generation == 1
        self.ranks = list(ranks)

    def worker(self) -> psutil.Process:
        """The process of the rank."""
        return psutil.Process(self.ranks[0].pid)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 - no event tells of every condition
            await asyncio.sleep(0.01)


def command(*words: str) -> Callable[[Start, Path], Sequence[str]]:
    return lambda _, directory: [sys.executable, "-c", EXECUTOR, WORKER, str(directory), *words]


def run(
    directory: Path,
    scene: Callable[[EngineProcesses, Heard], Awaitable[Result]],
    make: Callable[[Start, Path], Sequence[str]] | None = None,
) -> tuple[Result, Heard]:
    """Run a scene with the processes of one generation, to their end."""

    async def within_time() -> tuple[Result, Heard]:
        heard = Heard()
        processes = EngineProcesses(directory, make or command())
        processes.reports = heard
        processes.start(ORDER)
        try:
            async with asyncio.timeout(2 * DEADLINE_SECONDS):
                result = await scene(processes, heard)
                await until(lambda: heard.ended)
                return result, heard
        finally:
            processes.stop(1, "the test ends")
            await processes.ended()

    return asyncio.run(within_time())


async def started(heard: Heard) -> psutil.Process:
    """The worker, once it has reported."""
    await until(lambda: heard.ranks)
    return heard.worker()


def test_nothing_is_left_of_a_generation_that_has_to_end(tmp_path: Path) -> None:
    """No process, no file and no shared memory; and its end is not a death."""

    async def scene(processes: EngineProcesses, heard: Heard) -> list[psutil.Process]:
        worker = await started(heard)
        family = [worker, *worker.parents()[:1]]
        assert list(SHARED_MEMORY.glob(f"{name_prefix(tmp_path / '1')}*"))
        processes.stop(1, "a restart")
        return family

    family, heard = run(tmp_path, scene)
    assert [is_alive(process) for process in family] == [False, False]
    assert list(SHARED_MEMORY.glob(f"{name_prefix(tmp_path / '1')}*")) == []
    assert list(tmp_path.iterdir()) == []
    assert (heard.deaths, heard.ended) == ([], [1])


def test_the_end_of_a_worker_is_a_death(tmp_path: Path) -> None:
    """With the signal that killed it."""

    async def scene(_: EngineProcesses, heard: Heard) -> None:
        (await started(heard)).kill()

    _, heard = run(tmp_path, scene)
    (death,) = heard.deaths
    assert death.cause == "worker_exit"
    assert "was killed by SIGKILL" in death.reason


def test_the_end_of_the_executor_is_a_death(tmp_path: Path) -> None:
    """Whatever its workers do then."""

    async def scene(_: EngineProcesses, heard: Heard) -> psutil.Process:
        worker = await started(heard)
        os.kill(worker.ppid(), signal.SIGKILL)
        return worker

    worker, heard = run(tmp_path, scene)
    with suppress(psutil.NoSuchProcess):
        worker.kill()  # an orphan, since no front end adopts it here
    (death,) = heard.deaths
    assert death.cause == "core_exit"
    assert "the executor of the node" in death.reason


def test_an_error_that_a_rank_reports_is_a_death(tmp_path: Path) -> None:
    """Though its process goes on."""

    async def scene(_: EngineProcesses, heard: Heard) -> None:
        await until(lambda: heard.deaths)

    _, heard = run(tmp_path, scene, command("raise"))
    (death,) = heard.deaths
    assert death.cause == "worker_exception"
    assert "ValueError: of the worker" in death.reason


def test_a_process_that_cannot_start_is_a_death(tmp_path: Path) -> None:
    """With the reason."""

    async def scene(_: EngineProcesses, heard: Heard) -> None:
        await until(lambda: heard.ended)

    _, heard = run(tmp_path, scene, lambda *_: ["/nonexistent"])
    (death,) = heard.deaths
    assert death.cause == "start_failure"
    assert "No such file" in death.reason


def test_another_generation_is_not_stopped(tmp_path: Path) -> None:
    """An order that comes late changes nothing: what ends next is still a death."""

    async def scene(processes: EngineProcesses, heard: Heard) -> None:
        worker = await started(heard)
        processes.stop(2, "too late")
        worker.kill()

    _, heard = run(tmp_path, scene)
    assert [death.cause for death in heard.deaths] == ["worker_exit"]


def test_it_says_so_if_nobody_hears_of_its_processes(tmp_path: Path) -> None:
    """A generation without reports would never end."""

    async def scene() -> None:
        processes = EngineProcesses(tmp_path, command())
        processes.start(ORDER)
        with pytest.raises(RuntimeError, match="nobody hears"):
            await processes.ended()

    asyncio.run(scene())


def test_a_worker_killed_on_a_follower_ends_the_generation_at_the_head(tmp_path: Path) -> None:
    """Over sockets and with processes; the next generation starts on the same follower."""

    async def scene(scene: Scene) -> tuple[list[str], bool]:
        machine = Follower(key=KEY, name="b", instance="ab" * 32)
        engine = EngineProcesses(tmp_path, command())
        address = HeadAddress("127.0.0.1", scene.port)
        dialer = Dialer(machine, address, engine, find_facts=lambda _: FACTS)
        engine.reports = dialer
        task = asyncio.create_task(dialer.run())

        def ranks() -> list[RankStats]:
            updates = (one for one in scene.reports if isinstance(one, RanksChanged))
            return [rank for update in updates for rank in update.ranks]

        try:
            await scene.until(lambda: scene.head.is_complete)
            scene.start(1)
            await scene.until(ranks)
            psutil.Process(ranks()[-1].pid).kill()
            await scene.until(lambda: GenerationOver(1) in scene.reports)
            losses = [one for one in scene.reports if isinstance(one, GenerationLost)]
            await scene.until(lambda: scene.head.is_complete)
            scene.start(2)
            await scene.until(lambda: machine.state == "running")
            return [str(loss.death and loss.death.cause) for loss in losses], True
        finally:
            dialer.leave("the test ends")
            await task

    assert play(scene) == (["worker_exit"], True)
