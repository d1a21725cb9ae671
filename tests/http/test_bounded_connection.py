"""Answers that nobody reads, and connections that are done: no descriptor outlives its time."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from echo_app import GET, HOUR_SECONDS, KIB, POST, UNREACHED_SECONDS, App, run_scene
from holdfast.settings import LimitSettings, ListenSettings
from listening import DEADLINE_SECONDS, Listening, listening
from self_signed import certificate

LARGE = GET.replace(b"/v1/echo", b"/v1/large?bytes=16384") + b"\r\n"
IMPATIENT = LimitSettings(send_timeout_seconds=1.0, keep_alive_timeout_seconds=HOUR_SECONDS)
ALONE = LimitSettings(
    max_connections=1, send_timeout_seconds=HOUR_SECONDS, keep_alive_timeout_seconds=HOUR_SECONDS
)


class Deaf:
    """A client that reads nothing; with TLS it says what `outgoing` holds."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        self.sock = sock
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing) if context else None

    async def shake_hands(self) -> None:
        """The handshake of TLS."""
        while self.tls is not None:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                loop = asyncio.get_running_loop()
                self.incoming.write(await loop.sock_recv(self.sock, 64 * KIB))
            else:
                break
        await self._flush()

    async def send(self, content: bytes) -> None:
        """Send it, as far as it is read."""
        if self.tls is None:
            await asyncio.get_running_loop().sock_sendall(self.sock, content)
        else:
            self.tls.write(content)
            await self._flush()

    async def say_goodbye(self) -> None:
        """End TLS; what the other side still says of it is not read."""
        assert self.tls is not None
        with pytest.raises(ssl.SSLWantReadError):
            self.tls.unwrap()
        await self._flush()

    async def _flush(self) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, self.outgoing.read())


@asynccontextmanager
async def deaf(server: Listening, context: ssl.SSLContext | None = None) -> AsyncIterator[Deaf]:
    """Return a client with a small receive buffer."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
        client = Deaf(sock, context)
        await client.shake_hands()
        yield client


def sockets_of(server: Listening) -> int:
    """How many descriptors the server has for its clients."""
    return sum(
        1
        for found in psutil.Process().net_connections("tcp4")
        if found.laddr.port == server.port and found.status != psutil.CONN_LISTEN
    )


async def until_sockets(server: Listening, count: int) -> None:
    """Wait until the server has this many descriptors for its clients."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while sockets_of(server) != count:  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.05)


async def leave_unread(server: Listening, client: Deaf) -> None:
    """Have answers given until the end of one stays with the server."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not server.server.server_state.connections:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
        (connection,) = server.server.server_state.connections
        while True:
            answered = server.server.server_state.total_requests
            await client.send(LARGE)
            while server.server.server_state.total_requests == answered:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if connection.transport.get_write_buffer_size():
                return


def test_an_answer_that_is_complete_has_to_be_read() -> None:
    """Or the connection is cut off, though it may be kept alive for longer."""

    async def scene(server: Listening) -> dict[str, int]:
        async with deaf(server) as client:
            await leave_unread(server, client)
            await until_sockets(server, 0)
            return server.refused

    assert run_scene(scene, IMPATIENT) == {"slow_reader": 1}


@pytest.mark.parametrize("how", ["asked", "half closed"])
def test_a_close_does_not_wait_for_a_client_that_does_not_read(how: str) -> None:
    """Whether the last request asked for it, or the client sends no more."""

    async def scene(server: Listening) -> dict[str, int]:
        async with deaf(server) as client:
            await leave_unread(server, client)
            if how == "asked":
                await client.send(LARGE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            else:
                client.sock.shutdown(socket.SHUT_WR)
            await until_sockets(server, 0)
            return server.refused

    assert run_scene(scene, IMPATIENT) == {"slow_reader": 1}


async def status_of_the_next(server: Listening) -> int:
    """What the next client is answered, once its socket is the only one."""
    async with server.wire() as wire:
        await wire.send(GET + b"\r\n")
        status = (await wire.answer()).status
        await until_sockets(server, 1)
        return status


def test_a_client_that_does_not_read_makes_room() -> None:
    """And its descriptor is free."""

    async def scene(server: Listening) -> int:
        async with deaf(server) as client:
            await leave_unread(server, client)
            return await status_of_the_next(server)

    assert run_scene(scene, ALONE) == 200


def test_a_closed_connection_that_is_not_read_makes_room() -> None:
    """A close that waits counts as a connection."""

    async def scene(server: Listening) -> int:
        async with deaf(server) as client:
            await leave_unread(server, client)
            client.sock.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.1)
            return await status_of_the_next(server)

    assert run_scene(scene, ALONE) == 200


def test_a_stop_does_not_wait_for_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The listener ends while such a client is still connected."""
    monkeypatch.setattr("holdfast.listener.server.STOP_DEADLINE_SECONDS", 0.3)

    async def stop() -> int:
        async with AsyncExitStack() as clients, asyncio.timeout(DEADLINE_SECONDS):
            async with listening(App(), ALONE) as server:
                client = await clients.enter_async_context(deaf(server))
                await leave_unread(server, client)
            return sockets_of(server)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(stop()) == 1


