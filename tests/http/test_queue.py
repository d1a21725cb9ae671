from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import replace
from random import Random

import httpx
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from asgi_server import DEADLINE_SECONDS, serving
from counted import counted
from fakes import FACTS
from holdfast.api.admission import Admission
from holdfast.api.gate import Gate
from holdfast.api.queue import FairQueue, Ticket
from holdfast.api.rates import MEMORY_SECONDS, Durations, ServiceRate
from holdfast.api.router import RENDERINGS, work_of
from holdfast.engine.turns import Capacity
from holdfast.errors import NotReadyError, OverloadedError
from holdfast.lifecycle.states import State
from holdfast.request_context import RequestContext, current_request
from holdfast.settings import OverloadSettings
from holdfast.telemetry.collector import OwnRegistry
from holdfast.telemetry.counters import Refusals
from inner_app import View

# The line itself


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_seconds = 0.0

    def __call__(self) -> float:
        return self.now_seconds


def a_queue(capacity: float = 1, most_waiting: int = 100) -> FairQueue:
    return FairQueue(lambda: Capacity(capacity, capacity), most_waiting=most_waiting)


def admitted(queue: FairQueue, tickets: Sequence[Ticket]) -> list[str]:
    """The keys of tickets in the order in which they are admitted, one place after the other."""
    order: list[str] = []
    while waiting := [ticket for ticket in tickets if ticket.status == "waiting"]:
        queue.leave(next(ticket for ticket in tickets if ticket.status == "admitted"))
        order += [ticket.key for ticket in waiting if ticket.status == "admitted"]
    return order


def test_keys_take_turns() -> None:
    """A key that asks for much waits no less than one that asks for little."""
    queue = a_queue()
    tickets = [queue.join(key) for key in ("a", "a", "a", "a", "b", "c", "b")]
    assert admitted(queue, tickets) == ["a", "b", "c", "a", "b", "a"]


def test_no_request_overtakes_a_waiting_one() -> None:
    """Capacity that became free while the queue stood still goes to the longest-waiting request."""
    count = 0.0
    queue = FairQueue(lambda: Capacity(count, count), most_waiting=100)
    first = queue.join("a")
    count = 1.0
    second = queue.join("b")
    queue.advance()
    assert (first.status, second.status) == ("admitted", "waiting")


def test_a_full_queue_refuses() -> None:
    """Beyond the bound no request waits."""
    queue = a_queue(capacity=1, most_waiting=1)
    assert [queue.join("a").status for _ in range(3)] == ["admitted", "waiting", "refused"]


def test_a_full_queue_is_shared() -> None:
    """Another key displaces requests of the one that fills the queue, until both are equal."""
    queue = a_queue(capacity=1, most_waiting=4)
    crowd = [queue.join("a") for _ in range(5)]
    late = [queue.join("b") for _ in range(4)]
    assert [ticket.status for ticket in crowd] == ["admitted"] + ["waiting"] * 2 + ["refused"] * 2
    assert [ticket.status for ticket in late] == ["waiting"] * 2 + ["refused"] * 2


def test_a_request_that_needs_no_capacity_passes() -> None:
    """However full the engine is; it waits only while nobody is admitted."""
    count = 1.0
    queue = FairQueue(lambda: Capacity(count, count), most_waiting=2)
    queue.join("a")
    waiting = queue.join("a")
    assert queue.join("b", needs_capacity=False).status == "admitted"
    count = 0.0
    passer = queue.join("b", needs_capacity=False)
    assert queue.join("b", needs_capacity=False).status == "refused"
    count = 1.0
    queue.advance()
    assert (passer.status, waiting.status) == ("admitted", "waiting")


def test_a_request_without_capacity_shares_the_queue_too() -> None:
    """One key that fills it while nobody is admitted keeps no other out."""
    queue = a_queue(0, most_waiting=3)
    lookers = [queue.join("a", needs_capacity=False) for _ in range(3)]
    assert [queue.join("b").status for _ in range(2)] == ["waiting", "refused"]
    assert [ticket.status for ticket in lookers] == ["waiting", "waiting", "refused"]


def test_a_returning_request_is_before_those_that_wait_for_the_first_time() -> None:
    """Of its key, and behind those who came back earlier; other keys have their turn."""
    queue = a_queue(capacity=3)
    one, two, busy = (queue.join("a") for _ in range(3))
    for ticket in (one, two):
        queue.set_aside(ticket)
    fresh = [queue.join(key) for key in ("a", "a", "a", "b")]
    for ticket in (one, two):
        queue.come_back(ticket)
    assert (queue.admitted, queue.waiting) == (3, 4)
    for ticket in (busy, fresh[0]):
        queue.leave(ticket)
    assert [ticket.status for ticket in (one, two)] == ["admitted", "waiting"]
    assert [ticket.status for ticket in fresh[2:]] == ["waiting", "admitted"]


