"""A key that uses up its day while its requests wait, or while a WebSocket is open."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from websockets.asyncio.client import connect

from asgi_server import DEADLINE_SECONDS
from counter_values import counter_values
from holdfast.api.keyring import Keyring
from holdfast.api.quotas import Quotas
from holdfast.telemetry.counters import Refusals
from holdfast.telemetry.key_usage import KeyUsage
from small_server import SmallServer, ask
from stub_engine import FakeClock

LIMIT_TOKENS = 100


class LimitedServer(SmallServer):
    """A server that works on one request, whose only key has a limit of tokens a day."""

    def __init__(self, path: Path) -> None:
        path.write_text(f"alice: key-of-alice max_tokens_per_day={LIMIT_TOKENS}\n")
        self.used = KeyUsage(clock=FakeClock())
        self.quota_refusals = Refusals()
        keyring = Keyring([], path)
        super().__init__(around=lambda gate: Quotas(gate, keyring, self.used, self.quota_refusals))

    def use_up(self) -> None:
        """Have the request at work use the tokens of the day."""
        self.at_work[-1].count_tokens(LIMIT_TOKENS // 2, LIMIT_TOKENS // 2)


def test_a_request_that_waited_is_refused_once_the_day_is_used_up(tmp_path: Path) -> None:
    """As one that comes then: otherwise a full queue would be a way around the limit."""
    server = LimitedServer(tmp_path / "keys")

    async def scene() -> tuple[httpx.Response, httpx.Response]:
        async with server.serving() as client:
            first, waiting = ask(client, "alice"), ask(client, "alice")
            await server.until_there(admitted=1, waiting=1)
            server.use_up()
            server.release(2)
            assert (await first).status_code == 200
            refused = await waiting
            await server.until_there(admitted=0, waiting=0)
            return refused, await ask(client, "alice")

    waited, came_later = asyncio.run(scene())
    assert waited.status_code == came_later.status_code == 429
    assert waited.json() == came_later.json()
    for name in ("retry-after", "x-should-retry"):
        assert waited.headers[name] == came_later.headers[name]
    assert waited.headers["x-should-retry"] == "false"
    assert int(waited.headers["retry-after"]) > 120
    assert counter_values(server.quota_refusals)["key_daily_tokens"] == 2
    assert len(server.at_work) == 1


def test_a_call_of_an_open_websocket_is_refused_once_the_day_is_used_up(tmp_path: Path) -> None:
    """Each of its calls is checked, since it may stay open for days."""
    server = LimitedServer(tmp_path / "keys")

    async def scene() -> list[str | bytes]:
        async with server.serving() as client:
            url = str(client.base_url).replace("http", "ws")
            async with connect(
                f"{url}/v1/realtime",
                additional_headers={"x-key": "alice"},
                open_timeout=DEADLINE_SECONDS,
            ) as connection:
                await connection.send("")
                await server.until(lambda: len(server.at_work) == 1)
                server.use_up()
                server.release(2)
                said = [await connection.recv()]
                await connection.send("")
                return [*said, await connection.recv()]

    assert asyncio.run(scene()) == ["done", "KeyUsedUpError"]
    assert counter_values(server.quota_refusals)["key_daily_tokens"] == 1
