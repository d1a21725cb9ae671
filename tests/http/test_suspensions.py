"""What a suspended key has under way goes no further: uploads, waiting requests and WebSockets."""

from __future__ import annotations

import asyncio

from websockets.asyncio.client import connect

from asgi_server import DEADLINE_SECONDS
from counter_values import counter_values
from listening import Wire
from small_server import SmallServer, ask

SUSPENDED = {"key": 1234.5}


def refused(server: SmallServer) -> int:
    """How many requests were refused because their key was suspended."""
    return int(counter_values(server.refusals)["key_suspended"])


def test_a_waiting_request_is_refused_once_its_key_is_suspended() -> None:
    """Only those of that key, and each is told how long the key has to wait."""

    async def scene() -> list[int]:
        server = SmallServer()
        async with server.serving() as client:
            first = ask(client, "key")
            await server.until_there(admitted=1, waiting=0)
            waiting = []
            for number, key in enumerate(("key", "key", "other"), 1):
                waiting.append(ask(client, key))
                await server.until_there(admitted=1, waiting=number)
            server.suspended.update(SUSPENDED)
            server.release(2)
            answers = await asyncio.gather(first, *waiting)
        assert server.served == ["key", "other"]
        assert answers[1].headers["retry-after"] == "1235"
        assert answers[1].headers["x-should-retry"] == "false"
        assert refused(server) == 2
        return [answer.status_code for answer in answers]

    assert asyncio.run(scene()) == [200, 429, 429, 200]


def test_an_upload_is_refused_that_ends_after_its_key_was_suspended() -> None:
    """Its last byte may be held back for as long as the client likes."""

    async def scene() -> int:
        server = SmallServer()
        async with server.serving() as client:
            url = client.base_url
            wire = Wire(*await asyncio.open_connection(url.host, url.port))
            await wire.send(b"POST /work HTTP/1.1\r\nHost: x\r\nX-Key: key\r\n")
            await wire.send(b"Content-Length: 2\r\n\r\n1")
            # Answered by the same event loop, so the upload has reached the gate by then.
            assert (await client.get("/work")).status_code == 200
            server.suspended.update(SUSPENDED)
            await wire.send(b"2")
            answer = await wire.answer()
            wire.writer.transport.abort()
        assert server.at_work == []
        return answer.status

    assert asyncio.run(scene()) == 429


def test_a_request_that_lent_its_capacity_does_not_get_it_back() -> None:
    """A grammar is compiled, or an image fetched, while the key is suspended."""

    async def scene() -> str:
        server = SmallServer()
        server.is_elsewhere = True
        async with server.serving() as client:
            asking = ask(client, "key")
            await server.until(lambda: server.has_gone_elsewhere)
            server.suspended.update(SUSPENDED)
            server.elsewhere.set()
            return (await asking).text

    assert asyncio.run(scene()) == "KeySuspendedError"


def test_an_open_websocket_makes_no_call_once_its_key_is_suspended() -> None:
    """It was opened before; each call is a request of its own."""

    async def scene() -> list[str | bytes]:
        server = SmallServer()
        async with server.serving() as client:
            url = f"{str(client.base_url).replace('http', 'ws')}/v1/realtime"
            opening = connect(
                url, open_timeout=DEADLINE_SECONDS, additional_headers={"x-key": "key"}
            )
            async with opening as websocket:
                server.release()
                await websocket.send("")
                said = [await websocket.recv()]
                server.suspended.update(SUSPENDED)
                await websocket.send("")
                said.append(await websocket.recv())
        assert refused(server) == 1
        return said

    assert asyncio.run(scene()) == ["done", "KeySuspendedError"]
