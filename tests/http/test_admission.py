"""Who is served of those that want capacity: what holds it, lends it and frees it, key by key."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import httpx
import pytest

from asgi_server import DEADLINE_SECONDS
from counter_values import counter_values
from holdfast.api.admission import Durations
from holdfast.api.router import RENDERINGS
from holdfast.engine.requests.sequence_queue import Capacity
from holdfast.lifecycle.states import State
from holdfast.request_context import RequestContext
from holdfast.telemetry.collector import OwnRegistry
from small_server import SmallServer, ask
from stub_engine import FACTS, FakeClock


@pytest.mark.parametrize(
    ("running", "engines", "bound", "expected"),
    [(16, 1, None, 18), (1, 1, None, 3), (256, 4, None, 1152), (16, 1, 10, 10), (16, 1, 0, 1)],
)
def test_the_capacity_keeps_the_engine_full_and_its_queue_short(
    running: int, engines: int, bound: int | None, expected: int
) -> None:
    """It is a few more than run at once, and never more than vLLM's own limit."""
    facts = replace(
        FACTS, max_num_seqs=running, data_parallel_size=engines, max_queued_requests=bound
    )
    assert Capacity.of(facts).count == expected


def test_a_waiting_request_is_served_with_the_body_that_was_sent() -> None:
    """Requests are served in the order of the keys' turns, each once."""

    async def scene() -> list[str]:
        server = SmallServer()
        async with server.serving() as client:
            asking = []
            for number, key in enumerate(("a", "a", "a", "b")):
                asking.append(ask(client, key, b"body"))
                await server.until_there(admitted=1, waiting=number)
            server.release(4)
            answers = await asyncio.gather(*asking)
            assert {answer.text for answer in answers} == {"body"}
            await server.until_there(admitted=0, waiting=0)
        return server.served

    assert asyncio.run(scene()) == ["a", "a", "b", "a"]


def test_the_wait_of_an_admitted_request_is_counted() -> None:
    """It is 0 for the request admitted at once, and not counted for the refused one."""

    async def scene() -> tuple[float, float, float]:
        server = SmallServer(waiting=1)
        page = OwnRegistry(server.admission.waits)

        def waited() -> tuple[float, float]:
            """Return the number of waits, and their sum."""
            count, seconds = (
                page.get_sample_value(f"holdfast_request_wait_seconds_{what}") or 0.0
                for what in ("count", "sum")
            )
            return count, seconds

        async with server.serving() as client:
            asking = [ask(client), ask(client)]
            await server.until_there(admitted=1, waiting=1)
            began_seconds = time.monotonic()
            assert (await ask(client)).status_code == 429
            assert waited() == (1, 0.0)
            least_seconds = time.monotonic() - began_seconds
            server.release(2)
            await asyncio.gather(*asking)
        count, sum_seconds = waited()
        return count, least_seconds, sum_seconds

    count, least_seconds, sum_seconds = asyncio.run(scene())
    assert count == 2
    assert sum_seconds >= least_seconds


@contextmanager
def slow_upload(client: httpx.AsyncClient) -> Iterator[socket.socket]:
    """Send a request whose body does not arrive."""
    url = client.base_url
    with socket.create_connection((url.host, url.port), DEADLINE_SECONDS) as wire:
        wire.sendall(b"POST /work HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf-")
        yield wire


def test_a_slow_upload_holds_no_capacity() -> None:
    """Others are served meanwhile, and the upload is served when it is complete."""

    async def scene() -> tuple[int, str]:
        server = SmallServer(capacity=1, waiting=0)
        server.release(2)
        async with server.serving() as client:
            with slow_upload(client) as wire:
                answer = await ask(client)
                await server.until_there(admitted=0, waiting=0)
                wire.sendall(b"there")
                reading = asyncio.to_thread(wire.recv, 65536)
                return answer.status_code, (await reading).decode()

    code, answer = asyncio.run(scene())
    assert code == 200
    assert answer.startswith("HTTP/1.1 200")


def test_a_slow_reader_holds_no_capacity_when_the_engine_is_done() -> None:
    """The next request is admitted before the slow reader has its whole answer."""

    async def scene() -> list[int]:
        server = SmallServer()
        async with server.serving() as client:
            asking = [ask(client), ask(client)]
            await server.until_there(admitted=1, waiting=1)
            server.at_work[0].engine_is_done()
            await server.until_there(admitted=2, waiting=0)
            asking.append(ask(client))
            await server.until_there(admitted=2, waiting=1)
            server.release(3)
            codes = [(await one).status_code for one in asking]
            await server.until_there(admitted=0, waiting=0)
            return codes

    assert asyncio.run(scene()) == [200, 200, 200]


