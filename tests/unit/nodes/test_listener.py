"""The head's port for followers, under hostile bytes, strangers and followers that differ."""

from __future__ import annotations

import asyncio
import resource
import ssl
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from file_limits import no_more_files
from holdfast.errors import AddressInUseError
from holdfast.labels import NodeRefusalReason
from holdfast.nodes.actions import NodeJoined, NodeLeft, PeerRefused
from holdfast.nodes.channel import Channel
from holdfast.nodes.frames import LENGTH_BYTES, framed
from holdfast.nodes.head import MAX_STRANGERS, Head
from holdfast.nodes.listener import bound_node_port, listening_for_nodes
from holdfast.nodes.messages import (
    PROTOCOL,
    End,
    Hello,
    Join,
    Rejected,
    decoded_opening,
    encoded,
)
from node_pairs import FACTS, KEY, a_nonce
from node_scenes import DEADLINE_SECONDS, Scene, play
from self_signed import certificate

OTHER_KEY = b"another-key-another-key-another-key"
STRANGERS = 1000


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as this process may have."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def a_frame(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(DEADLINE_SECONDS):
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        return await reader.readexactly(length)


async def joins(scene: Scene) -> bool:
    """Whether a follower with the key gets in now."""
    async with scene.follower():
        await scene.until(lambda: scene.head.followers == ("b",))
    return True


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "oversized"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "oversized"),
        (b"\xff\xff\xff\xff", "oversized"),
        (framed(b""), "malformed"),
        (framed(b"{}"), "malformed"),
        (framed(b"\x80\x04\x95"), "malformed"),
        (framed(b"[" * 500), "malformed"),
        (framed(encoded(Rejected("wrong_key"))), "malformed"),
        (framed(encoded(Join("b", "ab" * 32, FACTS))), "malformed"),
        (framed(encoded(Hello(PROTOCOL + 1, "ab" * 32))), "wrong_protocol"),
    ],
)
def test_what_a_stranger_sends_ends_its_connection(data: bytes, reason: str) -> None:
    """It is counted, and a follower joins all the same."""

    async def scene(scene: Scene) -> tuple[bool, bool]:
        async with scene.raw() as (reader, writer):
            writer.write(data)
            is_closed = await scene.is_closed(reader)
        await scene.until(scene.refusals)
        assert scene.refusals() == [reason]
        return is_closed, await joins(scene)

    assert play(scene) == (True, True)


def test_another_version_of_the_protocol_is_told_so() -> None:
    """So that the operator of the follower reads more than that it ended."""

    async def scene(scene: Scene) -> object:
        async with scene.raw() as (reader, writer):
            writer.write(framed(encoded(Hello(PROTOCOL + 1, "ab" * 32))))
            return decoded_opening(await a_frame(reader))

    assert play(scene) == Rejected("wrong_protocol")


def test_another_key_is_told_so_and_counted() -> None:
    """The follower ends with a remedy."""

    async def scene(scene: Scene) -> tuple[str, list[str]]:
        async with scene.follower(key=OTHER_KEY) as (_, task):
            await scene.until(task.done)
        return str(task.exception()), scene.refusals()

    line, refusals = play(scene)
    assert "--node-key-file" in line
    assert refusals == ["wrong_key"]


def test_a_follower_with_another_model_ends_with_one_line() -> None:
    """Before it has started anything."""
    other = replace(FACTS, model_digest="other")

    async def scene(scene: Scene) -> tuple[str, list[str], int]:
        async with scene.follower(facts=other) as (engine, task):
            await scene.until(task.done)
        return str(task.exception()), scene.refusals(), len(engine.started)

    line, refusals, started = play(scene)
    assert line.startswith("the model differs between the head and node b. Remedy: ")
    assert (refusals, started) == (["different"], 0)


def test_a_peer_that_sends_everything_back_does_not_get_in() -> None:
    """What the head sends is nothing that it accepts."""

    async def scene(scene: Scene) -> list[str]:
        async with scene.raw() as (reader, writer):
            writer.write(framed(encoded(Hello(PROTOCOL, "ab" * 32))))
            writer.write(framed(await a_frame(reader)))
            await scene.is_closed(reader)
        return scene.refusals()

    assert play(scene) == ["malformed"]