def test_a_client_that_reads_the_last_answer_slowly_gets_all_of_it() -> None:
    """A close goes on for as long as the client reads."""
    size = 20_000_000

    async def scene(server: Listening) -> tuple[int, dict[str, int]]:
        async with server.wire() as wire:
            target = b"/v1/large?bytes=%d" % size
            await wire.send(b"GET " + target + b" HTTP/1.1\r\nConnection: close\r\n\r\n")
            got = 0
            while part := await wire.reader.read(100 * KIB):
                got += len(part)
                await asyncio.sleep(0.02)
            return got, server.refused

    got, refused = run_scene(scene, LimitSettings(send_timeout_seconds=UNREACHED_SECONDS))
    assert got > size
    assert refused == {}


def test_an_empty_line_does_not_end_the_time_between_requests() -> None:
    """No request has begun with it."""

    async def scene(server: Listening) -> tuple[bytes, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(GET + b"\r\n")
            await wire.answer()
            await wire.send(b"\r\n")
            return await wire.rest(), server.refused

    assert run_scene(scene, LimitSettings(keep_alive_timeout_seconds=0.3)) == (b"", {})


def test_a_body_that_ends_after_its_answer_begins_the_time_between_requests() -> None:
    """As the answer of a request that was whole does."""

    async def scene(server: Listening) -> tuple[bytes, bytes, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(POST.replace(b"echo", b"deaf") + b"Content-Length: 9\r\n\r\nhalf")
            answer = await wire.answer()
            await wire.send(b"other")
            return answer.body, await wire.rest(), server.refused

    limits = LimitSettings(keep_alive_timeout_seconds=0.3)
    assert run_scene(scene, limits) == (b"deaf", b"", {})


def test_a_body_that_goes_on_after_its_answer_makes_room() -> None:
    """Nobody waits for it."""

    async def scene(server: Listening) -> int:
        async with server.wire() as one:
            await one.send(POST.replace(b"echo", b"deaf") + b"Content-Length: 9\r\n\r\nhalf")
            await one.answer()
            async with server.wire() as two:
                await two.send(GET + b"\r\n")
                return (await two.answer()).status

    assert run_scene(scene, ALONE) == 200


def test_so_many_requests_may_wait_in_one_connection() -> None:
    """Each takes kilobytes; the one under way has its answer, and the connection is closed."""
    app = App()

    async def scene(server: Listening) -> tuple[bytes, bytes, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(GET.replace(b"echo", b"held") + b"\r\n" + (GET + b"\r\n") * 2000)
            await server.until_refused("malformed")
            app.released.set()
            return (await wire.answer()).body, await wire.rest(), server.refused

    assert run_scene(scene, app=app) == (b"held", b"", {"malformed": 1})


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ListenSettings, ssl.SSLContext]:
    """A listener with TLS, and clients that trust everybody."""
    cert, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    settings: dict[str, Any] = {"ssl_certfile": cert, "ssl_keyfile": key}
    listen = ListenSettings(host="127.0.0.1", port=0, uvicorn_log_level="critical", **settings)
    return listen, context


def test_a_handshake_has_the_time_of_headers(tls: tuple[ListenSettings, ssl.SSLContext]) -> None:
    """A client that says nothing is closed."""

    async def scene(server: Listening) -> tuple[bytes, dict[str, int]]:
        async with server.wire() as wire:
            return await wire.rest(), server.refused

    limits = LimitSettings(header_timeout_seconds=0.3)
    assert run_scene(scene, limits, settings=tls[0]) == (b"", {"idle_connection": 1})


def test_a_handshake_is_a_connection(tls: tuple[ListenSettings, ssl.SSLContext]) -> None:
    """It counts, and makes room for the next."""

    async def scene(server: Listening) -> int:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(50)]
        await until_sockets(server, 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=tls[1])
        writer.write(GET + b"\r\n")
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        await until_sockets(server, 1)
        for _, other in [*silent, (reader, writer)]:
            other.transport.abort()
        return status

    limits = LimitSettings(max_connections=1, header_timeout_seconds=HOUR_SECONDS)
    assert run_scene(scene, limits, settings=tls[0]) == 200


@pytest.mark.parametrize("how", ["asked", "said goodbye", "half closed", "silent"])
def test_a_close_of_tls_does_not_wait_for_a_client_that_does_not_read(
    tls: tuple[ListenSettings, ssl.SSLContext], how: str
) -> None:
    """Nor for a goodbye that never comes."""

    async def scene(server: Listening) -> None:
        async with deaf(server, tls[1]) as client:
            await leave_unread(server, client)
            if how == "asked":
                await client.send(LARGE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            elif how == "said goodbye":
                await client.say_goodbye()
            elif how == "half closed":
                client.sock.shutdown(socket.SHUT_WR)
            await until_sockets(server, 0)

    run_scene(scene, IMPATIENT, settings=tls[0])


def test_a_goodbye_of_tls_is_not_waited_for(tls: tuple[ListenSettings, ssl.SSLContext]) -> None:
    """Everything was read, and the client does not close."""

    async def scene(server: Listening) -> dict[str, int]:
        async with deaf(server, tls[1]) as client:
            await client.send(GET.replace(b"echo", b"deaf") + b"Connection: close\r\n\r\n")
            await until_sockets(server, 0)
            return server.refused

    assert run_scene(scene, IMPATIENT, settings=tls[0]) == {}
