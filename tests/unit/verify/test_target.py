"""Which connections a target uses; the rest of it is seen in the tests of the command."""

from __future__ import annotations

import asyncio

import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from asgi_server import serving
from holdfast.verify import target
from holdfast.verify.records import Request


@pytest.mark.parametrize(("idle_seconds", "connections"), [(0.0, 3), (60.0, 1)])
def test_a_connection_that_was_idle_is_not_used_again(
    idle_seconds: float, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may be about to close it."""
    monkeypatch.setattr(target, "IDLE_SECONDS", idle_seconds)
    seen = set[object]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            seen.add(tuple(scope["client"]))
            await JSONResponse({})(scope, receive, send)

    async def ask() -> None:
        async with (
            serving(app) as client,
            target.Target(str(client.base_url).rstrip("/")) as found,
        ):
            for _ in range(3):
                await found.ask(Request("GET", "/"))

    asyncio.run(ask())
    assert len(seen) == connections