def test_a_recorded_connection_does_not_get_in() -> None:
    """Someone who saw all of it has nothing to use."""

    async def scene(scene: Scene) -> tuple[list[str], tuple[str, ...]]:
        recorded: list[bytes] = []

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with scene.raw() as (back, forth):

                async def down() -> None:
                    while data := await back.read(65536):
                        writer.write(data)

                task = asyncio.create_task(down())
                try:
                    while data := await reader.read(65536):
                        recorded.append(data)
                        forth.write(data)
                finally:
                    task.cancel()
                    writer.transport.abort()

        async with await asyncio.start_server(relay, "127.0.0.1", 0) as between:
            port = between.sockets[0].getsockname()[1]
            async with scene.follower(port=port):
                await scene.until(lambda: scene.head.followers == ("b",))
            await scene.until(lambda: scene.head.followers == ())
        async with scene.raw() as (reader, writer):
            for data in recorded:
                writer.write(data)
            await scene.is_closed(reader)
        return scene.refusals(), scene.head.followers

    assert play(scene) == (["wrong_key"], ())


@pytest.mark.parametrize("start", [b"", framed(encoded(Hello(PROTOCOL, "ab" * 32)))[:-1]])
def test_a_stranger_that_is_silent_or_slow_is_dropped(
    monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    """Also within a message."""
    monkeypatch.setattr("holdfast.nodes.channel.HANDSHAKE_SECONDS", 0.2)

    async def scene(scene: Scene) -> list[str]:
        async with scene.raw() as (reader, writer):
            writer.write(start)
            await scene.is_closed(reader)
        return scene.refusals()

    assert play(scene) == ["too_slow"]


@pytest.mark.usefixtures("many_files")
def test_a_thousand_strangers_do_not_keep_a_follower_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of them make room, and few are held at a time."""
    monkeypatch.setattr("holdfast.nodes.channel.HANDSHAKE_SECONDS", 3600.0)

    async def scene(scene: Scene) -> tuple[bool, int]:
        async with AsyncExitStack() as strangers:
            for _ in range(STRANGERS):
                await strangers.enter_async_context(scene.raw())
            has_joined = await joins(scene)
            await scene.until(lambda: len(scene.refusals()) >= STRANGERS - MAX_STRANGERS)
            return has_joined, len(scene.listener._tasks)

    has_joined, held = play(scene)
    assert has_joined
    assert held <= MAX_STRANGERS + 1


def test_connections_are_accepted_again_once_files_can_be_opened() -> None:
    """The port does not close for good."""

    async def scene(scene: Scene) -> bool:
        with no_more_files():
            await asyncio.sleep(0.5)
        return await joins(scene)

    assert play(scene)


def test_a_follower_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it would fill the memory."""
    monkeypatch.setattr("holdfast.nodes.channel.SILENCE_SECONDS", 3600.0)

    async def scene(scene: Scene) -> tuple[str, ...]:
        async with scene.raw() as (reader, writer):
            channel = Channel("follower", KEY, a_nonce(), 0.0)
            while not channel.is_open:
                writer.write(channel.outgoing())
                channel.received(await reader.read(65536), 0.0)
            channel.send(Join("b", "ab" * 32, FACTS))
            writer.write(channel.outgoing())
            await scene.until(lambda: scene.head.followers == ("b",))
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket's transport
            while scene.head.followers:
                (peer,) = scene.head._peers.values()
                peer.channel.send(End(1, "x" * 200_000))
                scene.listener.do(scene.head.tick(time.monotonic()))
                await asyncio.sleep(0)
            return tuple(type(one).__name__ for one in scene.reports)

    assert play(scene) == ("NodeJoined", "NodeLeft")


def contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of the head, with a certificate of its own, and of a follower that knows it."""
    path, key = certificate(directory)
    head = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    head.load_cert_chain(path, key)
    follower = ssl.create_default_context(cafile=path)
    follower.check_hostname = False
    return head, follower


def test_a_follower_joins_over_tls(tmp_path: Path) -> None:
    """If the head has a certificate that the follower knows."""
    head, follower = contexts(tmp_path)

    async def scene(scene: Scene) -> bool:
        async with scene.follower(context=follower):
            await scene.until(lambda: scene.head.followers == ("b",))
        return True

    assert play(scene, context=head)


@pytest.mark.usefixtures("many_files")
def test_strangers_in_the_tls_handshake_make_room_too(tmp_path: Path) -> None:
    """They count before they have finished it."""
    head, follower = contexts(tmp_path)

    async def scene(scene: Scene) -> bool:
        async with AsyncExitStack() as strangers:
            for _ in range(2 * MAX_STRANGERS):
                await strangers.enter_async_context(scene.raw())
            async with scene.follower(context=follower):
                await scene.until(lambda: scene.head.followers == ("b",))
            return len(scene.listener._tasks) <= MAX_STRANGERS + 1

    assert play(scene, context=head)


def test_bytes_that_are_not_tls_end_the_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a follower that was not told to use it; it is counted and told."""
    head, follower = contexts(tmp_path)

    async def scene(scene: Scene) -> list[str]:
        async with scene.raw() as (reader, writer):
            writer.write(framed(encoded(Hello(PROTOCOL, "ab" * 32))))
            await scene.is_closed(reader)
        async with scene.follower(context=follower):
            await scene.until(lambda: scene.head.followers == ("b",))
        return scene.refusals()

    assert play(scene, context=head) == ["malformed"]
    assert "its TLS handshake failed: " in caplog.text


def test_a_follower_that_does_not_know_the_certificate_is_counted(tmp_path: Path) -> None:
    """The head's operator sees the attempt; the follower names the certificate."""
    head, _ = contexts(tmp_path)
    unknowing = ssl.create_default_context()

    async def scene(scene: Scene) -> list[str]:
        async with scene.follower(context=unknowing):
            await scene.until(scene.refusals)
        return scene.refusals()

    assert set(play(scene, context=head)) == {"malformed"}


def test_a_stranger_that_is_silent_before_tls_is_too_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is counted as one without TLS."""
    for module in ("channel", "streams"):
        monkeypatch.setattr(f"holdfast.nodes.{module}.HANDSHAKE_SECONDS", 0.2)
    head, _ = contexts(tmp_path)

    async def scene(scene: Scene) -> list[str]:
        async with scene.raw() as (reader, _):
            await scene.is_closed(reader)
        return scene.refusals()

    assert play(scene, context=head) == ["too_slow"]


def test_many_refusals_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Of each reason; the metric counts them all."""

    async def scene(scene: Scene) -> int:
        for _ in range(5):
            async with scene.raw() as (reader, writer):
                writer.write(framed(b"{}"))
                await scene.is_closed(reader)
        return len(scene.refusals())

    assert play(scene) == 5
    lines = [one for one in caplog.messages if "refused a connection" in one]
    assert len(lines) == 1


@pytest.mark.parametrize(("reason", "lines"), [("not_needed", 1), ("different", 3)])
def test_a_spare_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reason: NodeRefusalReason,
    lines: int,
) -> None:
    """It waits for as long as nothing is wrong; what is wrong is told again and again."""
    monkeypatch.setattr("holdfast.nodes.listener.WARNING_INTERVAL_SECONDS", 0.0)

    async def scene(scene: Scene) -> None:
        for _ in range(3):
            scene.listener.do([PeerRefused(reason, "a line")])
            await asyncio.sleep(0.001)

    play(scene)
    assert caplog.text.count("a line") == lines


def test_a_follower_that_ends_is_reported() -> None:
    """With its name."""

    async def scene(scene: Scene) -> list[object]:
        await joins(scene)
        await scene.until(lambda: len(scene.reports) == 2)
        return list(scene.reports)

    assert play(scene) == [NodeJoined("b"), NodeLeft("b", "it leaves: the test ends")]


def test_a_second_head_on_the_same_port_is_told_so() -> None:
    """Both could bind it, since a port is in use only once a process listens there."""
    with (
        bound_node_port("127.0.0.1", 0, key=KEY, context=None) as first,
        bound_node_port("127.0.0.1", first.sock.getsockname()[1], key=KEY, context=None) as second,
    ):
        first.sock.listen()

        async def listen() -> None:
            head = Head(key=KEY, name="head", model="m", facts=FACTS, nodes=2)
            async with listening_for_nodes(head, second.sock, on_report=lambda _: None):
                pass

        with pytest.raises(AddressInUseError, match="is in use by another process"):
            asyncio.run(listen())
