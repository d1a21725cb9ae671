"""The engine's processes on a follower: their end is told at once, and nothing is left of them."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from fake_host import GIB, FakeHost
from holdfast.host_memory.guard import Level, MemoryGuard
from holdfast.nodes.actions import GenerationLost, GenerationOver, RanksChanged
from holdfast.nodes.addresses import HeadAddress
from holdfast.nodes.dialer import Dialer
from holdfast.nodes.engine_processes import EngineProcesses
from holdfast.nodes.follower import Follower
from holdfast.nodes.memory import NodeMemory
from holdfast.nodes.messages import Start
from holdfast.processes import cleanup, tree
from holdfast.processes.exits import is_alive
from holdfast.records import Death, RankStats
from holdfast.settings import MemorySettings
from holdfast.worker.ipc_names import SHARED_MEMORY, name_prefix
from node_pairs import FACTS, KEY, SPEC
from node_scenes import DEADLINE_SECONDS, Scene, play

WORKER = """
import os, pathlib, signal, subprocess, sys, time
from dataclasses import replace
from holdfast.worker.ipc_names import shared_path
from holdfast.workspace.stats import StatsWriter
directory = pathlib.Path(sys.argv[1])
shared = shared_path(directory)
with StatsWriter(directory, engine=0, rank=1, generation=1, shared=shared) as writer:
    if "compiles" in sys.argv:
        writer.step_started()
        subprocess.run([sys.argv[-1], "600"])
    if "raises" in sys.argv:
        while not pathlib.Path(sys.argv[-1]).exists():
            time.sleep(0.001)
        writer.fatal_error("ValueError: of the worker")
        pathlib.Path(sys.argv[-1]).unlink()
    if "raise" in sys.argv:
        writer.fatal_error("ValueError: of the worker")
    if "refused" in sys.argv:
        while not pathlib.Path(sys.argv[-1]).exists():
            time.sleep(0.001)
        writer.update(lambda report: replace(report, nan_rows=7))
        os.kill(os.getpid(), signal.SIGKILL)
    if "counts" in sys.argv:
        with open(sys.argv[-1], "wb", buffering=0) as counted:
            for number in range(1, 1_000_000):
                writer.update(lambda report: replace(report, nan_rows=number))
                os.pwrite(counted.fileno(), b"%08d" % number, 0)
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
        self.refusals: list[tuple[str, bool]] = []
        """Each with whether it is final."""
        self.ended: list[int] = []
        self.is_compiling = False

    def engine_lost(self, generation: int, death: Death) -> None:
        assert generation == 1
        self.deaths.append(death)

    def engine_refused(self, generation: int, line: str, *, is_final: bool) -> None:
        assert generation == 1
        self.refusals.append((line, is_final))

    def engine_ended(self, generation: int) -> None:
        self.ended.append(generation)

    def ranks_changed(
        self, generation: int, ranks: Sequence[RankStats], *, is_compiling: bool
    ) -> None:
        assert generation == 1
        self.ranks = list(ranks)
        self.is_compiling = is_compiling

    def worker(self) -> psutil.Process:
        """The process of the rank."""
        return psutil.Process(self.ranks[0].pid)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 - no event tells of every condition
            await asyncio.sleep(0.01)


def unguarded() -> NodeMemory:
    """The memory of a host that nobody watches."""
    return NodeMemory(MemorySettings(guard="off"))


def command(*words: str) -> Callable[[Start, Path], Sequence[str]]:
    return lambda _, directory: [sys.executable, "-c", EXECUTOR, WORKER, str(directory), *words]


def run(
    directory: Path,
    scene: Callable[[EngineProcesses, Heard], Awaitable[Result]],
    make: Callable[[Start, Path], Sequence[str]] | None = None,
    *,
    memory: NodeMemory | None = None,
    heard: Heard | None = None,
) -> tuple[Result, Heard]:
    """Run a scene with the processes of one generation, to their end."""
    listener = heard or Heard()

    async def within_time() -> tuple[Result, Heard]:
        processes = EngineProcesses(directory, make or command(), memory or unguarded())
        processes.reports = listener
        processes.start(ORDER)
        try:
            async with asyncio.timeout(2 * DEADLINE_SECONDS):
                result = await scene(processes, listener)
                await until(lambda: listener.ended)
                return result, listener
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