def test_a_request_that_does_not_wait_for_the_engine_lends_its_capacity() -> None:
    """Others are served meanwhile; then it is next, before later requests of its key."""

    async def scene() -> list[str]:
        server = SmallServer()
        async with server.serving() as client:
            server.is_elsewhere = True
            asking = [ask(client, body=b"away")]
            await server.until_there(admitted=1, waiting=0)
            server.is_elsewhere = False
            for waiting in range(2):
                asking.append(ask(client))
                await server.until_there(admitted=2, waiting=waiting)
            server.elsewhere.set()
            await server.until_there(admitted=1, waiting=2)
            server.release()
            await server.until(lambda: len(server.at_work) == 2)
            server.release(2)
            codes = [str((await one).status_code) for one in asking]
            is_second = server.at_work[1].waited_seconds > 0.0
            await server.until_there(admitted=0, waiting=0)
            return [*codes, str(is_second)]

    assert asyncio.run(scene()) == ["200", "200", "200", "True"]


async def done_with_the_engine(server: SmallServer) -> RequestContext:
    """The only request at work, once the engine has had it and is done with it."""
    await server.until(lambda: len(server.at_work) == 1)
    (request,) = server.at_work
    request.given_to(1)
    request.engine_is_done()
    return request


def test_a_request_that_needs_the_engine_again_is_the_next_of_its_key() -> None:
    """It has no capacity between, and gets it before those that wait for the first time."""

    async def scene() -> list[int]:
        server = SmallServer()
        async with server.serving() as client:
            asking = [ask(client)]
            await server.until(lambda: len(server.at_work) == 1)
            first = server.at_work[0]
            first.given_to(1)
            for waiting in (1, 2):
                asking.append(ask(client))
                await server.until_there(admitted=1, waiting=waiting)
            first.engine_is_done()
            await server.until(lambda: len(server.at_work) == 2)
            again = asyncio.create_task(first.regain_capacity())
            await server.until_there(admitted=1, waiting=2)
            server.at_work[1].engine_is_done()
            await again
            await server.until_there(admitted=2, waiting=1)
            server.release(3)
            return [(await one).status_code for one in asking]

    assert asyncio.run(scene()) == [200, 200, 200]


def test_a_request_that_comes_back_waits_for_the_next_engine() -> None:
    """However long that takes, also where no new request waits."""

    async def scene() -> int:
        server = SmallServer(waiting=0)
        async with server.serving() as client:
            asking = ask(client)
            request = await done_with_the_engine(server)
            server.view.eta_seconds = DEADLINE_SECONDS + 30.0
            server.view.move(State.RECOVERING, is_recovering=True)
            again = asyncio.create_task(request.regain_capacity())
            await server.until_there(admitted=0, waiting=1)
            server.view.move(State.READY)
            await again
            server.release()
            return (await asking).status_code

    assert asyncio.run(scene()) == 200


def test_what_outlives_its_request_waits_no_longer_for_capacity() -> None:
    """A response in the background goes on without the ticket of the request that began it."""

    async def scene() -> None:
        server = SmallServer()
        async with server.serving() as client:
            ended = ask(client)
            first = await done_with_the_engine(server)
            other = ask(client)
            await server.until(lambda: len(server.at_work) == 2)
            again = asyncio.create_task(first.regain_capacity())
            await server.until_there(admitted=1, waiting=1)
            server.release()
            await ended
            async with asyncio.timeout(DEADLINE_SECONDS):
                await again
            server.release()
            await other

    asyncio.run(scene())


def test_a_request_that_comes_back_is_refused_when_no_engine_will_come() -> None:
    """It gets what a new request would get, and may be retried."""

    async def scene() -> tuple[str, int, int]:
        server = SmallServer()
        server.is_elsewhere = True
        async with server.serving() as client:
            asking = ask(client)
            await server.until_there(admitted=1, waiting=0)
            server.view.state = State.FAILED
            server.elsewhere.set()
            answer = await asking
            await server.until_there(admitted=0, waiting=0)
        return answer.text, counter_values(server.refusals)["failed"], len(server.at_work)

    assert asyncio.run(scene()) == ("NotReadyError", 1, 0)


def test_one_key_leaves_capacity_to_another() -> None:
    """This holds however long its requests take; a single key uses all capacity."""

    async def scene(keys: int) -> list[int]:
        server = SmallServer(capacity=4, keys=keys)
        async with server.serving() as client:
            asking = [ask(client, "a") for _ in range(8)]
            await server.until(lambda: server.admission.in_flight + server.admission.held == 8)
            found = [server.admission.in_flight]
            asking.append(ask(client, "b"))
            await server.until(lambda: server.admission.in_flight + server.admission.held == 9)
            await server.until(lambda: len(server.at_work) == server.admission.in_flight)
            found.append(sum(context.key == "b" for context in server.at_work))
            server.release(9)
            await asyncio.gather(*asking)
            return found

    assert asyncio.run(scene(keys=2)) == [3, 1]
    assert asyncio.run(scene(keys=1)) == [4, 0]


