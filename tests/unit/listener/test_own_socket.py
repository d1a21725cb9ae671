"""Our own client reaches our own listener whatever others do, and nobody else comes that way."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo_app import GET, App, run_scene
from holdfast.listener.own_socket import own_client, own_socket
from holdfast.settings import LimitSettings, ListenSettings
from listening import DEADLINE_SECONDS, LOCAL, Listening, until_set
from self_signed import certificate

ALONE = LimitSettings(max_connections=1)
ECHO = "/v1/echo"
REQUEST = GET + b"connection: close\r\n\r\n"
OTHER_PROCESS = f"""
import socket, sys
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect("\\0" + sys.argv[1])
    try:
        sock.sendall({REQUEST!r})
        print(len(sock.recv(1000)))
    except ConnectionError:
        print(0)
"""


Scene = Callable[[Listening, socket.socket, App], Coroutine[Any, Any, Any]]


def played(scene: Scene, limits: LimitSettings = ALONE, settings: ListenSettings = LOCAL) -> Any:
    """What `scene` returns while an application listens."""
    app = App()
    with own_socket() as own:
        return run_scene(lambda server: scene(server, own, app), limits, app, settings, own)


@pytest.mark.parametrize("is_tls", [False, True])
def test_our_own_client_needs_neither_the_address_nor_tls(tmp_path: Path, is_tls: bool) -> None:
    """Nor a certificate, whatever clients must show."""
    cert, key = certificate(tmp_path)
    settings = replace(LOCAL, ssl_certfile=cert, ssl_keyfile=key) if is_tls else LOCAL

    async def ask(_server: Listening, own: socket.socket, app: App) -> str:
        async with own_client(own, {}) as client:
            assert (await client.get(ECHO)).status_code == 200
            return app.scheme

    assert played(ask, settings=settings) == "http"


def test_it_uses_no_connection_twice() -> None:
    """The listener might close it at the moment of the next request."""
    limits = LimitSettings(keep_alive_timeout_seconds=10 * DEADLINE_SECONDS)

    async def ask(server: Listening, own: socket.socket, _app: App) -> None:
        async with own_client(own, {}) as client:
            for _ in range(2):
                assert (await client.get(ECHO)).status_code == 200
                await server.until_connections(0)

    played(ask, limits)


def test_it_is_answered_while_every_connection_is_busy() -> None:
    """An engine that replaces another is proven while clients wait on every connection."""

    async def ask(server: Listening, own: socket.socket, app: App) -> int:
        async with server.wire() as busy, own_client(own, {}) as client:
            await busy.send(GET.replace(b"echo", b"held") + b"\r\n")
            await until_set(app.entered)
            status = (await client.get(ECHO)).status_code
            app.released.set()
            assert (await busy.answer()).status == 200
            return status

    assert played(ask) == 200


def test_no_client_evicts_its_connections() -> None:
    """Also before it has sent anything, when the connections of clients make room for others."""

    async def ask(server: Listening, own: socket.socket, _app: App) -> bytes:
        silent = socket.socket(socket.AF_UNIX)
        silent.connect(own.getsockname())
        reader, writer = await asyncio.open_unix_connection(sock=silent)
        await server.until_connections(1)
        async with server.wire() as evicted, server.wire() as client:
            assert await evicted.rest() == b""
            await client.send(REQUEST)
            assert (await client.answer()).status == 200
        writer.write(REQUEST)
        answer = await asyncio.wait_for(reader.read(), DEADLINE_SECONDS)
        writer.close()
        return answer

    assert played(ask).startswith(b"HTTP/1.1 200")


def test_no_other_process_is_served() -> None:
    """It would need neither the certificate nor the free connection that clients need."""

    async def ask(_server: Listening, own: socket.socket, _app: App) -> str:
        name = own.getsockname()[1:].decode()
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", OTHER_PROCESS, name, stdout=subprocess.PIPE
        )
        printed, _ = await asyncio.wait_for(other.communicate(), DEADLINE_SECONDS)
        return printed.decode().strip()

    assert played(ask) == "0"
