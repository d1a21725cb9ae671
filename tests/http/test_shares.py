"""One key leaves connections to the others, whatever it does with those that it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial

import pytest

from counter_values import counter_values
from holdfast.api.request_log import RequestLog
from holdfast.api.shares import ConnectionShares
from holdfast.settings import LimitSettings
from listening import Answer, Listening, listening
from small_server import SmallServer

CONNECTIONS = 8
DRIP = b"POST /work HTTP/1.1\r\nHost: x\r\nX-Key: a\r\nContent-Length: 9\r\n\r\nx"
WEBSOCKET = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nX-Key: a\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@asynccontextmanager
async def served(keys: int) -> AsyncIterator[tuple[SmallServer, Listening]]:
    """A server with few connections, which answers at once."""
    server = SmallServer(capacity=100, keys=keys, connections=CONNECTIONS)
    server.release(1000)
    limits = LimitSettings(max_connections=CONNECTIONS)
    async with listening(RequestLog(server, is_on=False), limits) as listener:
        yield server, listener


async def asked(listener: Listening, key: str) -> Answer:
    """The answer to a whole request."""
    async with listener.wire() as wire:
        await wire.send(
            b"POST /work HTTP/1.1\r\nHost: x\r\nX-Key: %b\r\nConnection: close\r\n"
            b"Content-Length: 2\r\n\r\n{}" % key.encode()
        )
        return await wire.answer()


@pytest.mark.parametrize(
    ("opening", "refused"), [(DRIP, 429), (WEBSOCKET, 101)], ids=["bodies", "WebSockets"]
)
def test_one_key_leaves_connections_to_another(opening: bytes, refused: int) -> None:
    """It has as many requests in progress as it leaves free; a WebSocket is closed with a code."""

    async def scene() -> None:
        async with served(keys=2) as (server, listener), AsyncExitStack() as stack:
            shares = server.admission.shares
            for number in range(CONNECTIONS):
                wire = await stack.enter_async_context(listener.wire())
                await wire.send(opening)
                if number < CONNECTIONS // 2:
                    await server.until(partial(_has, shares, number + 1))
                else:
                    assert (await wire.answer()).status == refused
            assert (await asked(listener, "b")).status == 200
            assert (await asked(listener, "a")).status == 429
            assert shares.count("a") == CONNECTIONS // 2
            refusals = {"key_concurrency": CONNECTIONS // 2 + 1}
            assert counter_values(server.refusals).items() >= refusals.items()

    asyncio.run(scene())


def test_a_key_that_leaves_frees_its_share() -> None:
    """What is over counts no longer, however it ended."""

    async def scene() -> None:
        async with served(keys=2) as (server, listener):
            shares = server.admission.shares
            async with listener.wire() as wire:
                await wire.send(DRIP)
                await server.until(partial(_has, shares, 1))
            await server.until(partial(_has, shares, 0))

    asyncio.run(scene())


def test_a_single_key_may_use_every_connection() -> None:
    """There is nobody to leave one to."""

    async def scene() -> None:
        async with served(keys=1) as (server, listener), AsyncExitStack() as stack:
            for number in range(CONNECTIONS):
                wire = await stack.enter_async_context(listener.wire())
                await wire.send(DRIP)
                await server.until(partial(_has, server.admission.shares, number + 1))

    asyncio.run(scene())


def test_several_keys_get_equal_shares() -> None:
    """Two leave a third to others, and so on."""
    shares = ConnectionShares(30, lambda: 3)
    with ExitStack() as stack:
        for key in "ab" * 30:
            if shares.has_room(key):
                stack.enter_context(shares.in_progress(key))
        assert (shares.count("a"), shares.count("b")) == (10, 10)
        assert shares.has_room("c")


def _has(shares: ConnectionShares, count: int) -> bool:
    return shares.count("a") == count
