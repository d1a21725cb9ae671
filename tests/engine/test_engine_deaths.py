"""A real engine dies in each way, one generation after the other in one process, and is gone."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import psutil
import pytest

from holdfast import cli
from holdfast.demo.switches import DemoFault, DemoSwitches
from holdfast.engine.baseline import CanaryAnswer
from holdfast.errors import EngineStartError
from holdfast.lifecycle.states import State
from holdfast.processes import environment, forkserver, tree
from holdfast.processes.environment import NativeVariables
from holdfast.records import Death
from holdfast.verify.agreement import first_choice
from holdfast.worker.ipc_names import name_prefix
from holdfast.workspace.plan import WorkspaceSpec
from owned_processes import owned_processes
from servers import NOT_COMPILED, SMALL, title_of, wait_until
from untrained import untrained_demo

pytestmark = [
    pytest.mark.engine,
    # vLLM leaves its zmq contexts to the garbage collector, which complains of them.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

logger = logging.getLogger(__name__)

POISON_REPEATS = 40
DEATH_DEADLINE_SECONDS = 60.0
"""Far from what is promised, for a machine that does much else."""
START_DEADLINE_SECONDS = 240.0
POISON = DemoSwitches(
    faults=(DemoFault(when="repeated_tokens", threshold=POISON_REPEATS, effect="raise"),)
)
Answer = TypeVar("Answer")


class Lab:
    """One launcher on a loop of its own, and the engine that runs now."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory = directory
        self.native_variables = NativeVariables(None, ())
        self.strangers = frozenset(psutil.Process().children(recursive=True))
        """Those of servers that tests of other files share, and that still run."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._model = model
        self._generation = 0
        self._running = AsyncExitStack()
        self.launcher: Any = None
        self.engine: Any = None

    def do(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Do it on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_DEADLINE_SECONDS)

    def start(self) -> None:
        """Have an engine run."""
        self.do(self._start())

    async def _start(self) -> None:
        if self.engine is not None:
            return
        if self.launcher is None:
            self.launcher = await asyncio.to_thread(self._configure)
        self._generation += 1
        directory = self.launcher.directory_of(self._generation)
        spec = WorkspaceSpec(str(directory), self._generation, 0, 0.1, "alongside", None)
        self.engine = await self._running.enter_async_context(self.launcher.running(spec))

    def _configure(self) -> Any:
        from holdfast.engine.launch.configure import configure

        settings = cli.parse_serve([str(self._model), *SMALL], os.environ)
        return configure(
            settings, self.directory, lambda: State.STARTING, self.native_variables
        ).launcher

    async def tokens(self, prompt: list[int], name: str, most: int = 4) -> list[int]:
        """What the engine answers."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        # Not by the proxy, where it would wait for the next engine.
        answers = self.engine.llm.generate({"prompt_token_ids": prompt}, parameters, name)
        outputs = [output async for output in answers]
        return list(outputs[-1].outputs[0].token_ids)

    def dies(self) -> Death:
        """The death of the engine; how long it took to be seen is logged."""
        started = time.monotonic()
        death: Death = self.do(asyncio.wait_for(self.engine.until_dead(), DEATH_DEADLINE_SECONDS))
        logger.info("%s was seen after %.2f s", death.cause, time.monotonic() - started)
        return death

    def end(self) -> None:
        """Stop the engine, if one runs."""
        self.engine = None
        self.do(self._running.aclose())

    def process(self, name: str) -> psutil.Process:
        """The one with this in its title."""
        found = self.find_process(name)
        assert found is not None, name
        return found

    def find_process(self, name: str) -> psutil.Process | None:
        """The one with this in its title, if the lab has started one."""
        own = tree.children() - self.strangers
        return next((p for p in own if name in title_of(p)), None)

    def close(self) -> None:
        """End everything."""
        self.end()
        self.do(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def lab(models: Path) -> Iterator[Lab]:
    """Engines of a model that fails at a prompt which repeats one token."""
    model = untrained_demo(models, POISON)
    with (
        environment.overridden(NOT_COMPILED),
        TemporaryDirectory(prefix="held-") as directory,  # pytest's own is too long for sockets
        owned_processes(Path(directory)),
    ):
        lab = Lab(Path(directory), model)
        try:
            yield lab
        finally:
            lab.close()
            gc.collect()  # while the warning above is ignored


@pytest.fixture
def running(lab: Lab) -> Iterator[Lab]:
    """The lab with an engine; the next test gets another one if this one's is dead."""
    lab.start()
    yield lab
    if lab.engine is not None and lab.engine._death.done():
        lab.end()


def left_by(lab: Lab, directory: Path) -> list[str]:
    """What a generation left: processes, files, shared memory."""
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    known = {forkserver.server_pid(), tracker}
    own = set(psutil.Process().children(recursive=True)) - lab.strangers
    return [
        *(repr(p) for p in own if p.pid not in known),
        *(path.name for path in lab.directory.iterdir() if path.name == directory.name),
        *(path.name for path in Path("/dev/shm").glob(f"*{name_prefix(directory)}*")),  # noqa: S108
    ]


def test_a_killed_fork_server_is_replaced(running: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """Its engine dies with it, and the next one comes from another server, its worker too.

    What a worker has to be started with is known by then.
    """
    before = forkserver.server_pid()
    assert before
    assert running.process("VLLM::Worker").ppid() != before  # spawned, and named all the same
    os.kill(before, signal.SIGKILL)
    # The kernel ends all of them at once, and which end is seen first is nobody's promise.
    assert running.dies().cause in {"core_exit", "worker_exit"}
    running.end()
    running.start()
    assert forkserver.server_pid() != before
    assert "had ended and was replaced" in caplog.text
    assert running.process("VLLM::Worker").ppid() == forkserver.server_pid()
    assert running.native_variables.known  # still
    running.do(running.engine.canary())


def test_an_idle_engine_sings_and_tells_its_stacks(running: Lab) -> None:
    """A canary passes, no compiler runs, and a stopped worker's stack is told."""
    running.do(running.engine.canary())
    assert not running.engine.is_compiling()
    worker = running.process("VLLM::Worker")
    worker.suspend()
    try:
        stacks = running.do(running.engine.dump_stacks())
    finally:
        worker.resume()
    assert "VLLM::EngineCore" in stacks
    assert "worker_busy_loop" in stacks
    running.do(running.engine.canary())


def test_a_canary_tells_the_token_and_log_probs_after_a_prompt(running: Lab) -> None:
    """The same each time, whether a prefix is cached or not; without a prompt it tells none."""
    prompt = list(range(40, 90))
    first, second = (running.do(running.engine.canary(prompt)) for _ in range(2))
    assert first == second
    assert len(first.top) >= 8
    assert all(-1000 < value <= 0 for value in first.top.values())
    assert first.token == first_choice(first.top)
    assert running.do(running.engine.canary()) == CanaryAnswer()


def test_a_cancelled_canary_is_taken_back(running: Lab) -> None:
    """While the engine does not answer; afterwards nothing is left in it."""
    worker = running.process("VLLM::Worker")
    worker.suspend()
    try:
        with pytest.raises(TimeoutError):
            running.do(asyncio.wait_for(running.engine.canary(), 0.5))
    finally:
        worker.resume()
    assert running.do(running.engine.queued_requests()) == 0
    running.do(running.engine.canary())


def test_a_prompt_that_raises_is_accused(running: Lab) -> None:
    """The exception is the reason, and its request a suspect, with how far it came."""

    async def poison() -> None:
        prompt = [7] * POISON_REPEATS
        with pytest.raises(Exception, match="EngineCore"):
            await running.tokens(prompt, "poison")

    running.do(poison())
    death = running.dies()
    assert death.cause == "worker_exception"
    assert "InjectedFaultError" in death.reason
    assert death.blames_requests
    assert death.suspects
    (suspect,) = [suspect for suspect in death.suspects if suspect.is_in_running_step]
    assert suspect.request_id.startswith("poison")
    assert suspect.reached_tokens == POISON_REPEATS
    assert suspect.is_prefill


@pytest.mark.parametrize(
    ("name", "number", "cause"),
    [
        ("VLLM::Worker", signal.SIGKILL, "worker_exit"),
        ("VLLM::EngineCore", signal.SIGKILL, "core_exit"),
        ("VLLM::EngineCore", signal.SIGSEGV, "core_exit"),
        ("VLLM::EngineCore", signal.SIGTERM, "terminated"),
    ],
)
def test_a_signal_is_seen_and_leaves_nothing(
    running: Lab, name: str, number: signal.Signals, cause: str
) -> None:
    """At once, under its name, without suspects; no process, file or memory stays.

    A SIGSEGV that is sent looks as one of native code. tvm-ffi's handler used to swallow it.
    """
    directory = Path(running.engine._spec.stats_directory)
    answer = running.do(running.tokens([5, 6, 7], "before"))
    running.process(name).send_signal(number)
    death = running.dies()
    assert death.cause == cause
    assert number.name in death.reason
    assert death.blames_requests == (number is signal.SIGSEGV)
    assert death.suspects is None
    assert left_by(running, directory) != []
    running.end()
    # The fork server takes a moment to bury its child.
    wait_until(
        lambda: not left_by(running, directory),
        deadline_seconds=DEATH_DEADLINE_SECONDS,
        what=lambda: f"still there: {left_by(running, directory)}",
    )
    running.start()
    assert running.do(running.tokens([5, 6, 7], "after")) == answer


@pytest.mark.parametrize("name", ["EngineCore", "VLLM::Worker"])
def test_a_start_that_dies_spoils_no_later_one(running: Lab, name: str) -> None:
    """It is told by its signal: the kernel kills the largest process where memory is short.

    What outlives the engines, such as the tokenizer's threads, outlives a failed start, too.
    """
    running.end()
    line = _failed_start(running, name)
    assert "was killed by SIGKILL (probably for lack of memory). Remedy: " in line
    gc.collect()  # of the half-made AsyncLLM, now that nobody holds the exception
    running.start()
    assert len(running.do(running.tokens([5, 6, 7], "after"))) == 4


def _failed_start(lab: Lab, name: str) -> str:
    """What is said of a start whose process of this name is killed as soon as it is there."""
    starting = asyncio.run_coroutine_threadsafe(lab._start(), lab._loop)
    victim = wait_until(
        lambda: lab.find_process(name),
        deadline_seconds=START_DEADLINE_SECONDS,
        what=lambda: f"no {name}",
    )
    victim.kill()
    error = starting.exception(START_DEADLINE_SECONDS)
    assert isinstance(error, EngineStartError)
    return error.line
