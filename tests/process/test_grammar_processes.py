"""A grammar that crashes, hangs or grows takes a worker with it, and nothing else."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

import scripted_compiler
from holdfast.engine.grammars import checker
from holdfast.engine.grammars.pool import Pool, TrialReply
from holdfast.errors import NotReadyError
from holdfast.processes import exits, forkserver, tree
from holdfast.request_context import REQUEST, RequestContext
from owned_processes import owned_processes
from servers import wait_until

DEADLINE_SECONDS = 60.0
WORKERS = 2
LARGE = "x" * (64 << 20)
"""It takes many milliseconds to hand over."""


@pytest.fixture(scope="module", autouse=True)
def _server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A fork server that has imported nothing."""
    before = forkserver.PRELOADED
    forkserver.PRELOADED = ()
    with owned_processes(tmp_path_factory.mktemp("server")):
        yield
    forkserver.PRELOADED = before


@asynccontextmanager
async def pool(make: Callable[[], Any] = scripted_compiler.make) -> AsyncIterator[Pool]:
    made = Pool(make, workers=WORKERS, memory_bytes=256 << 20)
    try:
        yield made
    finally:
        made.stop()


async def ask(asked: Pool, what: str, limit_seconds: float = DEADLINE_SECONDS) -> TrialReply:
    return await asked.compile(json.dumps({"regex": what}).encode(), limit_seconds)


async def _said_by_worker(asked: Pool, what: str) -> str:
    """What it said: its pid, unless it was asked for something else."""
    reply = (await ask(asked, what)).reply
    assert reply is not None
    return str(reply["backend"])


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 2 * DEADLINE_SECONDS))


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_grammar_that_ends_its_process_is_answered_for(number: signal.Signals) -> None:
    """With nothing said of it, and the next one finds a worker."""

    async def scene() -> None:
        async with pool() as asked:
            for _ in range(3):
                answer = await ask(asked, f"crash {number:d}")
                assert (answer.reply, answer.signal) == (None, number)
            assert (await ask(asked, "")).reply is not None

    run(scene)


@pytest.mark.parametrize("what", ["sleep 3600", "spin"])
def test_a_grammar_ends_at_its_limit(what: str) -> None:
    """Whether it works or waits; the others go on meanwhile."""

    async def scene() -> None:
        async with pool() as asked:
            await ask(asked, "")  # starts the workers
            slow = asyncio.create_task(ask(asked, what, 5.0))
            assert (await ask(asked, "")).reply is not None
            assert not slow.done()
            answer = await slow
            assert (answer.reply, answer.signal) == (None, signal.SIGALRM)

    run(scene)


def test_a_grammar_ends_at_its_limit_of_cpu_time() -> None:
    """One that only waits for a core does not, nor one of many threads that ends before that time.

    The timer of CPU time begins when as much time has passed on the clock.
    """

    async def scene() -> None:
        async with pool() as asked:
            grammars = [json.dumps({"regex": what}).encode() for what in ("spin", "sleep 1")]
            spun, slept = [
                await asked.compile(one, DEADLINE_SECONDS, limit_cpu_seconds=0.5)
                for one in grammars
            ]
            assert (spun.reply, spun.signal) == (None, signal.SIGPROF)
            assert spun.cpu_seconds >= 0.4
            assert slept.reply is not None
            timer = json.dumps({"regex": "timer"}).encode()
            begun = await asked.compile(
                timer, DEADLINE_SECONDS, limit_cpu_seconds=DEADLINE_SECONDS / 2
            )
            assert begun.reply is not None
            assert begun.reply["backend"] == "0.0"
            # A worker that is used again has the whole limit for the next one.
            for _ in range(2 * WORKERS):
                kept = json.dumps({"regex": "work 0.3"}).encode()
                reply = await asked.compile(kept, DEADLINE_SECONDS, limit_cpu_seconds=0.5)
                assert reply.reply is not None

    run(scene)