def test_no_admitted_request_is_refused_by_a_full_queue() -> None:
    """It comes back however many wait."""
    queue = a_queue(capacity=1, most_waiting=1)
    ticket = queue.join("a")
    queue.set_aside(ticket)
    others = [queue.join("a") for _ in range(2)]
    queue.come_back(ticket)
    assert (ticket.status, queue.waiting) == ("waiting", 2)
    queue.leave(others[0])
    assert (ticket.status, others[1].status) == ("admitted", "waiting")


class Queues(RuleBasedStateMachine):
    """Random lives of tickets, beside a model that is a list."""

    tickets = Bundle("tickets")
    keys, kept = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 2
        self.queue = FairQueue(
            lambda: Capacity(self.capacity, self.capacity),
            most_waiting=5,
            count_keys=lambda: self.keys,
        )
        self.joined: list[Ticket] = []
        self.returned: set[Ticket] = set()

    @rule(target=tickets, key=st.sampled_from("abc"), needs_capacity=st.booleans())
    def join(self, key: str, needs_capacity: bool) -> Ticket:
        before = self.queue.waiting
        ticket = self.queue.join(key, needs_capacity=needs_capacity)
        if ticket.status == "refused":
            assert before >= 5
        self.joined.append(ticket)
        return ticket

    @rule(ticket=consumes(tickets))
    def leave(self, ticket: Ticket) -> None:
        self.queue.leave(ticket)
        self.queue.leave(ticket)

    @rule(ticket=tickets)
    def refuse(self, ticket: Ticket) -> None:
        self.queue.refuse(ticket, "timed_out")

    @rule(capacity=st.integers(0, 4))
    def change(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue.advance()

    @invariant()
    def counts_are_those_of_the_tickets(self) -> None:
        waiting = [ticket for ticket in self.joined if ticket.status == "waiting"]
        admitted = [ticket for ticket in self.joined if ticket.status == "admitted"]
        assert self.queue.waiting == len(waiting) <= 5 + len(self.returned)
        assert self.queue.admitted == len(admitted)
        for key in "abc":
            of_key = sum(ticket.key == key for ticket in (*waiting, *admitted))
            assert self.queue.count(key) == of_key

    @rule(ticket=tickets)
    def release(self, ticket: Ticket) -> None:
        self.queue.release(ticket)

    @rule(ticket=tickets)
    def set_aside(self, ticket: Ticket) -> None:
        self.queue.set_aside(ticket)

    @rule(ticket=tickets)
    def come_back(self, ticket: Ticket) -> None:
        if ticket.needs_capacity:
            self.queue.come_back(ticket)
            self.returned.add(ticket)

    @invariant()
    def no_place_is_lost_and_none_is_given_twice(self) -> None:
        placed = sum(ticket.has_capacity for ticket in self.joined)
        wanting = any(t.status == "waiting" and t.needs_capacity for t in self.joined)
        assert placed >= self.capacity - self.kept or not wanting

    @invariant()
    def a_key_without_a_place_waits_only_for_a_full_engine(self) -> None:
        placed = {ticket.key for ticket in self.joined if ticket.has_capacity}
        waiting = {t.key for t in self.joined if t.status == "waiting" and t.needs_capacity}
        assert not waiting - placed or self.queue.waiting == 0 or self._count() >= self.capacity

    def _count(self) -> int:
        return sum(ticket.has_capacity for ticket in self.joined)

    @invariant()
    def a_key_is_served_in_order(self) -> None:
        for key in "abc":
            of_key = [t for t in self.joined if t.key == key and t.needs_capacity]
            of_key = [t for t in of_key if t not in self.returned]
            first = next((n for n, t in enumerate(of_key) if t.status == "waiting"), len(of_key))
            assert all(ticket.status != "admitted" for ticket in of_key[first:])


class SharedQueues(Queues):
    """Those of several keys, of which each leaves the others a place."""

    keys, kept = 3, 1


TestQueues = Queues.TestCase
TestSharedQueues = SharedQueues.TestCase


# What clients are told


def test_the_rate_is_that_of_a_full_engine() -> None:
    """An hour in which little was asked says nothing of what can be done."""
    clock = Clock()
    rate = ServiceRate(clock)
    clock.now_seconds = 3600.0
    rate.done()
    assert rate.per_second is None
    rate.saturated(is_saturated=True)
    for _ in range(20):
        clock.now_seconds += 0.5
        rate.done()
    rate.saturated(is_saturated=False)
    clock.now_seconds += 3600.0
    assert rate.per_second == pytest.approx(2.0, rel=0.05)


def test_the_rate_forgets() -> None:
    """An engine that has become slower is believed after a minute or two."""
    clock = Clock()
    rate = ServiceRate(clock)
    rate.saturated(is_saturated=True)
    for seconds in [0.1] * 1000 + [2.0] * 100:
        clock.now_seconds += seconds
        rate.done()
    assert rate.per_second == pytest.approx(0.5, rel=0.1)
    clock.now_seconds += 10 * MEMORY_SECONDS
    assert (rate.per_second or 1.0) < 0.01


@pytest.mark.parametrize(
    ("running", "engines", "bound", "expected"),
    [(16, 1, None, 18), (1, 1, None, 3), (256, 4, None, 1152), (16, 1, 10, 10), (16, 1, 0, 1)],
)
def test_places_keep_the_engine_full_and_its_queue_short(
    running: int, engines: int, bound: int | None, expected: int
) -> None:
    """A few more than run at once, and never more than vLLM's own bound."""
    facts = replace(
        FACTS, max_num_seqs=running, data_parallel_size=engines, max_queued_requests=bound
    )
    assert Capacity.of(facts).count == expected


@pytest.mark.parametrize(
    ("method", "path", "work"),
    [
        ("POST", "/v1/chat/completions", "engine"),
        ("POST", "/v1/responses", "engine"),
        ("POST", "/not/known/yet", "engine"),
        ("DELETE", "/v1/responses/1", "engine"),
        ("POST", "/tokenize/../v1/completions", "engine"),
        ("POST", "/resume/", "engine"),
        ("GET", "/v1/models", "none"),
        ("HEAD", "/v1/models", "none"),
        ("OPTIONS", "/v1/chat/completions", "none"),
        ("POST", "/tokenize", "rendering"),
        ("POST", "/base/detokenize", "rendering"),
        ("POST", "/resume", "none"),
        ("POST", "/v1/responses/resp_1/cancel", "none"),
        ("POST", "/v1/responses/a/b/cancel", "engine"),
    ],
)
def test_what_a_request_occupies(method: str, path: str, work: str) -> None:
    """The engine, if nothing else is known: what frees a full engine must never wait for it."""
    scope = {"type": "http", "method": method, "path": path}
    assert work_of(scope, "/base") == work
    assert work_of({"type": "websocket", "path": path}) == "session"


# The line before an application


class Shop:
    """A gate with few places before an application whose answers the test releases.

    A request says its key in `x-key`, in the place of the layer that knows keys.
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
        """Note the key, as the layer before the gate does."""
        headers = dict(scope.get("headers", ()))
        current_request().key = headers.get(b"x-key", b"").decode()
        await self._gate(scope, receive, send)

    def serving(self) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        """A client of it."""
        return serving(self)

    def release(self, answers: int = 1) -> None:
        """Let so many be answered."""
        for _ in range(answers):
            self._released.release()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when it is so."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0.01)

    async def until_there(self, *, admitted: int, waiting: int) -> None:
        """Return when so many are inside and wait."""
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
        """A call for each message."""
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
    """A request that is under way."""
    return asyncio.create_task(client.post(path, content=body, headers={"x-key": key}))


def test_who_waits_is_served_with_the_body_that_was_sent() -> None:
    """In the order of the keys' turns, and everybody once."""

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


def test_the_wait_of_who_was_let_in_is_counted() -> None:
    """One that came in at once, one that waited until then, and not the one that was refused."""

    async def scene() -> tuple[float, float, float]:
        shop = Shop(waiting=1)
        page = OwnRegistry(shop.admission.waits)

        def waited() -> tuple[float, float]:
            """How many, and how long together."""
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
    """A request whose body does not come."""
    url = client.base_url
    with socket.create_connection((url.host, url.port), DEADLINE_SECONDS) as wire:
        wire.sendall(b"POST /work HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf-")
        yield wire


def test_an_upload_that_takes_long_has_no_place() -> None:
    """Others are served meanwhile, and it is served when it is there."""

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


def test_a_client_that_reads_slowly_has_no_place_when_the_engine_is_done() -> None:
    """The next is admitted, while its answer is not given whole yet."""

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


def test_who_waits_for_something_else_than_the_engine_has_no_place() -> None:
    """Others are served meanwhile; then it is next, before those of its key that came later."""

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


def test_who_comes_back_when_no_engine_will_come_is_told_so() -> None:
    """As one that comes then, and it may be sent again."""

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
        return answer.text, counted(shop.refusals)["failed"], len(shop.at_work)

    assert asyncio.run(scene()) == ("NotReadyError", 1, 0)


def test_one_key_leaves_a_place_to_another() -> None:
    """However long its requests take; with a single key all places are in use."""

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


def test_what_renders_prompts_has_a_few_places_of_its_own() -> None:
    """Neither does it wait for a full engine, nor come all at once."""

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


def test_the_limit_of_a_key_is_for_what_renders_prompts_too() -> None:
    """`--max-requests-per-key` counts all that a key asks."""

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
    """By how long they took before, not by how fast the queue moves."""
    clock = Clock()
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
    """It is taken to last as long again, and not for a moment."""
    clock = Clock()
    durations = Durations(clock)
    durations.begin("a", 1)
    assert durations.left_seconds("a") == 5.0
    clock.now_seconds += 19.0
    assert durations.left_seconds("a") == 19.0


def test_the_wait_that_a_key_is_told_is_its_own() -> None:
    """Even though the queue has moved fast for all others."""

    async def scene() -> str:
        shop = Shop(capacity=1, per_key=1)
        async with shop.serving() as client:
            shop.admission.durations.begin("a", "earlier")
            shop.admission.durations.end("a", "earlier", took_seconds=60.0)
            asking = ask(client, "a")
            await shop.until_there(admitted=1, waiting=0)
            refused = await ask(client, "a")
            shop.release()
            await asking
        return str(refused.headers["retry-after"])

    assert 50 <= int(asyncio.run(scene())) <= 60


def test_beyond_the_line_is_429() -> None:
    """At once, as OpenAI's clients read it, and counted."""

    async def scene() -> httpx.Response:
        shop = Shop(waiting=1)
        async with shop.serving() as client:
            asking = [ask(client), ask(client)]
            await shop.until_there(admitted=1, waiting=1)
            refused = await ask(client)
            assert counted(shop.refusals)["overloaded"] == 1
            shop.release(2)
            assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
        return refused

    refused = asyncio.run(scene())
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "5"
    assert refused.headers["x-should-retry"] == "true"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", 429)


def test_with_no_waiting_allowed_only_the_places_are_served() -> None:
    """`--max-waiting 0`."""

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


def test_what_needs_no_place_is_answered_by_a_full_server() -> None:
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


def test_a_client_that_leaves_the_line_frees_its_place_in_it() -> None:
    """Whoever comes behind it is not held up."""

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


def test_a_client_that_leaves_inside_frees_its_place() -> None:
    """The next is admitted, though the first was never answered."""

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
def test_no_place_is_lost_when_clients_come_and_go(seed: int) -> None:
    """Whoever leaves, whenever, and whatever the state does: in the end all places are free."""
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


def test_a_key_has_so_many_requests_at_a_time() -> None:
    """`--max-requests-per-key`: beyond it 429, while other keys and those without go on."""

    async def scene() -> list[int]:
        shop = Shop(capacity=1, per_key=2)
        async with shop.serving() as client:
            asking = [ask(client, "a"), ask(client, "a")]
            await shop.until_there(admitted=1, waiting=1)
            refused = await ask(client, "a")
            assert counted(shop.refusals)["key_concurrency"] == 1
            asking += [ask(client, "b"), ask(client), ask(client), ask(client)]
            await shop.until_there(admitted=1, waiting=5)
            shop.release(6)
            return [
                refused.status_code,
                *(one.status_code for one in await asyncio.gather(*asking)),
            ]

    assert asyncio.run(scene()) == [429] + [200] * 6


def test_a_drain_serves_the_line() -> None:
    """Who waits for a place at SIGTERM is served; who comes later is not, and the drain waits."""

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


def test_the_line_stands_still_while_the_engine_is_replaced() -> None:
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


def test_the_line_is_refused_when_no_engine_comes() -> None:
    """503, so that another server takes them."""

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
    """Also for those who stood in line when the last one died: the promise is too long."""

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
    """One to the same server."""
    url = str(client.base_url).replace("http", "ws")
    return connect(f"{url}/v1/realtime", open_timeout=DEADLINE_SECONDS)


def test_a_websocket_beyond_what_its_key_may_have_is_closed_with_1013() -> None:
    """'Try again later', with the number of seconds in the reason."""

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


def test_an_open_websocket_has_no_place() -> None:
    """However many there are, requests are served; and it is let in to a full server."""

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


def test_a_call_of_a_websocket_has_a_place_while_it_is_at_work() -> None:
    """For which it waits like any request, and which is the next one's then."""

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
