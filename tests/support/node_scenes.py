"""A head and followers over real sockets of this machine, with engines that only remember."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.nodes.actions import HeadReport, PeerRefused
from holdfast.nodes.addresses import HeadAddress
from holdfast.nodes.dialer import Dialer
from holdfast.nodes.follower import Follower
from holdfast.nodes.head import Head
from holdfast.nodes.listener import NodeListener, listening_for_nodes
from holdfast.nodes.messages import NodeFacts, Start
from node_pairs import FACTS, KEY, SPEC, a_nonce

DEADLINE_SECONDS = 60.0
Result = TypeVar("Result")


class StandInEngine:
    """Starts at once, and ends at once when it is told to."""

    def __init__(self) -> None:
        self.started: list[Start] = []
        self.stopped: list[int] = []
        self.dialer: Dialer | None = None

    def start(self, order: Start) -> None:
        self.started.append(order)

    def stop(self, generation: int, reason: str) -> None:
        assert reason
        self.stopped.append(generation)
        loop = asyncio.get_running_loop()
        assert self.dialer is not None
        loop.call_soon(self.dialer.engine_ended, generation)


@dataclass
class Scene:
    """A head that listens, and what it has reported."""

    head: Head
    listener: NodeListener
    port: int
    reports: list[HeadReport] = field(default_factory=list)

    def refusals(self) -> list[str]:
        """The reasons of all refusals."""
        return [one.reason for one in self.reports if isinstance(one, PeerRefused)]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():  # noqa: ASYNC110 - no event tells of every condition
                await asyncio.sleep(0.01)

    def start(self, generation: int, *arguments: str) -> None:
        """Hand out a generation."""
        self.listener.do(
            self.head.start(
                generation=generation,
                master_address="127.0.0.1",
                master_port=20000 + generation,
                arguments=arguments,
                fingerprint="f",
                spec=SPEC,
            )
        )

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection of someone who does as the test likes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def is_closed(self, reader: asyncio.StreamReader) -> bool:
        """Whether the head closes this connection."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            try:
                while await reader.read(65536):
                    pass
            except OSError:
                return True
            return True

    @asynccontextmanager
    async def follower(
        self,
        name: str = "b",
        *,
        key: bytes = KEY,
        facts: NodeFacts = FACTS,
        port: int | None = None,
        has_memory: Callable[[], bool] = lambda: True,
        context: ssl.SSLContext | None = None,
    ) -> AsyncIterator[tuple[StandInEngine, asyncio.Task[None]]]:
        """A follower that runs while entered."""
        async with following(
            port or self.port, name, key=key, facts=facts, has_memory=has_memory, context=context
        ) as (engine, task, _):
            yield engine, task


@asynccontextmanager
async def following(
    port: int,
    name: str = "b",
    *,
    key: bytes = KEY,
    facts: NodeFacts = FACTS,
    has_memory: Callable[[], bool] = lambda: True,
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[StandInEngine, asyncio.Task[None], Dialer]]:
    """A follower of the head at that port, which runs while entered."""
    engine = StandInEngine()
    machine = Follower(key=key, name=name, instance=a_nonce().hex())
    address = HeadAddress("127.0.0.1", port)
    dialer = Dialer(
        machine,
        address,
        engine,
        find_facts=lambda _: facts,
        has_memory=has_memory,
        context=context,
    )
    engine.dialer = dialer
    task = asyncio.create_task(dialer.run())
    try:
        yield engine, task, dialer
    finally:
        dialer.leave("the test ends")
        async with asyncio.timeout(DEADLINE_SECONDS):
            await asyncio.wait({task})


def play(
    scene: Callable[[Scene], Awaitable[Result]],
    *,
    nodes: int = 2,
    model: str = "m",
    facts: NodeFacts = FACTS,
    context: ssl.SSLContext | None = None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    port: int = 0,
    deadline_seconds: float = 2 * DEADLINE_SECONDS,
) -> Result:
    """Run a scene with a head that waits for followers, within a deadline."""

    async def run() -> Result:
        head = Head(key=KEY, name="head", model=model, facts=facts, nodes=nodes)
        reports: list[HeadReport] = []
        with socket.create_server(("127.0.0.1", port)) as sock:
            async with (
                asyncio.timeout(deadline_seconds),
                listening_for_nodes(
                    head, sock, on_report=reports.append, context=context
                ) as listener,
            ):
                return await scene(Scene(head, listener, sock.getsockname()[1], reports))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(run())
