"""How much a key may send: what counts, what does not, and what a client is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from asgi_server import DEADLINE_SECONDS, serving
from counter_values import counter_values
from holdfast.api.auth import KeyCheck, Keys
from holdfast.api.keyring import LOOK_SECONDS, Keyring
from holdfast.api.quotas import MINUTE_SECONDS, Quotas
from holdfast.request_context import RequestContext, current_request
from holdfast.settings import KeySettings
from holdfast.telemetry.counters import Refusals
from holdfast.telemetry.key_usage import DAY_SECONDS, KeyUsage, Used
from stub_engine import FakeClock

RATE, TOKENS = "max_requests_per_minute=2", "max_tokens_per_day=100"
WORK = "/v1/chat/completions"


class Tenants:
    """Quotas behind a key check, before an application that does what the path of a test says."""

    def __init__(self, path: Path, *lines: str) -> None:
        self.path = path
        path.write_text("\n".join(lines))
        self.clock = FakeClock()
        self.wall_clock = FakeClock()
        self.refusals = Refusals()
        self.keyring = Keyring([], path, clock=self.clock, wall_clock=lambda: 2.0**40)
        self.usage = KeyUsage(lambda: self.keyring.names, self.wall_clock)
        self.served: list[RequestContext] = []
        self.arrived = asyncio.Semaphore(0)
        self.released = asyncio.Event()
        quotas = Quotas(self._serve, self.keyring, self.usage, self.refusals, clock=self.clock)
        keys = Keys(self.keyring, Keys.read((), KeySettings(admin_api_key="admin-key")).admin)
        self.app = KeyCheck(quotas, keys, self.refusals, is_probe=lambda _: False)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
            return
        context = current_request()
        self.served.append(context)
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            context.given_to(1)
            context.count_tokens(5, 6)
            await send({"type": "websocket.close", "code": 1000})
            return
        words = scope["query_string"].decode().split("&")
        if "held" in words:
            self.arrived.release()
            await self.released.wait()
        if "refused" not in words:
            context.given_to(1)
            context.given_to(1)
            context.count_tokens(20, 10)
            context.count_tokens(0, 30)
        if "broken" in words:
            raise RuntimeError("broken on purpose")
        await PlainTextResponse("done")(scope, receive, send)

    def play(self, scene: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        """Run a scene with a client, within a deadline."""

        async def within_time() -> None:
            async with asyncio.timeout(DEADLINE_SECONDS), serving(self.app) as client:
                await scene(client)

        asyncio.run(within_time())


async def ask(
    client: httpx.AsyncClient, key: str = "key-of-alice", path: str = WORK, method: str = "POST"
) -> httpx.Response:
    """One request of a key."""
    headers = {"authorization": f"Bearer {key}"}
    return await client.request(method, path, headers=headers)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the key file is."""
    return tmp_path / "keys"


def test_what_a_request_used_is_counted_for_its_key(path: Path) -> None:
    """Once for a request, however many engine requests it makes and engines it has."""
    tenants = Tenants(path, "alice: key-of-alice", "alice: second-key-of-alice", "bob: key-of-bob")

    async def scene(client: httpx.AsyncClient) -> None:
        for key in ("key-of-alice", "second-key-of-alice"):
            assert (await ask(client, key)).status_code == 200

    tenants.play(scene)
    assert tenants.usage.totals() == {"alice": Used(2, 40, 80), "bob": Used()}


def test_a_broken_answer_counts_what_was_generated(path: Path) -> None:
    """The engine has done the work."""
    tenants = Tenants(path, "alice: key-of-alice")

    async def scene(client: httpx.AsyncClient) -> None:
        assert (await ask(client, path=f"{WORK}?broken")).status_code == 500

    tenants.play(scene)
    assert tenants.usage.totals() == {"alice": Used(1, 20, 40)}


def test_what_no_engine_was_given_does_not_count(path: Path) -> None:
    """Neither for the counts nor for the limit: a refusal, and routes that need no engine."""
    tenants = Tenants(path, f"alice: key-of-alice {RATE}")

    async def scene(client: httpx.AsyncClient) -> None:
        for _ in range(5):
            assert (await ask(client, path=f"{WORK}?refused")).status_code == 200
            assert (await ask(client, path="/v1/models?refused", method="GET")).status_code == 200
            assert (await ask(client, path="/tokenize?refused")).status_code == 200
        assert tenants.usage.totals() == {"alice": Used()}
        assert [(await ask(client)).status_code for _ in range(3)] == [200, 200, 429]
        assert (await ask(client, path="/v1/models?refused", method="GET")).status_code == 200
        assert (await ask(client, path="/tokenize?refused")).status_code == 200

    tenants.play(scene)


def test_a_client_is_told_when_its_minute_has_room(path: Path) -> None:
    """Then there is room, and not before; no other key waits for it."""
    tenants = Tenants(path, f"alice: key-of-alice {RATE}", f"bob: key-of-bob {RATE}", "free")

    async def scene(client: httpx.AsyncClient) -> None:
        assert (await ask(client)).status_code == 200
        tenants.clock.now_seconds += 10
        assert (await ask(client)).status_code == 200
        tenants.clock.now_seconds += 10
        refused = await ask(client)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == str(int(MINUTE_SECONDS) - 20)
        assert refused.headers["x-should-retry"] == "true"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "2 requests a minute" in refused.json()["error"]["message"]
        for key in ("key-of-bob", "free", "free", "free"):
            assert (await ask(client, key)).status_code == 200
        tenants.clock.now_seconds += MINUTE_SECONDS - 20.5
        assert (await ask(client)).headers["retry-after"] == "1"
        tenants.clock.now_seconds += 0.5
        assert [(await ask(client)).status_code for _ in range(2)] == [200, 429]
        assert (await ask(client)).headers["retry-after"] == "10"

    tenants.play(scene)
    assert counter_values(tenants.refusals)["key_request_rate"] == 4
    assert tenants.usage.totals()["alice"].requests == 3


