"""A gate with little capacity before an application: what waits, is served, or is refused."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import replace
from random import Random

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from asgi_server import DEADLINE_SECONDS, serving
from counter_values import counter_values
from fake_engine import FACTS, FakeClock
from holdfast.api.admission import Admission, Durations
from holdfast.api.gate import Gate
from holdfast.api.router import RENDERINGS
from holdfast.engine.sequence_queue import Capacity
from holdfast.errors import NotReadyError, OverloadedError
from holdfast.lifecycle.states import State
from holdfast.request_context import RequestContext, current_request
from holdfast.settings import OverloadSettings
from holdfast.telemetry.collector import OwnRegistry
from holdfast.telemetry.counters import Refusals
from inner_app import View


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


class Shop:
    """A gate with little capacity before an application whose answers the test releases.

    A request names its key in `x-key`, since there is no layer that knows keys.
    """

    def __init__(
        self, *, capacity: float = 1, waiting: int = 100, per_key: int = 0, keys: int = 0
    ) -> None:
        self.view = View()
        self.served: list[str] = []
        self.at_work: list[RequestContext] = []
        self.refusals = Refusals()
        self.admission = Admission(
            self.view,
            refusals=self.refusals,
            probe_token="",
            hold_timeout_seconds=DEADLINE_SECONDS,
            overload=OverloadSettings(waiting, per_key),
            capacity=lambda: Capacity(capacity, capacity),
            count_keys=lambda: keys,
        )
        self._gate = Gate(self._answer, self.admission)
        self._released = asyncio.Semaphore(0)
        self.is_elsewhere = False
        """Whether a request that comes now waits for `elsewhere` before its work."""
        self.elsewhere = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set the key, as the layer before the gate does."""
        headers = dict(scope.get("headers", ()))
        current_request().key = headers.get(b"x-key", b"").decode()
        await self._gate(scope, receive, send)

    def serving(self) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        """Yield a client of the gate."""
        return serving(self)

    def release(self, answers: int = 1) -> None:
        """Have this many requests answered."""
        for _ in range(answers):
            self._released.release()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when the condition holds."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0.01)

    async def until_there(self, *, admitted: int, waiting: int) -> None:
        """Return when this many requests are admitted and wait."""
        admission = self.admission
        await self.until(lambda: (admission.in_flight, admission.held) == (admitted, waiting))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["type"] == "websocket":
            await self._talk(WebSocket(scope, receive, send))
            return
        if scope["method"] == "POST":
            context = current_request()
            if self.is_elsewhere:
                try:
                    async with context.away():
                        await self.elsewhere.wait()
                except NotReadyError:
                    await PlainTextResponse("NotReadyError")(scope, receive, send)
                    return
            self.at_work.append(context)
            await self._released.acquire()
        self.served.append(current_request().key)
        body = (await receive()).get("body", b"")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def _talk(self, websocket: WebSocket) -> None:
        """Make a call for each message."""
        session = current_request().session
        assert session is not None
        await websocket.accept()
        with suppress(WebSocketDisconnect):
            while True:
                await websocket.receive_text()
                try:
                    async with session.call():
                        self.at_work.append(current_request())
                        await self._released.acquire()
                except OverloadedError:
                    await websocket.send_text("OverloadedError")
                else:
                    await websocket.send_text("done")


def ask(
    client: httpx.AsyncClient, key: str = "", body: bytes = b"", path: str = "/work"
) -> asyncio.Task[httpx.Response]:
    """Send a request, and return its task."""
    return asyncio.create_task(client.post(path, content=body, headers={"x-key": key}))


def test_a_waiting_request_is_served_with_the_body_that_was_sent() -> None:
    """Requests are served in the order of the keys' turns, each once."""

    async def scene() -> list[str]:
        shop = Shop()
        async with shop.serving() as client:
            asking = []
            for number, key in enumerate(("a", "a", "a", "b")):
                asking.append(ask(client, key, b"body"))
                await shop.until_there(admitted=1, waiting=number)
            shop.release(4)
            answers = await asyncio.gather(*asking)
            assert {answer.text for answer in answers} == {"body"}
            await shop.until_there(admitted=0, waiting=0)
        return shop.served

    assert asyncio.run(scene()) == ["a", "a", "b", "a"]


