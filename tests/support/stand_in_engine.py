"""`holdfast` with a stand-in for the engine, so that what surrounds one is tested in a second.

Everything but `holdfast.engine.launch.configure` is real: the command line, the listener, the
supervisor, the signals. The engine is a child process that ignores SIGTERM, as a worker in a
collective does. `STAND_IN` names what it does otherwise: `never-starts`, `starts-once` or
`never-answers`; with `another-vllm`, one of vLLM's modules lacks what Holdfast changes in it. A
prompt that begins with `POISON` ends it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from holdfast.configuration_record import Configuration
from holdfast.engine.replay import ReplayManager
from holdfast.engine.suspects.suspicion_files import SuspicionFiles
from holdfast.engine.suspects.suspicions import Suspicions
from holdfast.lifecycle.states import State
from holdfast.processes import tree
from holdfast.processes.environment import NativeVariables
from holdfast.records import Death, EngineFacts, RankStats
from holdfast.settings import Settings
from holdfast.telemetry.load import Load
from holdfast.workspace.plan import GrowthPolicy, WorkspaceSpec
from scripted_llm import AnsweredError, PlainOutputs, ScriptedLLM
from stub_engine import FACTS, StubEngine

CHUNK_SECONDS = 0.1
POISON = "poison"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class StandInEngine(StubEngine):
    """An engine without ranks, which lives as long as its process."""

    def __init__(self, generation: int, facts: EngineFacts, child: subprocess.Popen[bytes]) -> None:
        self.generation = generation
        self.facts = facts
        self.llm = ScriptedLLM(poison=POISON)
        self._child = child

    def ranks(self, *, reads_steps: bool = True) -> tuple[RankStats, ...]:
        del reads_steps
        return ()

    async def until_dead(self) -> Death:
        while self._child.poll() is None:
            if self.llm.is_dead:
                return Death("worker_exception", "it died of a prompt", blames_requests=True)
            await asyncio.sleep(CHUNK_SECONDS)
        return Death("core_exit", f"process {self._child.pid} ended")

    async def set_growth(self, policy: GrowthPolicy) -> None:
        pass


def _start_child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", STUBBORN])


class Queues:
    """No request waits."""

    def totals(self) -> tuple[int, int]:
        return 0, 0

    def kv_used(self) -> dict[int, float]:
        return {}


class StandInLauncher:
    """Starts a child process and says that it is an engine."""

    fingerprint = "stand-in"

    def __init__(self, directory: Path, learned_directory: Path | None) -> None:
        files = SuspicionFiles(learned_directory, self.fingerprint) if learned_directory else None
        self.suspicions = Suspicions(files)
        self.requests = ReplayManager(PlainOutputs(), self.suspicions)
        self._directory = directory
        self.queues = Queues()

    def directory_of(self, generation: int) -> Path:
        return self._directory / str(generation)

    def host_memory_bytes(self) -> int | None:
        return None

    def request_load(self) -> Load:
        return Load(self.requests.held)

    async def until_startable(self, _on_wait: Callable[[str], None]) -> None:
        """One node is always enough."""

    @asynccontextmanager
    async def running(self, spec: WorkspaceSpec) -> AsyncIterator[StandInEngine]:
        child = _start_child()
        try:
            behaviour = os.environ.get("STAND_IN")
            if behaviour == "never-starts" or (behaviour == "starts-once" and spec.generation > 1):
                await asyncio.Event().wait()
            engine = StandInEngine(spec.generation, FACTS, child)
            self.requests.engine_started(engine.llm, spec.generation)
            yield engine
        finally:
            self.requests.engine_ended()
            child.kill()
            await asyncio.to_thread(tree.kill, tree.children())


class StandInConfigured:
    """What `holdfast.engine.launch.configure` would have made of the command line."""

    def __init__(self, directory: Path, learned_directory: Path | None) -> None:
        self.launcher = StandInLauncher(directory, learned_directory)
        self.arguments = Namespace(disable_log_stats=False)

    def identified(self, configuration: Configuration) -> Configuration:
        return configuration

    @asynccontextmanager
    async def openai_app(self, _server: Any, _count_tool_call: Any) -> AsyncIterator[Starlette]:
        yield Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/{path:path}", _answer, methods=["GET", "POST"]),
            ]
        )

    async def _complete(self, request: Request) -> JSONResponse:
        """One token, from the engine in use or from a later one."""
        arguments = {"prompt": (await request.json())["prompt"], "request_id": "a"}
        try:
            outputs = [one async for one in self.launcher.requests.run("generate", arguments)]
        except AnsweredError as answer:
            return JSONResponse({"error": {"message": str(answer)}}, answer.error.http_status)
        return JSONResponse({"tokens": len(outputs)})


async def _answer(request: Request) -> StreamingResponse:
    """A line, and then ten more a second until the file that `?until=` names is there."""

    async def chunks() -> AsyncIterator[str]:
        if os.environ.get("STAND_IN") == "never-answers":
            await asyncio.Event().wait()
        yield "begun\n"
        if until := request.query_params.get("until"):
            while not await anyio.Path(until).exists():
                await asyncio.sleep(CHUNK_SECONDS)
                yield "more\n"
            yield "ended\n"

    return StreamingResponse(chunks())


def configure(
    _settings: Settings,
    directory: Path,
    _state: Callable[[], State],
    _native_variables: NativeVariables,
    learned_directory: Path | None = None,
) -> StandInConfigured:
    """Stands in for `holdfast.engine.launch.configure.configure`."""
    return StandInConfigured(directory, learned_directory)


if __name__ == "__main__":
    module: Any = ModuleType("holdfast.engine.launch.configure")
    module.configure = configure
    sys.modules[module.__name__] = module
    if os.environ.get("STAND_IN") == "another-vllm":
        sys.modules["vllm.v1.utils"] = ModuleType("vllm.v1.utils")
    from holdfast.cli import main
    from holdfast.processes import forkserver as engine_forkserver

    unused: Any = engine_forkserver
    unused.PRELOADED = ()  # nobody asks it for an engine
    main()
