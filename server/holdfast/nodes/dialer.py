"""The follower's connection to the head: sockets, deadlines and engine around the `Follower`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from holdfast.errors import HoldfastError, UsageError
from holdfast.nodes.actions import (
    Disconnect,
    FindFacts,
    FollowerAction,
    GiveUp,
    Send,
    StartEngine,
    StopEngine,
)
from holdfast.nodes.addresses import HeadAddress
from holdfast.nodes.follower import Follower
from holdfast.nodes.messages import NONCE_BYTES, NodeFacts, Start
from holdfast.nodes.streams import ByteStream, connected_stream, ended
from holdfast.records import Death, RankStats

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
"""Less than the least time between two updates of the statistics."""
CONNECT_SECONDS = 5.0


class NodeEngine(Protocol):
    """Runs the ranks of this node. Neither method blocks."""

    def start(self, order: Start) -> None:
        """Start the processes of a generation."""

    def stop(self, generation: int, reason: str) -> None:
        """End every process of the generation, and report that with `Dialer.engine_ended`."""


class Dialer:
    """Carries out the actions of a `Follower`. It belongs to one event loop."""

    def __init__(  # noqa: PLR0913 - what a follower has beside its connection
        self,
        follower: Follower,
        head: HeadAddress,
        engine: NodeEngine,
        *,
        find_facts: Callable[[str], NodeFacts],
        has_memory: Callable[[], bool] = lambda: True,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`find_facts` gets the model's name or path; it runs in a thread.

        `has_memory` says whether the host has enough for the ranks of an engine.
        """
        self._follower = follower
        self._head = head
        self._engine = engine
        self._find_facts = find_facts
        self._has_memory = has_memory
        self._context = context
        self._stream: ByteStream | None = None
        self._connection: asyncio.Task[None] | None = None
        self._facts: asyncio.Task[None] | None = None
        # The end of the loop would wait for its own threads, even on a file system that hangs.
        self._fact_finder = ThreadPoolExecutor(1, thread_name_prefix="node facts")
        self._error: UsageError | None = None
        self._told_problem = ""

    async def run(self) -> None:
        """Connect again and again until `leave`, and until the engine has ended after it.

        Raises:
            UsageError: the head refuses this node, and trying again would not help.
        """
        try:
            while self._follower.state != "left" and self._error is None:
                self._do(self._follower.tick(time.monotonic()))
                if self._has_memory():
                    self._follower.memory_is_ample()
                is_free = self._connection is None or self._connection.done()
                if is_free and self._follower.wants_connection(time.monotonic()):
                    self._connection = asyncio.create_task(self._connect(), name="head")
                await asyncio.sleep(TICK_SECONDS)
        finally:
            for task in (self._facts, self._connection):
                if task is not None:
                    await ended(task)
        if self._error is not None:
            raise self._error

    def leave_after_engine(self, reason: str) -> None:
        """Have `run` return once the head has ended the engine; at once if there is none."""
        self._do(self._follower.leave_after_engine(reason, time.monotonic()))

    def leave(self, reason: str) -> None:
        """End the engine, tell the head, and have `run` return."""
        self._do(self._follower.leave(reason, time.monotonic()))

    def engine_lost(self, generation: int, death: Death) -> None:
        """Report that the engine cannot go on."""
        self._do(self._follower.engine_lost(generation, death, time.monotonic()))

    def engine_refused(self, generation: int, line: str, *, is_final: bool) -> None:
        """Report that this node cannot run what it was handed out, for the reason in `line`."""
        now = time.monotonic()
        self._do(self._follower.engine_refused(generation, line, now, is_final=is_final))

    def engine_ended(self, generation: int) -> None:
        """Report that no process of the engine is left."""
        self._do(self._follower.engine_ended(generation, time.monotonic()))

    def ranks_changed(
        self, generation: int, ranks: Iterable[RankStats], *, is_compiling: bool = False
    ) -> None:
        """Report the statistics of all ranks here, and whether one waits for a compiler."""
        now = time.monotonic()
        self._do(self._follower.ranks_changed(generation, ranks, now, is_compiling=is_compiling))

    async def _connect(self) -> None:
        """Connect once, and read until the connection has ended."""
        try:
            stream = await connected_stream(
                self._head.host, self._head.port, self._context, CONNECT_SECONDS
            )
        # ssl.SSLError and TimeoutError are OSErrors; UnicodeError is for names that no DNS has.
        except (OSError, UnicodeError) as error:
            problem = f"cannot connect to the head at {self._head}: {str(error) or 'no answer'}"
            self._do(self._follower.not_connected(problem, time.monotonic()))
            return
        self._stream = stream
        try:
            nonce = secrets.token_bytes(NONCE_BYTES)
            self._do(self._follower.connected(nonce, time.monotonic()))
            while self._stream is stream and (data := await stream.read()):
                self._do(self._follower.received(data, time.monotonic()))
        finally:
            if self._stream is stream:
                self._stream = None
                stream.abort()
                self._do(self._follower.disconnected(time.monotonic()))

    def _do(self, actions: Iterable[FollowerAction]) -> None:
        for action in actions:
            match action:
                case Send(data):
                    if self._stream is not None:
                        self._stream.write(data)
                case Disconnect():
                    self._disconnect()
                case FindFacts(model):
                    if self._facts is not None:  # for the head of a connection that has ended
                        self._facts.cancel()
                    self._facts = asyncio.create_task(self._report_facts(model), name="node facts")
                case StartEngine(order):
                    logger.info("starting generation %d of the head", order.generation)
                    self._engine.start(order)
                case StopEngine(generation, reason):
                    logger.warning("ending generation %d: %s", generation, reason)
                    self._engine.stop(generation, reason)
                case GiveUp(line):
                    self._error = UsageError(line)
        self._tell_problem()

    def _disconnect(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    async def _report_facts(self, model: str) -> None:
        try:
            facts = await asyncio.get_running_loop().run_in_executor(
                self._fact_finder, self._find_facts, model
            )
        except HoldfastError as error:
            self._do(self._follower.facts_missing(error.line, time.monotonic()))
            return
        self._do(self._follower.facts_found(facts, time.monotonic()))

    def _tell_problem(self) -> None:
        """Log each problem once: the next attempts usually meet the same."""
        problem = self._follower.last_problem
        if self._follower.state == "waiting":
            self._told_problem = self._follower.last_problem = ""
        elif problem != self._told_problem:
            self._told_problem = problem
            logger.warning("%s; trying again", problem)