def test_the_wait_of_an_admitted_request_is_counted() -> None:
    """It is 0 for the request admitted at once, and not counted for the refused one."""

    async def scene() -> tuple[float, float, float]:
        shop = Shop(waiting=1)
        page = OwnRegistry(shop.admission.waits)

        def waited() -> tuple[float, float]:
            """Return the number of waits, and their sum."""
            count, seconds = (
                page.get_sample_value(f"holdfast_request_wait_seconds_{what}") or 0.0
                for what in ("count", "sum")
            )
            return count, seconds

        async with shop.serving() as client:
            asking = [ask(client), ask(client)]
            await shop.until_there(admitted=1, waiting=1)
            began_seconds = time.monotonic()
            assert (await ask(client)).status_code == 429
            assert waited() == (1, 0.0)
            least_seconds = time.monotonic() - began_seconds
            shop.release(2)
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
        shop = Shop(capacity=1, waiting=0)
        shop.release(2)
        async with shop.serving() as client:
            with slow_upload(client) as wire:
                answer = await ask(client)
                assert (shop.admission.in_flight, shop.admission.held) == (0, 0)
                wire.sendall(b"there")
                reading = asyncio.to_thread(wire.recv, 65536)
                return answer.status_code, (await reading).decode()

    code, answer = asyncio.run(scene())
    assert code == 200
    assert answer.startswith("HTTP/1.1 200")


def test_a_slow_reader_holds_no_capacity_when_the_engine_is_done() -> None:
    """The next request is admitted before the slow reader has its whole answer."""

    async def scene() -> list[int]:
        shop = Shop()
        async with shop.serving() as client:
            asking = [ask(client), ask(client)]
            await shop.until_there(admitted=1, waiting=1)
            shop.at_work[0].engine_is_done()
            await shop.until_there(admitted=2, waiting=0)
            asking.append(ask(client))
            await shop.until_there(admitted=2, waiting=1)
            shop.release(3)
            codes = [(await one).status_code for one in asking]
            await shop.until_there(admitted=0, waiting=0)
            return codes

    assert asyncio.run(scene()) == [200, 200, 200]


def test_a_request_that_does_not_wait_for_the_engine_lends_its_capacity() -> None:
    """Others are served meanwhile; then it is next, before later requests of its key."""

    async def scene() -> list[str]:
        shop = Shop()
        async with shop.serving() as client:
            shop.is_elsewhere = True
            asking = [ask(client, body=b"away")]
            await shop.until_there(admitted=1, waiting=0)
            shop.is_elsewhere = False
            for waiting in range(2):
                asking.append(ask(client))
                await shop.until_there(admitted=2, waiting=waiting)
            shop.elsewhere.set()
            await shop.until_there(admitted=1, waiting=2)
            shop.release()
            await shop.until(lambda: len(shop.at_work) == 2)
            shop.release(2)
            codes = [str((await one).status_code) for one in asking]
            is_second = shop.at_work[1].waited_seconds > 0.0
            await shop.until_there(admitted=0, waiting=0)
            return [*codes, str(is_second)]

    assert asyncio.run(scene()) == ["200", "200", "200", "True"]


def test_a_request_that_comes_back_is_refused_when_no_engine_will_come() -> None:
    """It gets what a new request would get, and may be retried."""

    async def scene() -> tuple[str, int, int]:
        shop = Shop()
        shop.is_elsewhere = True
        async with shop.serving() as client:
            asking = ask(client)
            await shop.until_there(admitted=1, waiting=0)
            shop.view.state = State.FAILED
            shop.elsewhere.set()
            answer = await asking
            await shop.until_there(admitted=0, waiting=0)
        return answer.text, counter_values(shop.refusals)["failed"], len(shop.at_work)

    assert asyncio.run(scene()) == ("NotReadyError", 1, 0)