@pytest.mark.parametrize(
    ("what", "takes_slow_lane"), [("work 2", True), ("sleep 2", False), ("work 0.1", False)]
)
def test_a_grammar_is_slow_by_its_cpu_time(
    what: str, *, takes_slow_lane: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is busy with something else, an ordinary one needs seconds, too."""
    lanes = []

    async def scene() -> None:
        async with pool() as asked:
            compiled = asked.compile

            async def compile_grammar(*arguments: Any, **how: Any) -> TrialReply:
                # Other tests may leave no core idle, so none has to be.
                lanes.append(how.pop("is_slow", False))
                return await compiled(*arguments, **how)

            monkeypatch.setattr(asked, "compile", compile_grammar)
            REQUEST.set(RequestContext("a"))
            await checker.GrammarChecker(asked, timeout_seconds=DEADLINE_SECONDS).check(
                StructuredOutputsParams(regex=what)
            )

    run(scene)
    assert lanes == [False, True][: 1 + takes_slow_lane]


def test_the_limit_of_a_grammar_counts_while_it_is_read() -> None:
    """A worker that runs only on idle cores may not get further; the others go on."""

    async def scene() -> None:
        async with pool() as asked:
            await ask(asked, "")  # starts the workers
            process = asked._process
            answer = await ask(asked, LARGE, 0.001)
            assert (answer.reply, answer.signal) == (None, signal.SIGALRM)
            assert (await ask(asked, "")).reply is not None
            assert asked._process is process

    run(scene)


def test_a_grammar_whose_process_was_killed_may_be_sent_again() -> None:
    """The kernel did that, or a user, for want of memory elsewhere: the grammar did not."""

    async def scene() -> None:
        async with pool() as asked:
            with pytest.raises(NotReadyError):
                await ask(asked, f"crash {signal.SIGKILL:d}")
            assert (await ask(asked, "")).reply is not None

    run(scene)


def test_a_grammar_has_so_much_memory_and_no_more() -> None:
    """It is told so."""

    async def scene() -> None:
        async with pool() as asked:
            assert (await ask(asked, "grow")).reply == {"error": "memory"}
            assert (await ask(asked, "")).reply is not None

    run(scene)


def test_a_worker_that_has_grown_is_replaced() -> None:
    """What grammars leave behind does not add up; a worker that only took long stays."""

    async def scene() -> None:
        async with pool() as asked:
            kept = {
                await _said_by_worker(asked, what) for what in ("", "sleep 1", "grow 1") * WORKERS
            }
            grown = await _said_by_worker(asked, "grow 32")
            later = {await _said_by_worker(asked, "") for _ in range(4 * WORKERS)}
            assert len(kept | later - {grown}) <= WORKERS + 1
            assert grown not in later

    run(scene)


def test_a_worker_that_a_grammar_has_left_a_thread_in_is_replaced() -> None:
    """The next grammar would share its time and memory with that thread."""

    async def scene() -> None:
        async with pool() as asked:
            left = (await ask(asked, "abandon 3600")).reply
            assert left is not None
            later = {await _said_by_worker(asked, "") for _ in range(4 * WORKERS)}
            assert left["error"] not in later

    run(scene)


def test_a_slow_grammar_runs_where_nothing_else_wants_to() -> None:
    """It is tried for long, with several threads, beside an engine that answers others."""

    async def scene() -> None:
        async with pool() as asked:
            slow = json.dumps({"regex": "policy"}).encode()
            reply = (await asked.compile(slow, DEADLINE_SECONDS, is_slow=True)).reply
            assert reply is not None
            assert int(reply["backend"]) == os.SCHED_IDLE
            assert int(await _said_by_worker(asked, "policy")) == os.SCHED_OTHER

    run(scene)


@pytest.mark.parametrize(
    ("what", "error"), [("spin", VLLMValidationError), ("sleep 3600", GracefulHTTPError)]
)
def test_a_grammar_is_too_slow_only_if_it_could_run(
    what: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that had no core may be sent again, even if the worker had one for another before."""
    monkeypatch.setattr(checker, "LEAST_SHARE", 0.01)  # other tests keep the cores busy

    async def scene() -> None:
        async with pool() as asked:
            for _ in range(WORKERS):
                await ask(asked, "work 0.5")
            REQUEST.set(RequestContext("a"))
            with pytest.raises(error):
                await checker.GrammarChecker(asked, timeout_seconds=1.0).check(
                    StructuredOutputsParams(regex=what)
                )

    run(scene)


def test_a_worker_knows_no_secret_and_has_no_socket_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the environment it has what vLLM reads, and of sockets the two that it answers on."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_REGEX_COMPILATION_TIMEOUT_S", "7")

    async def scene() -> None:
        async with pool() as asked:
            names = ("HF_TOKEN", "VLLM_API_KEY", "VLLM_REGEX_COMPILATION_TIMEOUT_S")
            found = [(await ask(asked, f"environment {name}")).reply for name in names]
            assert [one and one["backend"] for one in found] == ["", "", "7"]
            files = (await ask(asked, "files")).reply
            assert files is not None
            assert files["backend"].split().count("socket") == 2

    run(scene)


