"""Our own listener on a free port, in the event loop of the test, and raw connections to it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from counter_values import counter_values
from holdfast.listener import server as listener
from holdfast.settings import LimitSettings, ListenSettings
from holdfast.telemetry.counters import Refusals

DEADLINE_SECONDS = 60
LOCAL = ListenSettings(host="127.0.0.1", port=0, uvicorn_log_level="critical")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error, as OpenAI's clients read it."""
        return dict(json.loads(self.body)["error"])


async def until_set(event: asyncio.Event) -> None:
    """Wait for an event."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        await event.wait()


class Wire:
    """A connection on which the test writes every byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *parts: bytes) -> None:
        """Send each part in a packet of its own, as far as the kernel does so."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def answer(self, *, has_body: bool = True) -> Answer:
        """The next answer; that to HEAD has no body."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            pairs = (line.partition(": ") for line in head[1:] if line)
            headers = {name: value for name, _, value in pairs}
            size_bytes = int(headers.get("content-length", "0")) if has_body else 0
            body = await self.reader.readexactly(size_bytes)
        return Answer(int(head[0].split()[1]), headers, body)

    async def rest(self) -> bytes:
        """What still comes until the server closes."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""


@dataclass(frozen=True, slots=True)
class Listening:
    """A listener, and what it has refused."""

    port: int
    refusals: Refusals
    server: Any

    @property
    def refused(self) -> dict[str, int]:
        """The reasons that turned something away."""
        return {reason: count for reason, count in counter_values(self.refusals).items() if count}

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self.server.server_state.connections)

    @asynccontextmanager
    async def wire(self) -> AsyncIterator[Wire]:
        """A connection to it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Wire(reader, writer)
        finally:
            writer.transport.abort()

    async def until_refused(self, reason: str) -> None:
        """Wait for the first refusal with this reason."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while reason not in self.refused:  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0.01)

    async def until_connections(self, count: int) -> None:
        """Wait until this many connections are open."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while self.connections != count:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(
    app: ASGIApp,
    limits: LimitSettings,
    refusals: Refusals | None = None,
    settings: ListenSettings = LOCAL,
    own: socket.socket | None = None,
) -> AsyncIterator[Listening]:
    """While entered, `app` is served behind our own connections."""
    refusals = refusals or Refusals()
    with listener.bound_socket(settings) as sock:
        port = 0 if settings.uds else _port(sock)
        async with listener.listening(
            app, sock, settings, limits=limits, refusals=refusals, own=own
        ) as server:
            yield Listening(port, refusals, server)


def _port(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])