def test_one_key_leaves_capacity_to_another() -> None:
    """This holds however long its requests take; a single key uses all capacity."""

    async def scene(keys: int) -> list[int]:
        shop = Shop(capacity=4, keys=keys)
        async with shop.serving() as client:
            asking = [ask(client, "a") for _ in range(8)]
            await shop.until(lambda: shop.admission.in_flight + shop.admission.held == 8)
            found = [shop.admission.in_flight]
            asking.append(ask(client, "b"))
            await shop.until(lambda: shop.admission.in_flight + shop.admission.held == 9)
            found.append(sum(context.key == "b" for context in shop.at_work))
            shop.release(9)
            await asyncio.gather(*asking)
            return found

    assert asyncio.run(scene(keys=2)) == [3, 1]
    assert asyncio.run(scene(keys=1)) == [4, 0]


def test_renderings_have_a_capacity_of_their_own() -> None:
    """They do not wait for a full engine, and are not all admitted at once."""

    async def scene() -> list[int]:
        shop = Shop(capacity=1)
        async with shop.serving() as client:
            asking = [ask(client), ask(client)]
            await shop.until_there(admitted=1, waiting=1)
            asking += [ask(client, path="/tokenize") for _ in range(RENDERINGS + 2)]
            await shop.until_there(admitted=1 + RENDERINGS, waiting=3)
            shop.release(len(asking))
            return [(await one).status_code for one in asking]

    assert set(asyncio.run(scene())) == {200}


def test_the_limit_of_a_key_applies_to_renderings_too() -> None:
    """`--max-requests-per-key` counts every request of a key."""

    async def scene() -> int:
        shop = Shop(per_key=2)
        async with shop.serving() as client:
            asking = [ask(client, "a"), ask(client, "a", path="/tokenize")]
            await shop.until_there(admitted=2, waiting=0)
            refused = await ask(client, "a", path="/tokenize")
            shop.release(2)
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
        shop = Shop(capacity=1, per_key=1)
        async with shop.serving() as client:
            shop.admission.durations = durations
            asking = ask(client, "a")
            await shop.until_there(admitted=1, waiting=0)
            refused = await ask(client, "a")
            shop.release()
            await asking
        return str(refused.headers["retry-after"])

    assert asyncio.run(scene()) == "60"


def test_a_full_queue_is_429() -> None:
    """The refusal comes at once, in OpenAI's form, and is counted."""

    async def scene() -> httpx.Response:
        shop = Shop(waiting=1)
        async with shop.serving() as client:
            asking = [ask(client), ask(client)]
            await shop.until_there(admitted=1, waiting=1)
            refused = await ask(client)
            assert counter_values(shop.refusals)["overloaded"] == 1
            shop.release(2)
            assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
        return refused

    refused = asyncio.run(scene())
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "5"
    assert refused.headers["x-should-retry"] == "true"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", 429)


def test_without_a_queue_only_the_capacity_is_served() -> None:
    """`--max-waiting 0` refuses every request over the capacity."""

    async def scene() -> list[int]:
        shop = Shop(capacity=2, waiting=0)
        async with shop.serving() as client:
            asking = [ask(client), ask(client)]
            await shop.until_there(admitted=2, waiting=0)
            refused = await ask(client)
            shop.release(2)
            return [
                refused.status_code,
                *(one.status_code for one in await asyncio.gather(*asking)),
            ]

    assert asyncio.run(scene()) == [429, 200, 200]


def test_a_request_that_needs_no_capacity_is_answered_by_a_full_server() -> None:
    """A list of models does not wait for a long answer."""

    async def scene() -> int:
        shop = Shop(waiting=0)
        async with shop.serving() as client:
            asking = ask(client)
            await shop.until_there(admitted=1, waiting=0)
            answer = await client.get("/v1/models")
            shop.release()
            await asking
        return answer.status_code

    assert asyncio.run(scene()) == 200


def test_a_client_that_leaves_the_queue_frees_its_place_in_it() -> None:
    """It does not delay the requests behind it."""

    async def scene() -> list[str]:
        shop = Shop(waiting=1)
        async with shop.serving() as client:
            first, gone = ask(client, "a"), ask(client, "b")
            await shop.until_there(admitted=1, waiting=1)
            gone.cancel()
            await shop.until_there(admitted=1, waiting=0)
            last = ask(client, "c")
            await shop.until_there(admitted=1, waiting=1)
            shop.release(2)
            await asyncio.gather(first, last)
        return shop.served

    assert asyncio.run(scene()) == ["a", "c"]