def test_requests_that_arrive_together_are_all_counted(path: Path) -> None:
    """Also while none of them has reached an engine; one that never does makes room again."""
    tenants = Tenants(path, f"alice: key-of-alice {RATE}")

    async def scene(client: httpx.AsyncClient) -> None:
        paths = (f"{WORK}?held", f"{WORK}?held&refused")
        waiting = [asyncio.create_task(ask(client, path=path)) for path in paths]
        for _ in waiting:
            await tenants.arrived.acquire()
        assert (await ask(client)).status_code == 429
        tenants.released.set()
        assert [(await one).status_code for one in waiting] == [200, 200]
        assert [(await ask(client)).status_code for _ in range(2)] == [200, 429]

    tenants.play(scene)


def test_what_begins_after_its_response_counts(path: Path) -> None:
    """A background response is answered before its engine request is made."""
    tenants = Tenants(path, f"alice: key-of-alice {RATE}")

    async def scene(client: httpx.AsyncClient) -> None:
        assert (await ask(client, path=f"{WORK}?refused")).status_code == 200
        tenants.served[0].given_to(1)
        tenants.served[0].count_tokens(3, 4)
        assert [(await ask(client)).status_code for _ in range(2)] == [200, 429]

    tenants.play(scene)
    assert tenants.usage.totals() == {"alice": Used(2, 23, 44)}


def test_tokens_of_a_day_are_limited_until_the_next(path: Path) -> None:
    """What has begun is finished; a client is told to wait for the rest of the day."""
    tenants = Tenants(path, f"alice: key-of-alice {TOKENS}")
    tenants.wall_clock.now_seconds = 9 * DAY_SECONDS - 5000.5

    async def scene(client: httpx.AsyncClient) -> None:
        assert [(await ask(client)).status_code for _ in range(3)] == [200, 200, 429]
        refused = await ask(client)
        assert refused.headers["retry-after"] == "5001"
        assert refused.headers["x-should-retry"] == "false"
        assert "100 tokens" in refused.json()["error"]["message"]
        tenants.wall_clock.now_seconds += 5000.5
        assert (await ask(client)).status_code == 200

    tenants.play(scene)
    assert counter_values(tenants.refusals)["key_daily_tokens"] == 2
    assert tenants.usage.totals() == {"alice": Used(3, 60, 120)}


def test_a_changed_file_changes_limits_and_keeps_counts(path: Path) -> None:
    """For a key that is changed under its name, too."""
    tenants = Tenants(path, f"alice: key-of-alice {TOKENS} {RATE}")

    async def scene(client: httpx.AsyncClient) -> None:
        assert [(await ask(client)).status_code for _ in range(3)] == [200, 200, 429]
        tenants.path.write_text("alice: new-key-of-alice max_requests_per_minute=4\n")
        tenants.clock.now_seconds += LOOK_SECONDS
        assert (await ask(client)).status_code == 401
        new = [(await ask(client, "new-key-of-alice")).status_code for _ in range(3)]
        assert new == [200, 200, 429]
        tenants.path.write_text("alice: new-key-of-alice max_tokens_per_day=300\n")
        tenants.clock.now_seconds += LOOK_SECONDS
        new = [(await ask(client, "new-key-of-alice")).status_code for _ in range(2)]
        assert new == [200, 429]

    tenants.play(scene)
    assert tenants.usage.totals() == {"alice": Used(5, 100, 200)}


def test_a_limit_that_is_lowered_holds_at_once(path: Path) -> None:
    """The wait is until there are fewer requests than it allows."""
    tenants = Tenants(path, "alice: key-of-alice max_requests_per_minute=3")

    async def scene(client: httpx.AsyncClient) -> None:
        for _ in range(3):
            assert (await ask(client)).status_code == 200
            tenants.clock.now_seconds += 10
        tenants.path.write_text("alice: key-of-alice max_requests_per_minute=1\n")
        assert (await ask(client)).headers["retry-after"] == str(int(MINUTE_SECONDS) - 10)

    tenants.play(scene)


def test_a_websocket_over_its_limit_is_closed(path: Path) -> None:
    """With a code that its client sees, and when to come back; one that ran is counted."""
    tenants = Tenants(path, "alice: key-of-alice max_requests_per_minute=1")

    async def scene(client: httpx.AsyncClient) -> None:
        url = f"{str(client.base_url).replace('http', 'ws')}/v1/realtime"
        headers = {"authorization": "Bearer key-of-alice"}
        closed = []
        for _ in range(2):
            async with connect(url, additional_headers=headers) as connection:
                with pytest.raises(ConnectionClosed):
                    await connection.recv()
                closed.append((connection.close_code, connection.close_reason))
        assert closed == [(1000, ""), (1013, "retry after 60 s")]

    tenants.play(scene)
    assert tenants.usage.totals() == {"alice": Used(1, 5, 6)}


def test_operators_are_not_counted(path: Path) -> None:
    """Their commands reach a server whatever clients have used, and an admin key has no limit."""
    tenants = Tenants(path, f"alice: key-of-alice {RATE}")

    async def scene(client: httpx.AsyncClient) -> None:
        for _ in range(3):
            assert (await ask(client, "admin-key", "/pause?refused")).status_code == 200

    tenants.play(scene)
    assert tenants.usage.totals() == {"alice": Used()}
