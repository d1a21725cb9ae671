"""A head that listens in a thread of its own, for tests that wait for processes."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from holdfast.nodes.facts import node_facts
from holdfast.nodes.messages import NodeFacts
from node_scenes import DEADLINE_SECONDS, Scene, play

POLL_SECONDS = 0.02
LIFE_SECONDS = 280.0
"""Less than the time for a whole test."""


class ThreadedHead:
    """What a test may do with the head; each call waits until it is done."""

    def __init__(self, loop: asyncio.AbstractEventLoop, scene: Scene) -> None:
        self._loop = loop
        self._scene = scene
        self._has_to_end = asyncio.Event()
        self.port = scene.port

    def until(self, condition: Callable[[Scene], object]) -> None:
        """Wait for a condition."""
        waiting = self._scene.until(lambda: condition(self._scene))
        asyncio.run_coroutine_threadsafe(waiting, self._loop).result(2 * DEADLINE_SECONDS)

    def until_complete(self) -> None:
        """Wait until its follower has joined, and is free."""
        self.until(lambda scene: scene.head.is_complete)

    def keep_running(self, *arguments: str) -> None:
        """Hand out a generation whenever its follower is free: a slow machine may lose one."""
        asyncio.run_coroutine_threadsafe(self._keep_running(arguments), self._loop)

    def do(self, act: Callable[[Scene], None]) -> None:
        """Act on its own loop."""

        async def acting() -> None:
            act(self._scene)

        asyncio.run_coroutine_threadsafe(acting(), self._loop).result(DEADLINE_SECONDS)

    def end(self) -> None:
        """Have it say goodbye and close its port."""
        self._loop.call_soon_threadsafe(self._has_to_end.set)

    async def _keep_running(self, arguments: Sequence[str]) -> None:
        for generation in itertools.count(1):
            while not self._scene.head.is_complete:  # noqa: ASYNC110 - as in `Scene.until`
                await asyncio.sleep(POLL_SECONDS)
            self._scene.start(generation, *arguments)

    async def until_end(self) -> None:
        """Wait on its own loop until it has to end."""
        await self._has_to_end.wait()


@contextmanager
def threaded_head(
    model: Path,
    *,
    facts: NodeFacts | None = None,
    context: ssl.SSLContext | None = None,
    port: int = 0,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Iterator[ThreadedHead]:
    """A head that waits for one follower while entered; by default both have the same facts."""
    began = Future[ThreadedHead]()

    async def scene(scene: Scene) -> None:
        head = ThreadedHead(asyncio.get_running_loop(), scene)
        began.set_result(head)
        await head.until_end()

    def run() -> None:
        play(
            scene,
            model=str(model),
            facts=facts or node_facts(str(model)),
            context=context,
            port=port,
            loop_factory=loop_factory,
            deadline_seconds=LIFE_SECONDS,
        )

    thread = threading.Thread(target=run, name="head")
    thread.start()
    head = began.result(DEADLINE_SECONDS)
    try:
        yield head
    finally:
        head.end()
        thread.join()