def test_renderings_have_a_capacity_of_their_own() -> None:
    """They do not wait for a full engine, and are not all admitted at once."""

    async def scene() -> list[int]:
        server = SmallServer(capacity=1)
        async with server.serving() as client:
            asking = [ask(client), ask(client)]
            await server.until_there(admitted=1, waiting=1)
            asking += [ask(client, path="/tokenize") for _ in range(RENDERINGS + 2)]
            await server.until_there(admitted=1 + RENDERINGS, waiting=3)
            server.release(len(asking))
            return [(await one).status_code for one in asking]

    assert set(asyncio.run(scene())) == {200}


def test_the_limit_of_a_key_applies_to_renderings_too() -> None:
    """`--max-requests-per-key` counts every request of a key."""

    async def scene() -> int:
        server = SmallServer(per_key=2)
        async with server.serving() as client:
            asking = [ask(client, "a"), ask(client, "a", path="/tokenize")]
            await server.until_there(admitted=2, waiting=0)
            refused = await ask(client, "a", path="/tokenize")
            server.release(2)
            await asyncio.gather(*asking)
        return refused.status_code

    assert asyncio.run(scene()) == 429


def test_a_key_is_told_when_one_of_its_own_requests_is_likely_to_end() -> None:
    """The estimate is how long they took before, not how fast the queue moves."""
    clock = FakeClock()
    durations = Durations(clock)
    assert durations.left_seconds("a") is None
    for seconds in (20.0, 22.0, 200.0):
        durations.begin("a", seconds)
        clock.now_seconds += seconds
        durations.end("a", seconds)
    durations.begin("a", "first")
    clock.now_seconds += 3.0
    durations.begin("a", "second")
    assert durations.left_seconds("a") == 19.0
    clock.now_seconds += 37.0
    assert durations.left_seconds("a") == 37.0
    assert durations.left_seconds("b") is None
    durations.begin("b", "of a key that is new")
    assert durations.left_seconds("b") == 22.0


def test_before_any_request_has_ended_the_youngest_tells_the_wait() -> None:
    """It is expected to take as long again, and at least some seconds."""
    clock = FakeClock()
    durations = Durations(clock)
    durations.begin("a", 1)
    assert durations.left_seconds("a") == 5.0
    clock.now_seconds += 19.0
    assert durations.left_seconds("a") == 19.0


def test_the_wait_that_a_key_is_told_is_its_own() -> None:
    """It is long even if the queue moves fast for all other keys."""
    clock = FakeClock()
    durations = Durations(clock)
    durations.begin("a", "earlier")
    clock.now_seconds += 60.0
    durations.end("a", "earlier")

    async def scene() -> str:
        server = SmallServer(capacity=1, per_key=1)
        async with server.serving() as client:
            server.admission.durations = durations
            asking = ask(client, "a")
            await server.until_there(admitted=1, waiting=0)
            refused = await ask(client, "a")
            server.release()
            await asking
        return str(refused.headers["retry-after"])

    assert asyncio.run(scene()) == "60"


@pytest.mark.parametrize("seed", range(3))
def test_no_capacity_is_lost_when_clients_come_and_go(seed: int) -> None:
    """Whichever client leaves, and whatever the state does, all capacity is free in the end."""
    random = Random(seed)

    async def scene() -> None:
        server = SmallServer(capacity=3, waiting=8)
        async with server.serving() as client:
            asking: list[asyncio.Task[httpx.Response]] = []
            for _ in range(60):
                asking.append(ask(client, random.choice("abc"), b"x"))
                await asyncio.sleep(random.choice((0.0, 0.005)))
                if random.random() < 0.5:
                    random.choice(asking).cancel()
                if random.random() < 0.3:
                    server.release()
                if random.random() < 0.1:
                    server.view.move(State.RECOVERING, is_recovering=True)
                    await asyncio.sleep(0.0)
                    server.view.move(State.READY)
            server.release(60)
            await asyncio.wait(asking)
            await server.until_there(admitted=0, waiting=0)
            codes = {one.result().status_code for one in asking if not one.cancelled()}
            assert codes <= {200, 429}
            last = [ask(client) for _ in range(3)]
            assert {(await one).status_code for one in last} == {200}

    asyncio.run(scene())


def test_a_key_has_a_limit_of_concurrent_requests() -> None:
    """Requests over `--max-requests-per-key` get 429; other keys and none are not affected."""

    async def scene() -> list[int]:
        server = SmallServer(capacity=1, per_key=2)
        async with server.serving() as client:
            asking = [ask(client, "a"), ask(client, "a")]
            await server.until_there(admitted=1, waiting=1)
            refused = await ask(client, "a")
            assert counter_values(server.refusals)["key_concurrency"] == 1
            asking += [ask(client, "b"), ask(client), ask(client), ask(client)]
            await server.until_there(admitted=1, waiting=5)
            server.release(6)
            return [
                refused.status_code,
                *(one.status_code for one in await asyncio.gather(*asking)),
            ]

    assert asyncio.run(scene()) == [429] + [200] * 6
