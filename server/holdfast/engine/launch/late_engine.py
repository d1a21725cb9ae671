"""The engine before and after vLLM is imported: until then nothing of it is there.

Importing this module imports no vLLM. One `LateEngine` belongs to one event loop; any thread may
read what it knows.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import patches
from holdfast.configuration_record import Configuration
from holdfast.engine import unsupported
from holdfast.engine.interface import EngineLauncher, UntilOutOfMemory
from holdfast.engine.replay import ReplayManager
from holdfast.engine.requests.request_progress import RequestRow, Traffic
from holdfast.labels import NodeRefusalReason, ToolCallDefect
from holdfast.lifecycle.states import State
from holdfast.nodes.generations import NodeGenerations
from holdfast.nodes.listener import NodePort
from holdfast.processes import imports
from holdfast.processes.environment import NativeVariables
from holdfast.records import Status
from holdfast.settings import Settings
from holdfast.telemetry.load import Load

if TYPE_CHECKING:  # they import vLLM
    from holdfast.engine.launch.configure import ConfiguredEngine
    from holdfast.engine.loras import Loras


class LateEngine:
    """Imports vLLM, keeps what the command line resolved to, and answers for it until then."""

    def __init__(  # noqa: PLR0913 - what an engine needs from the process that holds it
        self,
        settings: Settings,
        runtime_directory: Path,
        configuration: Configuration,
        *,
        learned_directory: Path | None,
        native_variables: NativeVariables,
        node_port: NodePort | None,
        on_node_refused: Callable[[NodeRefusalReason], None],
        state: Callable[[], State],
        count_keys: Callable[[], int],
        until_out_of_memory: UntilOutOfMemory,
    ) -> None:
        self._settings = settings
        self._runtime_directory = runtime_directory
        self._learned_directory = learned_directory
        self._native_variables = native_variables
        self._node_port = node_port
        self._on_node_refused = on_node_refused
        self._state = state
        self._count_keys = count_keys
        self._until_out_of_memory = until_out_of_memory
        self._vllm: ConfiguredEngine | None = None
        self._nodes: NodeGenerations | None = None
        self._kept = AsyncExitStack()
        self.configuration = configuration
        """What was given to this server, with what is known of the engine and its model so far."""

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """While entered, what `load` and `openai_app` open may stay open."""
        async with self._kept:
            yield

    async def load(self) -> EngineLauncher:
        """Import vLLM and resolve the command line, off the loop; then other nodes may join.

        Raises:
            UsageError: a flag, a variable, a file or the model is wrong.
            EngineStartError: a patch that a guarantee needs does not fit this vLLM.
        """
        # The end of the loop would wait for its own executor, and an import cannot be cancelled.
        loader = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._vllm = vllm = await asyncio.get_running_loop().run_in_executor(
            loader, self._configure
        )
        launcher = vllm.launcher
        launcher.count_keys = self._count_keys
        launcher.until_out_of_memory = self._until_out_of_memory
        self.configuration = replace(self.configuration, fingerprint=launcher.fingerprint)
        self._kept.enter_context(launcher.suspicions.learning())
        if self._node_port is not None:
            nodes = vllm.on_several_nodes(
                self._settings, self._node_port, on_refused=self._on_node_refused
            )
            self._nodes = await self._kept.enter_async_context(nodes)
        return launcher

    async def openai_app(
        self, server: Any, count_tool_call: Callable[[ToolCallDefect | None], None]
    ) -> Any:
        """Return vLLM's application, which reaches whichever engine runs; `load` comes before.

        The files of the model are identified from then on, in a thread.
        """
        if self._vllm is None:
            raise RuntimeError("vLLM's application was requested before vLLM was loaded")
        app = await self._kept.enter_async_context(self._vllm.openai_app(server, count_tool_call))
        # By now all files of the model are here. A file system that hangs holds nobody up.
        threading.Thread(target=self._identify, name="identity", daemon=True).start()
        return app

    def with_nodes(self, status: Status) -> Status:
        """Return the status with all nodes, if the engine runs on several."""
        return status if self._nodes is None else self._nodes.added_to(status)

    def requests(self) -> ReplayManager | None:
        """Return the requests in front of every generation; None until vLLM is imported."""
        return self._vllm.launcher.requests if self._vllm else None

    def requests_in_engine(self) -> int:
        """Count the requests that an engine has, and those that wait for the next one."""
        requests = self.requests()
        return requests.in_engine + requests.held if requests else 0

    def request_load(self) -> Load:
        """Count the requests that wait for an engine, and those that one has."""
        return self._vllm.launcher.request_load() if self._vllm else Load()

    def has_new_weights(self) -> bool:
        """Whether the engine's weights may have been changed in its memory: the next has others."""
        return self._vllm is not None and self._vllm.launcher.proxy.has_new_weights

    def suspended_seconds(self, key: str) -> float:
        """Return how long a key that has ended several engines must wait; 0 if it need not."""
        requests = self.requests()
        return requests.suspended_seconds(key) if requests else 0.0

    def has_log_stats(self) -> bool | None:
        """Whether vLLM's schedulers report what they do; None until the command line is read."""
        return None if self._vllm is None else not self._vllm.arguments.disable_log_stats

    def queue(self) -> tuple[int, int]:
        """Return how many requests vLLM's schedulers are running, and how many wait there.

        Those of the probe count, but only where the schedulers tell what runs.
        """
        if self._vllm is None:
            return 0, 0
        running, waiting = self._vllm.launcher.queues.totals()
        return max(running, self.request_load().running), waiting

    def kv_used(self) -> Mapping[int, float]:
        """Return the share of each engine's KV cache that is in use; empty while none runs."""
        return self._vllm.launcher.queues.kv_used() if self._vllm else {}

    def request_rows(self, limit: int) -> tuple[Sequence[RequestRow], int]:
        """Return the oldest requests, at most `limit`, and how many others there are."""
        requests = self.requests()
        return requests.progress.rows(limit) if requests else ((), 0)

    def traffic(self) -> Traffic | None:
        """Return what clients were sent; None until vLLM is imported."""
        requests = self.requests()
        return requests.traffic if requests else None

    def loras(self) -> Loras | None:
        """Return the LoRA adapters; None until vLLM is imported."""
        return self._vllm.launcher.loras if self._vllm else None

    def host_memory_bytes(self) -> int | None:
        """Measure the host memory of the engine in use; None if none is."""
        return self._vllm.launcher.host_memory_bytes() if self._vllm else None

    def _configure(self) -> ConfiguredEngine:
        try:
            with imports.uncollected():
                from holdfast.engine.launch.configure import configure  # noqa: PLC0415 - imports vLLM
        except ValueError:
            unsupported.check_variables(os.environ)  # vLLM reads some variables during its import
            raise
        except (ImportError, AttributeError):
            patches.check("front end")  # which says so if it is something that we change
            raise
        patches.check("front end")
        patches.check("fork server")
        return configure(
            self._settings,
            self._runtime_directory,
            self._state,
            self._native_variables,
            learned_directory=self._learned_directory,
        )

    def _identify(self) -> None:
        if self._vllm is not None:
            self.configuration = self._vllm.identified(self.configuration)