def test_others_take_the_place_of_processes_that_are_gone() -> None:
    """Killed before a grammar came, or while one was there: that one may be sent again."""

    async def scene() -> None:
        async with pool() as asked:
            await ask(asked, "")
            tree.kill(asked.processes())
            # One that has just been forked may not be among those that are killed next.
            served = await asyncio.gather(*(ask(asked, "sleep 3") for _ in range(WORKERS)))
            assert len({one.pid for one in served if one.reply is not None}) == WORKERS
            slow = asyncio.create_task(ask(asked, "sleep 3600"))
            assert (await ask(asked, "")).reply is not None
            tree.kill(asked.processes())
            with pytest.raises(NotReadyError):
                await slow
            assert (await ask(asked, "")).reply is not None

    run(scene)


@pytest.mark.parametrize("make", [scripted_compiler.make, scripted_compiler.just_forked])
def test_processes_that_are_stopped_are_given_up(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]
) -> None:
    """The grammar may be sent again, and the next one has others."""
    monkeypatch.setattr("holdfast.engine.grammars.pool.MARGIN_SECONDS", 2.0)

    async def scene() -> None:
        async with pool(make) as asked:
            await ask(asked, "")
            wait_until(
                lambda: len(asked.processes()) == 1 + WORKERS,
                deadline_seconds=DEADLINE_SECONDS,
                what=lambda: f"there are only {asked.processes()}",
            )
            stopped = asked.processes()
            for process in stopped:
                process.suspend()
            with pytest.raises(NotReadyError):
                await ask(asked, "", 0.5)
            assert (await ask(asked, "")).reply is not None
            wait_until(
                lambda: not any(map(exits.is_alive, stopped)),
                deadline_seconds=DEADLINE_SECONDS,
                what=lambda: f"{stopped} have not ended",
            )

    run(scene)