def test_a_client_that_leaves_while_it_is_served_frees_its_capacity() -> None:
    """The next request is admitted, though the first was never answered."""

    async def scene() -> int:
        shop = Shop()
        async with shop.serving() as client:
            gone, waiting = ask(client), ask(client)
            await shop.until_there(admitted=1, waiting=1)
            gone.cancel()
            shop.release(2)
            return (await waiting).status_code

    assert asyncio.run(scene()) == 200


@pytest.mark.parametrize("seed", range(3))
def test_no_capacity_is_lost_when_clients_come_and_go(seed: int) -> None:
    """Whichever client leaves, and whatever the state does, all capacity is free in the end."""
    random = Random(seed)

    async def scene() -> None:
        shop = Shop(capacity=3, waiting=8)
        async with shop.serving() as client:
            asking: list[asyncio.Task[httpx.Response]] = []
            for _ in range(60):
                asking.append(ask(client, random.choice("abc"), b"x"))
                await asyncio.sleep(random.choice((0.0, 0.005)))
                if random.random() < 0.5:
                    random.choice(asking).cancel()
                if random.random() < 0.3:
                    shop.release()
                if random.random() < 0.1:
                    shop.view.move(State.RECOVERING, is_recovering=True)
                    await asyncio.sleep(0.0)
                    shop.view.move(State.READY)
            shop.release(60)
            await asyncio.wait(asking)
            await shop.until_there(admitted=0, waiting=0)
            codes = {one.result().status_code for one in asking if not one.cancelled()}
            assert codes <= {200, 429}
            last = [ask(client) for _ in range(3)]
            assert {(await one).status_code for one in last} == {200}

    asyncio.run(scene())


def test_a_key_has_a_limit_of_concurrent_requests() -> None:
    """Requests over `--max-requests-per-key` get 429; other keys and none are not affected."""

    async def scene() -> list[int]:
        shop = Shop(capacity=1, per_key=2)
        async with shop.serving() as client:
            asking = [ask(client, "a"), ask(client, "a")]
            await shop.until_there(admitted=1, waiting=1)
            refused = await ask(client, "a")
            assert counter_values(shop.refusals)["key_concurrency"] == 1
            asking += [ask(client, "b"), ask(client), ask(client), ask(client)]
            await shop.until_there(admitted=1, waiting=5)
            shop.release(6)
            return [
                refused.status_code,
                *(one.status_code for one in await asyncio.gather(*asking)),
            ]

    assert asyncio.run(scene()) == [429] + [200] * 6


def test_a_drain_serves_the_queue() -> None:
    """Requests that wait at SIGTERM are served, later ones are not, and the drain waits."""

    async def scene() -> list[int]:
        shop = Shop()
        async with shop.serving() as client:
            asking = [ask(client), ask(client)]
            await shop.until_there(admitted=1, waiting=1)
            shop.view.move(State.DRAINING)
            refused = await ask(client)
            drained = asyncio.create_task(shop.admission.until_idle(DEADLINE_SECONDS))
            shop.release(2)
            answers = await asyncio.gather(*asking)
            assert await drained
            return [refused.status_code, *(answer.status_code for answer in answers)]

    assert asyncio.run(scene()) == [503, 200, 200]


def test_the_queue_stops_while_the_engine_is_replaced() -> None:
    """A request that ends meanwhile admits no other; then the queue continues where it was."""

    async def scene() -> list[int]:
        shop = Shop()
        async with shop.serving() as client:
            asking = [ask(client), ask(client)]
            await shop.until_there(admitted=1, waiting=1)
            shop.view.move(State.RECOVERING, is_recovering=True)
            asking.append(ask(client))
            await shop.until_there(admitted=1, waiting=2)
            shop.release(3)
            await shop.until_there(admitted=0, waiting=2)
            shop.view.move(State.READY)
            return [answer.status_code for answer in await asyncio.gather(*asking)]

    assert asyncio.run(scene()) == [200, 200, 200]


