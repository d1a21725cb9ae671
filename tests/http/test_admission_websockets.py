"""WebSockets hold capacity while the engine works for them, and a key may open a limited number."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from asgi_server import DEADLINE_SECONDS
from holdfast.lifecycle.states import State
from small_server import SmallServer, ask


def websocket(client: httpx.AsyncClient) -> connect:
    """Open a WebSocket to the same server."""
    url = str(client.base_url).replace("http", "ws")
    return connect(f"{url}/v1/realtime", open_timeout=DEADLINE_SECONDS)


def test_a_websocket_over_the_limit_of_its_key_is_closed_with_1013() -> None:
    """The code is 'try again later', and the reason has the number of seconds."""

    async def scene() -> tuple[int, str]:
        server = SmallServer(per_key=1)
        async with server.serving() as client:
            first = ask(client, "key")
            await server.until_there(admitted=1, waiting=0)
            url = str(client.base_url).replace("http", "ws")
            headers = {"x-key": "key"}
            async with connect(f"{url}/v1/realtime", additional_headers=headers) as connection:
                with pytest.raises(ConnectionClosed) as closed:
                    await connection.recv()
            server.release()
            await first
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code, closed.value.rcvd.reason

    assert asyncio.run(scene()) == (1013, "retry after 5 s")


def test_an_open_websocket_holds_no_capacity() -> None:
    """Requests are served however many are open, and a full server accepts another."""

    async def scene() -> int:
        server = SmallServer(waiting=0)
        async with server.serving() as client, websocket(client):
            first = ask(client)
            await server.until(lambda: len(server.at_work) == 1)
            async with websocket(client):
                await server.until_there(admitted=3, waiting=0)
                server.release()
                return (await first).status_code

    assert asyncio.run(scene()) == 200


def test_a_call_of_a_websocket_holds_capacity_while_it_runs() -> None:
    """It waits for the capacity like any request, and returns it to the next one."""

    async def scene() -> list[str | bytes]:
        server = SmallServer(waiting=1)
        async with server.serving() as client, websocket(client) as one:
            first = ask(client)
            await server.until(lambda: len(server.at_work) == 1)
            await one.send("")
            await server.until_there(admitted=2, waiting=1)
            async with websocket(client) as two:
                await two.send("")
                said = [await two.recv()]
            server.release()
            await first
            await server.until(lambda: len(server.at_work) == 2)
            second = ask(client)
            await server.until_there(admitted=2, waiting=1)
            server.release(2)
            said.append(await one.recv())
            await second
            await server.until_there(admitted=1, waiting=0)
            return said

    assert asyncio.run(scene()) == ["OverloadedError", "done"]


def test_a_drain_waits_for_no_websocket_without_a_call() -> None:
    """It could make none any more, and may stay open for hours."""

    async def scene() -> bool:
        server = SmallServer()
        async with server.serving() as client, websocket(client):
            await server.until_there(admitted=1, waiting=0)
            return await server.admission.until_idle(DEADLINE_SECONDS)

    assert asyncio.run(scene())


def test_a_drain_waits_for_the_call_of_a_websocket() -> None:
    """It is served to its end, as a request is."""

    async def scene() -> bool:
        server = SmallServer()
        async with server.serving() as client, websocket(client) as one:
            await one.send("")
            await server.until(lambda: len(server.at_work) == 1)
            drain = asyncio.create_task(server.admission.until_idle(DEADLINE_SECONDS))
            await asyncio.sleep(0)
            is_early = drain.done()
            server.release()
            assert await one.recv() == "done"
            return await drain and not is_early

    assert asyncio.run(scene())


def test_a_drain_waits_for_no_websocket_that_was_held() -> None:
    """Nor for one that was let in only when the engine was back."""

    async def scene() -> bool:
        server = SmallServer()
        server.view.move(State.RECOVERING, is_recovering=True)
        async with server.serving() as client:
            opening = asyncio.ensure_future(websocket(client))
            await server.until_there(admitted=0, waiting=1)
            server.view.move(State.READY)
            async with await opening:
                await server.until_there(admitted=1, waiting=0)
                return await server.admission.until_idle(DEADLINE_SECONDS)

    assert asyncio.run(scene())
