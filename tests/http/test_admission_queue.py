"""What waits for capacity, is served later, or is refused."""

from __future__ import annotations

import asyncio

import httpx

from asgi_server import DEADLINE_SECONDS
from counter_values import counter_values
from holdfast.lifecycle.states import State
from small_server import SmallServer, ask


def test_a_full_queue_is_429() -> None:
    """The refusal comes at once, in OpenAI's form, and is counted."""

    async def scene() -> httpx.Response:
        server = SmallServer(waiting=1)
        async with server.serving() as client:
            asking = [ask(client), ask(client)]
            await server.until_there(admitted=1, waiting=1)
            refused = await ask(client)
            assert counter_values(server.refusals)["overloaded"] == 1
            server.release(2)
            assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
        return refused

    refused = asyncio.run(scene())
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "5"
    assert refused.headers["x-should-retry"] == "true"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", 429)


def test_it_is_known_which_requests_wait() -> None:
    """Until they are admitted; no longer is their record kept for that."""

    async def scene() -> list[list[str]]:
        server = SmallServer(waiting=1)
        seen = []
        async with server.serving() as client:
            asking = [ask(client), ask(client)]
            await server.until_there(admitted=1, waiting=1)
            seen.append([context.key for context in server.admission.waiting_contexts()])
            server.release(2)
            await asyncio.gather(*asking)
            seen.append([context.key for context in server.admission.waiting_contexts()])
        return seen

    assert asyncio.run(scene()) == [[""], []]


def test_without_a_queue_only_the_capacity_is_served() -> None:
    """`--max-waiting 0` refuses every request over the capacity."""

    async def scene() -> list[int]:
        server = SmallServer(capacity=2, waiting=0)
        async with server.serving() as client:
            asking = [ask(client), ask(client)]
            await server.until_there(admitted=2, waiting=0)
            refused = await ask(client)
            server.release(2)
            return [
                refused.status_code,
                *(one.status_code for one in await asyncio.gather(*asking)),
            ]

    assert asyncio.run(scene()) == [429, 200, 200]


def test_a_request_that_needs_no_capacity_is_answered_by_a_full_server() -> None:
    """A list of models does not wait for a long answer."""

    async def scene() -> int:
        server = SmallServer(waiting=0)
        async with server.serving() as client:
            asking = ask(client)
            await server.until_there(admitted=1, waiting=0)
            answer = await client.get("/v1/models")
            server.release()
            await asking
        return answer.status_code

    assert asyncio.run(scene()) == 200


def test_a_client_that_leaves_the_queue_delays_nobody() -> None:
    """The requests behind it move up."""

    async def scene() -> list[str]:
        server = SmallServer(waiting=1)
        async with server.serving() as client:
            first, gone = ask(client, "a"), ask(client, "b")
            await server.until_there(admitted=1, waiting=1)
            gone.cancel()
            await server.until_there(admitted=1, waiting=0)
            last = ask(client, "c")
            await server.until_there(admitted=1, waiting=1)
            server.release(2)
            await asyncio.gather(first, last)
        return server.served

    assert asyncio.run(scene()) == ["a", "c"]


def test_a_client_that_leaves_while_it_is_served_frees_its_capacity() -> None:
    """The next request is admitted, though the first was never answered."""

    async def scene() -> int:
        server = SmallServer()
        async with server.serving() as client:
            gone, waiting = ask(client), ask(client)
            await server.until_there(admitted=1, waiting=1)
            gone.cancel()
            server.release(2)
            return (await waiting).status_code

    assert asyncio.run(scene()) == 200


def test_a_drain_serves_the_queue() -> None:
    """Requests that wait at SIGTERM are served, later ones are not, and the drain waits."""

    async def scene() -> list[int]:
        server = SmallServer()
        async with server.serving() as client:
            asking = [ask(client), ask(client)]
            await server.until_there(admitted=1, waiting=1)
            server.view.move(State.DRAINING)
            refused = await ask(client)
            drained = asyncio.create_task(server.admission.until_idle(DEADLINE_SECONDS))
            server.release(2)
            answers = await asyncio.gather(*asking)
            assert await drained
            return [refused.status_code, *(answer.status_code for answer in answers)]

    assert asyncio.run(scene()) == [503, 200, 200]


def test_the_queue_stops_while_the_engine_is_replaced() -> None:
    """A request that ends meanwhile admits no other; then the queue continues where it was."""

    async def scene() -> list[int]:
        server = SmallServer()
        async with server.serving() as client:
            asking = [ask(client), ask(client)]
            await server.until_there(admitted=1, waiting=1)
            server.view.move(State.RECOVERING, is_recovering=True)
            asking.append(ask(client))
            await server.until_there(admitted=1, waiting=2)
            server.release(3)
            await server.until_there(admitted=0, waiting=2)
            server.view.move(State.READY)
            return [answer.status_code for answer in await asyncio.gather(*asking)]

    assert asyncio.run(scene()) == [200, 200, 200]


def test_the_queue_is_refused_when_no_engine_comes() -> None:
    """Its requests get 503, so that another server takes them."""

    async def scene() -> int:
        server = SmallServer()
        async with server.serving() as client:
            first, waiting = ask(client), ask(client)
            await server.until_there(admitted=1, waiting=1)
            server.view.move(State.FAILED)
            answer = await waiting
            server.release()
            await first
            return answer.status_code

    assert asyncio.run(scene()) == 503


def test_a_wait_for_the_next_engine_ends_with_the_hold_time_out() -> None:
    """So are those that waited when the last one died, if the next one takes too long."""

    async def scene() -> httpx.Response:
        server = SmallServer()
        async with server.serving() as client:
            first, waiting = ask(client), ask(client)
            await server.until_there(admitted=1, waiting=1)
            server.view.eta_seconds = DEADLINE_SECONDS + 30.0
            server.view.move(State.RECOVERING, is_recovering=True)
            answer = await waiting
            server.release()
            await first
            return answer

    answer = asyncio.run(scene())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, str(DEADLINE_SECONDS + 30))


def test_a_connection_survives_a_refused_upload() -> None:
    """A body that was never read does not spoil the next request of the same client."""

    async def scene() -> list[int]:
        server = SmallServer(waiting=0)
        async with server.serving() as client:
            first = ask(client)
            await server.until_there(admitted=1, waiting=0)
            refused = await ask(client, body=b"x" * 2_000_000)
            answer = await client.get("/v1/models")
            server.release()
            await first
            return [refused.status_code, answer.status_code]

    assert asyncio.run(scene()) == [429, 200]
