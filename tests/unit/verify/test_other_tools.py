"""Other people's tools: they see one server, for as long as their check, and are gone after it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import psutil
import pytest
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from asgi_server import serving
from holdfast.verify import other_tools, packages
from holdfast.verify.answers import ELLIPSIS
from holdfast.verify.check import Check
from holdfast.verify.checks import tools, wire
from holdfast.verify.other_tools import Row, Wish, rows_of
from holdfast.verify.records import CheckStatus
from holdfast.verify.trial import InconclusiveError
from openai_double import OpenAIDouble
from several_models import Several
from verified import results

PROBE = [check for check in tools.CHECKS if check.name == "probe"]
MODELS = "catalog.native-model-discovery"
"""The row about the list of models."""
SWEEP = "callability.advertised-models"
"""The row about the first of them."""
PROVIDER = [check for check in wire.CHECKS if check.name == "provider_check"]
TOO_MUCH = "import fcntl; fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20); print('[' * 9_000_000)"
"""Through a pipe of that size more arrives at once than asyncio keeps, so that it stops reading."""


def need(module: str) -> None:
    """Skip the test where the package is missing."""
    if not packages.has_module(module):
        pytest.skip(f"{packages.DISTRIBUTIONS[module]} is not installed: {packages.REMEDY}")


class Endless(OpenAIDouble):
    """Never ends a stream, and never stops to send."""

    has_begun = False
    """Whether it sends one."""

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        if not body.get("stream"):
            return await super()._chat(request)
        return StreamingResponse(self._drops(), media_type="text/event-stream")

    async def _drops(self) -> AsyncIterator[bytes]:
        while True:
            self.has_begun = True
            yield b": still here\n\n"
            await asyncio.sleep(0.05)


class Redirecting(OpenAIDouble):
    """Sends those that ask for its models to another server."""

    def __init__(self, elsewhere: str) -> None:
        super().__init__()
        self._elsewhere = elsewhere

    async def _models(self, request: Request) -> Response:
        return RedirectResponse(f"{self._elsewhere}{request.url.path}", 307)


@pytest.mark.parametrize(
    ("module", "checks"), [("canitoolcall", PROBE), ("tr_provider_check", PROVIDER)]
)
def test_a_stream_without_an_end_does_not_outlast_the_check(
    module: str, checks: list[Check]
) -> None:
    """It ends at its deadline, and no process is left that reads on."""
    need(module)
    others = set(psutil.Process().children(recursive=True))
    app = Endless()
    (made,) = results(app, [replace(checks[0], deadline_seconds=5.0)]).values()
    assert made.status is CheckStatus.INCONCLUSIVE
    assert "it took more than 5 s" in made.reason
    assert app.has_begun
    assert {*psutil.Process().children(recursive=True)} <= others


def test_a_redirect_to_another_port_is_not_followed() -> None:
    """The other server sees nothing, least of all the key."""
    need("tr_provider_check")
    seen: list[str] = []

    async def other(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            seen.append(scope["path"])
            await Response("{}")(scope, receive, send)

    async def told() -> tuple[Row, ...]:
        async with (
            serving(other) as there,
            serving(Redirecting(str(there.base_url))) as client,
        ):
            return await rows_of(Wish("provider-check", str(client.base_url), "double", "a-key"))

    (models,) = (row for row in asyncio.run(told()) if row.name == MODELS)
    assert models.status != "pass"
    assert seen == []


@pytest.mark.parametrize(
    ("app", "statuses"),
    [(OpenAIDouble(), ["pass"]), (Several("embeddings"), [])],
    ids=("the first model", "another model"),
)
def test_a_model_that_nobody_asked_about_is_not_judged(
    app: OpenAIDouble, statuses: list[str]
) -> None:
    """A gateway may list one for embeddings first, which answers no chats."""
    need("tr_provider_check")

    async def told() -> tuple[Row, ...]:
        async with serving(app) as client:
            return await rows_of(Wish("provider-check", str(client.base_url), "double"))

    rows = asyncio.run(told())
    assert [row.status for row in rows if row.name == SWEEP] == statuses
    assert {row.status for row in rows if row.name.startswith("chat.")} == {"pass"}


def test_a_proxy_of_the_environment_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only it knows the name of the server."""
    need("tr_provider_check")

    async def told() -> tuple[Row, ...]:
        async with serving(OpenAIDouble()) as client:
            monkeypatch.setenv("http_proxy", str(client.base_url))
            return await rows_of(Wish("provider-check", "http://nowhere.invalid", "double"))

    (models,) = (row for row in asyncio.run(told()) if row.name == MODELS)
    assert models.status == "pass"


def test_a_tool_that_fails_proves_nothing() -> None:
    """The check is inconclusive, and says what the tool's process said last, without a key."""
    wish = Wish("canitoolcall", "a-secret:bad", "double", secrets=("a-secret",))
    with pytest.raises(InconclusiveError, match="canitoolcall ended with 1: ") as caught:
        asyncio.run(rows_of(wish))
    assert "a-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('no rows')", "what it wrote is not a list of rows"),
        (TOO_MUCH, "wrote more than"),
        ("import sys; sys.exit('out of luck')", "ended with 1: out of luck"),
        ("import sys; sys.exit('x' * 20_000)", "ended with 1: its last line is too long"),
        ("import os; os.kill(os.getpid(), 9)", "ended with -9: it said nothing"),
    ],
)
def test_what_is_not_a_list_of_rows_is_not_read(
    program: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the process ends, and however much it writes."""
    monkeypatch.setattr(other_tools, "_COMMAND", (sys.executable, "-c", program))
    with pytest.raises(InconclusiveError, match=said):
        asyncio.run(rows_of(Wish("canitoolcall", "http://127.0.0.1:1", "double")))


def test_a_row_is_short_and_has_no_key() -> None:
    """The key is hidden before the text is cut, so that no part of it is left."""
    key = "sk-holdfast-0123456789"
    text = "." * (other_tools._TEXT_CHARACTERS - 4) + key
    row = other_tools._bounded(Row(text, "fail", text, (text,) * 100), (key,))
    written = [row.name, row.said, *row.warnings]
    assert all("sk-" not in one for one in written)
    assert max(map(len, written)) == other_tools._TEXT_CHARACTERS + len(ELLIPSIS)
    assert len(row.warnings) == other_tools._MAX_WARNINGS
