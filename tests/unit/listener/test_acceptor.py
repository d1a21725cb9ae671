"""The door: it stays when this process, or the machine, can open nothing more."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from echo_app import GET, HOUR_SECONDS, App, run_scene
from file_limits import no_more_files
from holdfast.listener import connection_table
from holdfast.settings import LimitSettings
from listening import DEADLINE_SECONDS, LOCAL, Listening, Wire


@asynccontextmanager
async def asking(server: Listening, sock: socket.socket) -> AsyncIterator[Wire]:
    """A request over a socket that was there before."""
    sock.connect(("127.0.0.1", server.port))  # the kernel takes it up, before it is accepted
    reader, writer = await asyncio.open_connection(sock=sock)
    wire = Wire(reader, writer)
    try:
        await wire.send(GET + b"\r\n")
        yield wire
    finally:
        writer.transport.abort()


def test_a_connection_waits_while_no_file_can_be_opened(caplog: pytest.LogCaptureFixture) -> None:
    """And is answered when one can be; one line says what happened."""

    async def scene(server: Listening) -> int:
        with socket.socket() as sock, ExitStack() as scarcity:
            scarcity.enter_context(no_more_files())
            async with asking(server, sock) as wire:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    while not told():  # noqa: ASYNC110 - a logger tells nobody
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.5)  # in which it tries again
                scarcity.close()
                return (await wire.answer()).status

    def told() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        return [line for line in lines if "cannot accept connections" in line]

    assert run_scene(scene) == 200
    assert len(told()) == 1


def test_an_idle_connection_gives_its_file_to_a_new_one() -> None:
    """Health is answered though nothing can be opened."""
    app = App()

    async def scene(server: Listening) -> tuple[int, bytes]:
        async with server.wire() as idle:
            await idle.send(GET + b"\r\n")
            await idle.answer()
            with socket.socket() as sock, no_more_files():
                async with asking(server, sock) as wire:
                    return (await wire.answer()).status, await idle.rest()

    assert run_scene(scene, LimitSettings(keep_alive_timeout_seconds=HOUR_SECONDS), app) == (
        200,
        b"",
    )


def test_a_client_whose_machine_is_gone_is_found_out() -> None:
    """The kernel asks after each that is silent, so that none keeps its place without end."""

    async def scene(server: Listening) -> list[int]:
        async with server.wire() as wire:
            await wire.send(GET + b"\r\n")
            await wire.answer()
            (connection,) = server.server.server_state.connections
            sock = connection.transport.get_extra_info("socket")
            options = (
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                (socket.IPPROTO_TCP, socket.TCP_NODELAY),
            )
            return [sock.getsockopt(*option) for option in options]

    assert run_scene(scene) == [1, 60, 1]


def test_a_unix_socket_has_the_same_limits(tmp_path: Path) -> None:
    """What is silent there makes room too."""
    path = str(tmp_path / "s")

    async def scene(_server: Listening) -> tuple[bytes, int]:
        one, other = await asyncio.open_unix_connection(path)
        reader, writer = await asyncio.open_unix_connection(path)
        wire = Wire(reader, writer)
        await wire.send(GET + b"\r\n")
        status = (await wire.answer()).status
        async with asyncio.timeout(DEADLINE_SECONDS):
            rest = await one.read()
        for each in (other, writer):
            each.transport.abort()
        return rest, status

    limits = LimitSettings(max_connections=1, header_timeout_seconds=HOUR_SECONDS)
    assert run_scene(scene, limits, settings=replace(LOCAL, uds=path)) == (b"", 200)


def test_what_is_over_the_limit_fits_into_what_is_left() -> None:
    """Connections for health leave most of it to the rest."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, limits[1]))
    try:
        assert connection_table.spare_limit(256) == 50
        assert connection_table.spare_limit(10) == 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