def test_a_worker_that_is_stopped_is_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It blames no request: nothing in one stops a process."""
    monkeypatch.setattr("holdfast.nodes.engine_processes.SILENCE_SECONDS", 0.0)

    async def scene(_: EngineProcesses, heard: Heard) -> int:
        worker = await started(heard)
        worker.suspend()
        return worker.pid

    pid, heard = run(tmp_path, scene)
    (death,) = heard.deaths
    assert (death.cause, death.blames_requests) == ("stall", False)
    assert death.reason.startswith(f"process {pid} was stopped by a signal")


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


def test_an_error_before_an_end_that_was_asked_for_is_a_death(tmp_path: Path) -> None:
    """The head may have heard first of what followed from it on a third node."""
    trigger = tmp_path / "trigger"

    async def scene(processes: EngineProcesses, heard: Heard) -> None:
        await started(heard)
        trigger.touch()
        while trigger.exists():
            time.sleep(0.001)  # noqa: ASYNC251 - before the next look of this loop
        processes.stop(1, "a rank of another node raised")

    words = command("raises", str(trigger))
    _, heard = run(tmp_path / "files", scene, words)
    (death,) = heard.deaths
    assert "ValueError: of the worker" in death.reason


def test_a_compiler_that_a_rank_waits_for_is_seen(tmp_path: Path) -> None:
    """The head sees no process of this node, and would call the step a stall."""
    compiler = tmp_path / "ninja"
    shutil.copy(str(shutil.which("sleep")), compiler)

    async def scene(processes: EngineProcesses, heard: Heard) -> None:
        worker = await started(heard)
        await until(lambda: heard.is_compiling)
        (child,) = worker.children()
        child.kill()
        await until(lambda: not heard.is_compiling)
        processes.stop(1, "the test ends")

    run(tmp_path / "files", scene, command("compiles", str(compiler)))


def test_what_a_rank_wrote_last_is_told_before_its_death(tmp_path: Path) -> None:
    """The head learns from it, and looks no more once it knows of the death."""

    class Listening(Heard):
        """Remembers what it knew when it heard of a death."""

        known = 0

        def engine_lost(self, generation: int, death: Death) -> None:
            super().engine_lost(generation, death)
            self.known = sum(rank.nan_rows for rank in self.ranks)

    trigger = tmp_path / "trigger"

    async def scene(_: EngineProcesses, heard: Heard) -> None:
        await started(heard)
        trigger.touch()
        await until(lambda: heard.deaths)

    words = command("refused", str(trigger))
    _, heard = run(tmp_path / "files", scene, words, heard=Listening())
    assert isinstance(heard, Listening)
    assert heard.known == 7


def test_what_a_rank_counts_until_it_is_killed_is_told(tmp_path: Path) -> None:
    """The follower's counters miss nothing of a generation that has to end."""
    counted = tmp_path / "counted"

    async def scene(processes: EngineProcesses, heard: Heard) -> None:
        await until(lambda: counted.exists() and counted.read_bytes())
        processes.stop(1, "a restart")
        await until(lambda: heard.ended)

    _, heard = run(tmp_path / "files", scene, command("counts", str(counted)))
    assert heard.ranks[0].nan_rows >= int(counted.read_bytes())