def test_the_queue_is_refused_when_no_engine_comes() -> None:
    """Its requests get 503, so that another server takes them."""

    async def scene() -> int:
        shop = Shop()
        async with shop.serving() as client:
            first, waiting = ask(client), ask(client)
            await shop.until_there(admitted=1, waiting=1)
            shop.view.move(State.FAILED)
            answer = await waiting
            shop.release()
            await first
            return answer.status_code

    assert asyncio.run(scene()) == 503


def test_a_wait_for_the_next_engine_ends_with_the_hold_time_out() -> None:
    """So are those that waited when the last one died, if the next one takes too long."""

    async def scene() -> httpx.Response:
        shop = Shop()
        async with shop.serving() as client:
            first, waiting = ask(client), ask(client)
            await shop.until_there(admitted=1, waiting=1)
            shop.view.eta_seconds = DEADLINE_SECONDS + 30.0
            shop.view.move(State.RECOVERING, is_recovering=True)
            answer = await waiting
            shop.release()
            await first
            return answer

    answer = asyncio.run(scene())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, str(DEADLINE_SECONDS + 30))


def websocket(client: httpx.AsyncClient) -> connect:
    """Open a WebSocket to the same server."""
    url = str(client.base_url).replace("http", "ws")
    return connect(f"{url}/v1/realtime", open_timeout=DEADLINE_SECONDS)


def test_a_websocket_over_the_limit_of_its_key_is_closed_with_1013() -> None:
    """The code is 'try again later', and the reason has the number of seconds."""

    async def scene() -> tuple[int, str]:
        shop = Shop(per_key=1)
        async with shop.serving() as client:
            first = ask(client, "key")
            await shop.until_there(admitted=1, waiting=0)
            url = str(client.base_url).replace("http", "ws")
            headers = {"x-key": "key"}
            async with connect(f"{url}/v1/realtime", additional_headers=headers) as connection:
                with pytest.raises(ConnectionClosed) as closed:
                    await connection.recv()
            shop.release()
            await first
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code, closed.value.rcvd.reason

    assert asyncio.run(scene()) == (1013, "retry after 5 s")


def test_an_open_websocket_holds_no_capacity() -> None:
    """Requests are served however many are open, and a full server accepts another."""

    async def scene() -> int:
        shop = Shop(waiting=0)
        async with shop.serving() as client, websocket(client):
            first = ask(client)
            await shop.until(lambda: len(shop.at_work) == 1)
            async with websocket(client):
                await shop.until_there(admitted=3, waiting=0)
                shop.release()
                return (await first).status_code

    assert asyncio.run(scene()) == 200


def test_a_call_of_a_websocket_holds_capacity_while_it_runs() -> None:
    """It waits for the capacity like any request, and returns it to the next one."""

    async def scene() -> list[str | bytes]:
        shop = Shop(waiting=1)
        async with shop.serving() as client, websocket(client) as one:
            first = ask(client)
            await shop.until(lambda: len(shop.at_work) == 1)
            await one.send("")
            await shop.until_there(admitted=2, waiting=1)
            async with websocket(client) as two:
                await two.send("")
                said = [await two.recv()]
            shop.release()
            await first
            await shop.until(lambda: len(shop.at_work) == 2)
            second = ask(client)
            await shop.until_there(admitted=2, waiting=1)
            shop.release(2)
            said.append(await one.recv())
            await second
            await shop.until_there(admitted=1, waiting=0)
            return said

    assert asyncio.run(scene()) == ["OverloadedError", "done"]


def test_a_connection_survives_a_refused_upload() -> None:
    """A body that was never read does not spoil the next request of the same client."""

    async def scene() -> list[int]:
        shop = Shop(waiting=0)
        async with shop.serving() as client:
            first = ask(client)
            await shop.until_there(admitted=1, waiting=0)
            refused = await ask(client, body=b"x" * 2_000_000)
            answer = await client.get("/v1/models")
            shop.release()
            await first
            return [refused.status_code, answer.status_code]

    assert asyncio.run(scene()) == [429, 200]