async def _until_complete(asked: Pool) -> frozenset[psutil.Process]:
    """Wait until all workers are there, and return the processes."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while len(found := asked.processes()) != 1 + WORKERS:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.02)
    return found


def _first_of(processes: frozenset[psutil.Process]) -> psutil.Process:
    """The process that forks the workers."""
    (first,) = [one for one in processes if one.ppid() == forkserver.server_pid()]
    return first


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "without the first"])
def test_nothing_is_left_of_processes_that_were_given_up(
    monkeypatch: pytest.MonkeyPatch, *, is_stopped: bool
) -> None:
    """No zombie either, nor a descriptor: the engine, whose end reaps them, may run for days."""
    monkeypatch.setattr("holdfast.engine.grammars.pool.MARGIN_SECONDS", 2.0)

    async def scene() -> None:
        async with pool() as asked:
            await ask(asked, "")
            gone, opened = set[int](), psutil.Process().num_fds()
            for _ in range(3):
                given_up = await _until_complete(asked)
                gone |= {process.pid for process in given_up}
                if is_stopped:
                    for process in given_up:
                        process.suspend()
                    with pytest.raises(NotReadyError):
                        await ask(asked, "", 0.5)
                else:
                    tree.kill([_first_of(given_up)])
                assert (await ask(asked, "")).reply is not None
            async with asyncio.timeout(DEADLINE_SECONDS):
                while any(map(psutil.pid_exists, gone)) or psutil.Process().num_fds() > opened:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.05)

    run(scene)


def test_a_worker_that_takes_long_to_end_costs_the_others_nothing() -> None:
    """One that runs only on idle cores ends only there. To give it up would end all others, too."""

    async def scene() -> None:
        async with pool() as asked:
            await ask(asked, "")
            before = await _until_complete(asked)
            first = _first_of(before)
            first.suspend()  # it neither says that the worker has ended nor replaces it
            wait_until(  # it would reap a worker that ends before it has had a core to stop on
                lambda: first.status() == psutil.STATUS_STOPPED,
                deadline_seconds=DEADLINE_SECONDS,
                what=lambda: "it has not stopped",
            )
            answer = await ask(asked, f"crash {signal.SIGSEGV:d}")
            assert (answer.reply, answer.signal) == (None, signal.SIGALRM)
            gone = asyncio.create_task(asked.until_gone(answer.pid))
            assert (await ask(asked, "")).reply is not None
            assert not gone.done()
            first.resume()
            await gone
            after = await _until_complete(asked)
            assert first in after
            assert len(before & after) == WORKERS

    run(scene)


def test_a_worker_that_cannot_be_forked_costs_the_others_nothing() -> None:
    """The container may have as many processes as it may have; it is tried again."""

    async def scene() -> None:
        async with pool(scripted_compiler.without_processes) as asked:
            await ask(asked, "")
            before = await _until_complete(asked)
            first = _first_of(before)
            slow = asyncio.create_task(ask(asked, "sleep 2"))
            answer = await ask(asked, f"crash {signal.SIGSEGV:d}")
            assert (answer.reply, answer.signal) == (None, signal.SIGSEGV)
            assert (await slow).reply is not None
            after = await _until_complete(asked)
            assert first in after
            assert len(before & after) == WORKERS

    run(scene)


@pytest.mark.parametrize("kind", [threading.Thread, threading.Timer])
def test_a_start_without_threads_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, kind: type[threading.Thread]
) -> None:
    """They count as processes in a container. It leaves no descriptor open."""

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scene() -> None:
        async with pool() as asked:
            opened = psutil.Process().num_fds()
            with monkeypatch.context() as patched:
                patched.setattr(kind, "start", fail)
                with pytest.raises(NotReadyError):
                    await ask(asked, "")
            assert psutil.Process().num_fds() <= opened
            assert (await ask(asked, "")).reply is not None

    run(scene)


def test_a_start_needs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system for temporary files may be full."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scene() -> None:
        async with pool() as asked:
            monkeypatch.setattr(Path, "touch", fail)
            assert (await ask(asked, "")).reply is not None

    run(scene)


def test_a_compiler_that_cannot_be_made_refuses_nothing_for_good() -> None:
    """The client may try again."""

    async def scene() -> None:
        async with pool(broken) as asked:
            with pytest.raises(NotReadyError):
                await ask(asked, "")

    run(scene)


def broken() -> Any:
    raise ValueError("no tokenizer")


def test_no_process_outlives_its_parents() -> None:
    """Whatever is killed, all that it has started ends."""

    async def scene() -> None:
        async with pool() as asked:
            await ask(asked, "")
            processes = await _until_complete(asked)
            server = forkserver.server_pid()
            assert server is not None
            os.kill(server, signal.SIGKILL)
            _, alive = psutil.wait_procs(processes, timeout=DEADLINE_SECONDS)
            assert not [one for one in alive if exits.is_alive(one)]
            assert (await ask(asked, "")).reply is not None

    run(scene)
