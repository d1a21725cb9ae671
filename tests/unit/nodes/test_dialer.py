"""A follower over real sockets: it joins, runs what it is told to, and comes back."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from holdfast.errors import UsageError
from holdfast.nodes.actions import (
    GenerationLost,
    GenerationOver,
    NodeJoined,
    NodeLeft,
    RanksChanged,
)
from holdfast.nodes.addresses import HeadAddress
from holdfast.nodes.dialer import Dialer
from holdfast.nodes.follower import Follower
from holdfast.nodes.messages import NodeFacts
from holdfast.nodes.streams import connected_stream
from holdfast.records import Death
from node_pairs import FACTS, KEY
from node_scenes import DEADLINE_SECONDS, Scene, StandInEngine, following, play
from sample_status import a_rank
from threaded_head import ThreadedHead, threaded_head

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
KILLED = Death("worker_exit", "rank 1 was killed")


@asynccontextmanager
async def cuttable(scene: Scene) -> AsyncIterator[tuple[int, list[asyncio.StreamWriter]]]:
    """A port that leads to the head, and the connections to it, which a test may cut."""
    connections: list[asyncio.StreamWriter] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with scene.raw() as (back, forth):
            connections.append(writer)

            async def carry(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    to.write(data)

            down = asyncio.create_task(carry(back, writer))
            try:
                await carry(reader, forth)
            finally:
                down.cancel()
                writer.transport.abort()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as between:
        yield between.sockets[0].getsockname()[1], connections


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop])
def test_a_generation_starts_and_ends_on_the_follower(
    tmp_path: Path, loop_factory: LoopFactory | None
) -> None:
    """And the next one, with a port of its own, also if the head has the loop that `serve` uses."""

    async def follow(head: ThreadedHead) -> tuple[list[int], list[int]]:
        async with following(head.port) as (engine, _, _):

            async def run_generation(generation: int) -> None:
                await asyncio.to_thread(head.until_complete)
                await asyncio.to_thread(head.do, lambda scene: scene.start(generation))
                async with asyncio.timeout(DEADLINE_SECONDS):
                    while len(engine.started) < generation:  # noqa: ASYNC110 - no event tells
                        await asyncio.sleep(0.01)
                await asyncio.to_thread(
                    head.do, lambda scene: scene.listener.do(scene.head.end("a restart"))
                )

            for generation in (1, 2):
                await run_generation(generation)
            await asyncio.to_thread(head.until, lambda scene: GenerationOver(2) in scene.reports)
            return [order.master_port for order in engine.started], engine.stopped

    with threaded_head(tmp_path, facts=FACTS, loop_factory=loop_factory) as head:
        assert asyncio.run(follow(head)) == ([20001, 20002], [1, 2])


class LoopWithNames(asyncio.SelectorEventLoop):
    """An event loop for which every name has the same two addresses."""

    async def getaddrinfo(self, _host: Any, port: Any, **_: Any) -> Any:  # type: ignore[override]
        return [
            (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))
            for address in ("127.0.0.2", "127.0.0.1")
        ]


def test_an_address_that_drops_packets_does_not_use_up_the_time() -> None:
    """As the IPv6 address of a name may; the next one is tried meanwhile."""
    with ExitStack() as opened:
        silent = opened.enter_context(socket.create_server(("127.0.0.2", 0), backlog=0))
        for _ in range(8):  # more than the kernel lets wait, so that it drops the next ones
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        port = silent.getsockname()[1]
        opened.enter_context(socket.create_server(("127.0.0.1", port)))

        async def connect() -> None:
            stream = await connected_stream("head", port, None, 10.0)
            stream.abort()

        with asyncio.Runner(loop_factory=LoopWithNames) as runner:
            runner.run(connect())


def test_a_death_on_the_follower_is_reported_at_once() -> None:
    """With its cause, and the follower is free again."""

    async def scene(scene: Scene) -> list[GenerationLost]:
        async with scene.follower() as (engine, _):
            await scene.until(lambda: scene.head.is_complete)
            scene.start(1)
            await scene.until(lambda: engine.started)
            assert engine.dialer is not None
            engine.dialer.engine_lost(1, KILLED)
            await scene.until(lambda: scene.head.is_complete)
            return [one for one in scene.reports if isinstance(one, GenerationLost)]

    assert play(scene) == [GenerationLost(1, "b", str(KILLED), KILLED)]


def test_a_host_that_ran_out_of_memory_joins_again_when_it_has_enough() -> None:
    """The head waits for the node meanwhile, as for its own host."""
    has_memory = threading.Event()

    async def scene(scene: Scene) -> list[type]:
        async with scene.follower(has_memory=has_memory.is_set) as (engine, _):
            await scene.until(lambda: scene.head.is_complete)
            scene.start(1)
            await scene.until(lambda: engine.started)
            assert engine.dialer is not None
            engine.dialer.engine_lost(1, Death("host_memory", "512 MiB were available"))
            await scene.until(lambda: isinstance(scene.reports[-1], NodeLeft))
            assert not scene.head.is_complete
            has_memory.set()
            await scene.until(lambda: scene.head.is_complete)
            return [type(one) for one in scene.reports]

    assert play(scene) == [NodeJoined, GenerationLost, GenerationOver, NodeLeft, NodeJoined]


def test_the_statistics_of_its_ranks_reach_the_head() -> None:
    """With times of one clock, which both ends share here."""

    async def scene(scene: Scene) -> RanksChanged:
        async with scene.follower() as (engine, _):
            await scene.until(lambda: scene.head.is_complete)
            scene.start(1)
            await scene.until(lambda: engine.started)
            assert engine.dialer is not None
            engine.dialer.ranks_changed(1, [a_rank(rank=1, steps=7)])
            await scene.until(lambda: isinstance(scene.reports[-1], RanksChanged))
            update = scene.reports[-1]
            assert isinstance(update, RanksChanged)
            return update

    update = play(scene)
    assert (update.node, update.ranks[0].steps) == ("b", 7)
    assert update.ranks[0].last_step_ended_seconds == pytest.approx(1000.0, abs=60)


def test_a_follower_that_is_stopped_ends_its_engine_first() -> None:
    """The head hears of both."""

    async def scene(scene: Scene) -> list[int]:
        async with scene.follower() as (engine, task):
            await scene.until(lambda: scene.head.is_complete)
            scene.start(1)
            await scene.until(lambda: engine.started)
        assert task.done()
        await scene.until(lambda: GenerationOver(1) in scene.reports)
        return engine.stopped

    assert play(scene) == [1]


def test_a_lost_connection_ends_the_engine_and_is_made_again() -> None:
    """Through a link that someone cuts."""

    async def scene(scene: Scene) -> tuple[list[int], int]:
        async with cuttable(scene) as (port, connections), scene.follower(port=port) as (engine, _):
            await scene.until(lambda: scene.head.is_complete)
            scene.start(1)
            await scene.until(lambda: engine.started)
            connections[0].transport.abort()
            await scene.until(lambda: engine.stopped)
            await scene.until(lambda: scene.head.is_complete)
            return engine.stopped, len(connections)

    assert play(scene) == ([1], 2)


def test_what_was_found_for_an_earlier_head_is_not_sent_to_the_next() -> None:
    """It may have another model; a slow disk must not make it refuse this node for good."""
    has_changed = threading.Event()
    asked: list[str] = []

    def find_facts(model: str) -> NodeFacts:
        asked.append(model)
        if len(asked) > 1:
            return FACTS
        has_changed.wait(DEADLINE_SECONDS)
        return replace(FACTS, model_digest="of the earlier model")

    async def scene(scene: Scene) -> int:
        engine = StandInEngine()
        machine = Follower(key=KEY, name="b", instance="ab" * 32)
        async with cuttable(scene) as (port, connections):
            address = HeadAddress("127.0.0.1", port)
            engine.dialer = Dialer(machine, address, engine, find_facts=find_facts)
            task = asyncio.create_task(engine.dialer.run())
            await scene.until(lambda: asked)
            connections[0].transport.abort()
            await scene.until(lambda: machine.state == "away")
            await scene.until(lambda: machine.state == "joining" and machine._has_terms)
            has_changed.set()
            await scene.until(lambda: scene.head.is_complete or task.done())
            engine.dialer.leave("the test ends")
            await task
            return len(asked)

    assert play(scene) == 2


def test_a_follower_waits_for_a_head_that_is_not_there_yet() -> None:
    """Both may start in any order."""

    async def scene(scene: Scene) -> bool:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            free = sock.getsockname()[1]
        async with scene.follower(port=free) as (_, task):
            engine = StandInEngine()
            machine = Follower(key=KEY, name="c", instance="ab" * 32)
            address = HeadAddress("127.0.0.1", free)
            engine.dialer = Dialer(machine, address, engine, find_facts=lambda _: FACTS)
            other = asyncio.create_task(engine.dialer.run())
            await scene.until(lambda: "cannot connect to the head" in machine.last_problem)
            is_waiting = not task.done() and not other.done()
            engine.dialer.leave("the test ends")
            await other
        return is_waiting

    assert play(scene)


def test_a_name_that_no_head_can_have_is_a_problem_that_is_told() -> None:
    """Python refuses to encode it, with an error that is none of sockets."""

    async def scene(scene: Scene) -> str:
        engine = StandInEngine()
        machine = Follower(key=KEY, name="c", instance="ab" * 32)
        address = HeadAddress("a" * 64 + ".invalid", 1)
        engine.dialer = Dialer(machine, address, engine, find_facts=lambda _: FACTS)
        task = asyncio.create_task(engine.dialer.run())
        await scene.until(lambda: machine.last_problem or task.done())
        engine.dialer.leave("the test ends")
        await task
        return machine.last_problem

    assert "cannot connect to the head" in play(scene)


def test_a_model_that_is_missing_here_ends_the_follower() -> None:
    """With the line that says so."""

    def no_model(name: str) -> NodeFacts:
        raise UsageError(f"there is no {name}")

    async def scene(scene: Scene) -> str:
        engine = StandInEngine()
        machine = Follower(key=KEY, name="b", instance="ab" * 32)
        address = HeadAddress("127.0.0.1", scene.port)
        dialer = Dialer(machine, address, engine, find_facts=no_model)
        with pytest.raises(UsageError) as error:
            await dialer.run()
        return str(error.value)

    assert play(scene) == "there is no m"


def test_an_address_is_shown_as_it_is_written() -> None:
    """That of IPv6 in brackets."""
    assert str(HeadAddress("10.0.0.1", 29600)) == "10.0.0.1:29600"
    assert str(HeadAddress("fe80::1", 29600)) == "[fe80::1]:29600"