def test_a_host_without_memory_ends_the_ranks_with_the_reason(tmp_path: Path) -> None:
    """Before anyone can see that they are gone, and with all their processes."""
    host = FakeHost(tmp_path / "host")
    settings = MemorySettings(guard="on", marks=(4 * GIB, 2 * GIB, GIB))
    guard = MemoryGuard(settings.marks, root=host.root, interval_seconds=0.01)
    memory = NodeMemory(settings, guard)

    async def scene(_: EngineProcesses, heard: Heard) -> psutil.Process:
        with memory.running():
            worker = await started(heard)
            host.leave(3 * GIB // 2)
            await until(lambda: guard.last is not None and guard.last.level is Level.GIVE_UP)
            assert is_alive(worker)
            host.leave(GIB // 2)
            await until(lambda: heard.ended)
        return worker

    worker, heard = run(tmp_path / "files", scene, memory=memory)
    assert not is_alive(worker)
    (death,) = heard.deaths
    assert death.cause == "host_memory"
    assert death.reason.startswith("512 MiB were available")


def test_ranks_leave_what_their_own_host_needs(tmp_path: Path) -> None:
    """The head may have other memory, and another guard."""
    guard = MemoryGuard(root=FakeHost(tmp_path / "host").root)
    orders: list[Start] = []

    def kept(order: Start, directory: Path) -> Sequence[str]:
        orders.append(order)
        return command()(order, directory)

    async def scene(processes: EngineProcesses, heard: Heard) -> None:
        await started(heard)
        processes.stop(1, "a restart")

    run(tmp_path / "files", scene, kept, memory=NodeMemory(MemorySettings(), guard))
    assert orders == [replace(ORDER, spec=replace(SPEC, kept_host_bytes=guard.ample_bytes()))]


def full_disk(_: Start, directory: Path) -> Sequence[str]:
    """As it is met when the order is written."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / "order.json"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [(lambda *_: ["/nonexistent"], "No such file"), (full_disk, "No space left on device")],
)
def test_a_process_that_cannot_start_is_not_a_death(
    tmp_path: Path, make: Callable[[Start, Path], Sequence[str]], reason: str
) -> None:
    """The head would end with its first engine, although a spare may have what is missing here."""

    async def scene(_: EngineProcesses, heard: Heard) -> None:
        await until(lambda: heard.ended)

    _, heard = run(tmp_path, scene, make)
    ((line, is_final),) = heard.refusals
    assert line.startswith("cannot start the engine's process: ")
    assert reason in line
    assert (heard.deaths, is_final) == ([], False)


def test_a_directory_that_cannot_be_made_is_not_a_death(tmp_path: Path) -> None:
    """Its clean-up finds nothing, and ends."""

    async def scene(_: EngineProcesses, heard: Heard) -> None:
        await until(lambda: heard.ended)

    (tmp_path / "file").touch()
    _, heard = run(tmp_path / "file", scene)
    assert (heard.deaths, len(heard.refusals)) == ([], 1)


REFUSAL = """
import logging, pathlib, sys
from holdfast.worker.crash_records import NODE_FAILED, record_causes
record_causes(pathlib.Path(sys.argv[1]))
try:
    raise ValueError
except ValueError:
    logging.getLogger("vllm.holdfast").exception("%s: %s", NODE_FAILED, "other GPUs. Remedy: none.")
sys.exit(2)
"""


def test_ranks_that_this_node_cannot_run_are_not_a_death(tmp_path: Path) -> None:
    """What differs is one line, as before joining."""

    async def scene(_: EngineProcesses, heard: Heard) -> None:
        await until(lambda: heard.ended)

    def refusing(_: Start, directory: Path) -> Sequence[str]:
        return [sys.executable, "-c", REFUSAL, str(directory)]

    _, heard = run(tmp_path, scene, refusing)
    assert (heard.deaths, heard.refusals) == ([], [("other GPUs. Remedy: none.", True)])


def test_a_generation_whose_statistics_cannot_be_read_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is removed and its end reported, or the node would never be free again."""

    def unreadable(*_: object, **__: object) -> None:
        raise ValueError("not statistics")

    async def scene(_: EngineProcesses, heard: Heard) -> None:
        await until(lambda: heard.ended)

    heard = Heard()
    monkeypatch.setattr("holdfast.nodes.engine_processes.read_all", unreadable)
    with pytest.raises(ValueError, match="not statistics"):
        run(tmp_path, scene, heard=heard)
    assert heard.ended == [1]
    assert not (tmp_path / "1").exists()


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
        processes = EngineProcesses(tmp_path, command(), unguarded())
        processes.start(ORDER)
        with pytest.raises(RuntimeError, match="no receiver"):
            await processes.ended()

    asyncio.run(scene())


def test_its_end_is_not_reported_while_a_process_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that hangs in a driver ends later; what survived once is killed by the next attempt."""
    monkeypatch.setattr("holdfast.nodes.engine_processes.RETRY_SECONDS", 0.01)
    attempts: list[bool] = []
    worker: list[psutil.Process] = []

    def kill(processes: Iterable[psutil.Process]) -> tuple[int, ...]:
        attempts.append(is_alive(worker[0]))
        return kill_really(processes) if len(attempts) > 2 else (4711,)

    kill_really = tree.kill
    monkeypatch.setattr(tree, "kill", kill)

    async def scene(processes: EngineProcesses, heard: Heard) -> list[int]:
        worker.append(await started(heard))
        processes.stop(1, "a restart")
        await until(lambda: len(attempts) == 2)
        return list(heard.ended)

    ended_early, heard = run(tmp_path, scene)
    assert (ended_early, heard.ended, attempts) == ([], [1], [True, True, True])
    assert not is_alive(worker[0])
    assert caplog.text.count("process 4711 of the engine cannot be killed; trying again") == 1


@pytest.mark.parametrize("step", ["shared_memory", "remove"])
@pytest.mark.parametrize("error", [OSError("too many open files"), psutil.AccessDenied(1)])
def test_a_step_of_the_clean_up_that_fails_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    """Otherwise nobody would hear of the end, and the node would be lost."""
    monkeypatch.setattr("holdfast.nodes.engine_processes.RETRY_SECONDS", 0.01)
    errors = [error]
    works: Callable[..., object] = getattr(cleanup, step)

    def fail_once(*given: object) -> object:
        if errors:
            raise errors.pop()
        return works(*given)

    monkeypatch.setattr(cleanup, step, fail_once)

    async def scene(processes: EngineProcesses, heard: Heard) -> psutil.Process:
        worker = await started(heard)
        processes.stop(1, "a restart")
        await until(lambda: heard.ended)
        return worker

    worker, _ = run(tmp_path, scene)
    assert not is_alive(worker)
    assert not list(tmp_path.iterdir())
    assert not list(SHARED_MEMORY.glob(f"{name_prefix(tmp_path / '1')}*"))


def test_a_clean_up_that_hangs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its end is waited for: the processes may still be there."""
    monkeypatch.setattr("holdfast.nodes.engine_processes.SLOW_SECONDS", 0.01)
    may_go_on = threading.Event()
    remove = cleanup.remove

    def hang(directory: Path) -> None:
        may_go_on.wait(DEADLINE_SECONDS)
        remove(directory)

    monkeypatch.setattr(cleanup, "remove", hang)

    async def scene(processes: EngineProcesses, heard: Heard) -> list[int]:
        await started(heard)
        processes.stop(1, "a restart")
        await until(lambda: "the kernel does not answer" in caplog.text)
        ended = list(heard.ended)
        may_go_on.set()
        return ended

    ended_early, heard = run(tmp_path, scene)
    assert (ended_early, heard.ended) == ([], [1])


def test_what_a_generation_leaves_does_not_survive_the_next(tmp_path: Path) -> None:
    """Only what was there before the first is none of its business."""

    async def scene(processes: EngineProcesses, heard: Heard) -> subprocess.Popen[bytes]:
        await started(heard)
        processes.stop(1, "a restart")
        await until(lambda: heard.ended)
        left = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 - a moment
        heard.ranks.clear()
        processes.start(ORDER)
        await started(heard)
        processes.stop(1, "a restart")
        await until(lambda: len(heard.ended) == 2)
        return left

    earlier = subprocess.Popen(["sleep", "600"])
    try:
        left, _ = run(tmp_path, scene)
        assert left.wait(DEADLINE_SECONDS) is not None
        assert earlier.poll() is None
    finally:
        earlier.kill()
        earlier.wait(DEADLINE_SECONDS)


def test_a_worker_killed_on_a_follower_ends_the_generation_at_the_head(tmp_path: Path) -> None:
    """Over sockets and with processes; the next generation starts on the same follower."""

    async def scene(scene: Scene) -> tuple[list[str], bool]:
        machine = Follower(key=KEY, name="b", instance="ab" * 32)
        engine = EngineProcesses(tmp_path, command(), unguarded())
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
