"""Which connections and encodings a target uses, and what it hides; the command shows the rest."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from pathlib import Path
from typing import Any

import pytest
import starlette.requests
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from asgi_server import serving
from holdfast.verify import target
from holdfast.verify.records import Request
from holdfast.verify.streams import StreamedAnswer
from self_signed import certificate


def test_no_connection_is_used_twice() -> None:
    """The server may be about to close it."""
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
    assert len(seen) == 3


def test_an_answer_may_come_as_late_as_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that keeps clients over a recovery sends nothing for minutes."""
    monkeypatch.setattr(target, "REQUEST_SECONDS", 0.05)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await asyncio.sleep(0.3)
            await JSONResponse({})(scope, receive, send)

    async def ask() -> int:
        async with (
            serving(app) as client,
            target.Target(str(client.base_url).rstrip("/")) as found,
        ):
            return (await found.ask(Request("GET", "/"), deadline_seconds=30)).status

    assert asyncio.run(ask()) == 200


@pytest.mark.parametrize(
    ("events", "kind", "is_parsed"),
    [
        (10, "Text/Event-Stream", False),
        (150_000, "Text/Event-Stream", True),
        (150_000, "Application/JSON", True),
    ],
)
def test_a_long_stream_is_taken_apart_before_a_check_asks(
    events: int, kind: str, is_parsed: bool
) -> None:
    """In a thread: where it takes seconds, Ctrl-C would wait for it."""
    body = b"data: {}\n\n" * events + b"data: [DONE]\n\n"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Response(body, media_type=kind)(scope, receive, send)

    async def ask() -> StreamedAnswer:
        async with (
            serving(app) as client,
            target.Target(str(client.base_url).rstrip("/")) as found,
        ):
            return await found.stream(Request("GET", "/"))

    answer = asyncio.run(ask())
    assert ("documents" in vars(answer)) is is_parsed
    assert len(answer.documents) == events
    assert answer.content_type.startswith(kind)


def asked(body: bytes, encoding: str) -> tuple[str, str]:
    """What a client accepts, and what it reads of an answer with an encoding."""
    accepted = ""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal accepted
        if scope["type"] == "http":
            accepted = dict(scope["headers"])[b"accept-encoding"].decode()
            headers = {"Content-Encoding": encoding}
            await Response(body, headers=headers)(scope, receive, send)

    async def ask() -> str:
        async with (
            serving(app) as client,
            target.Target(str(client.base_url).rstrip("/")) as found,
        ):
            return (await found.ask(Request("GET", "/"))).text

    read = asyncio.run(ask())
    return accepted, read


def test_an_answer_comes_as_it_is() -> None:
    """No other encoding is accepted."""
    assert asked(b"{}", "identity") == ("identity", "{}")


@pytest.mark.parametrize("part", [b"[", b"{}\n,"])
def test_an_answer_that_would_fill_the_memory_is_refused(part: bytes) -> None:
    """A value of two bytes takes a hundred; no honest answer has as many."""
    assert asked(part * 1_000_000, "identity")[1].startswith(part.decode())
    with pytest.raises(target.NoAnswerError, match=r"more than 3,000,000 `\{`, `\[` and `,`"):
        asked(part * 3_000_001, "identity")


def test_a_packed_answer_is_refused() -> None:
    """Unpacked, it may be a thousand times as long as what was counted."""
    with pytest.raises(target.NoAnswerError, match="the answer is encoded as 'gzip'"):
        asked(gzip.compress(b"{}"), "gzip")


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    """Otherwise the API key could be sent to the wrong server."""
    cert, key = certificate(tmp_path)

    async def ask() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, target.Target(url) as found:
            await found.ask(Request("GET", "/"))

    with pytest.raises(target.NoAnswerError, match="CERTIFICATE_VERIFY_FAILED"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("url", "hidden"),
    [
        ("http://x", ("a-key",)),
        ("http://ada:enig%40ma@x", ("a-key", "enig%40ma", "enig@ma", "YWRhOmVuaWdAbWE=")),
        ("http://ada:enigma@x", ("a-key", "enigma", "YWRhOmVuaWdtYQ==")),
        ("http://holdfast@x", ("a-key", "aG9sZGZhc3Q6")),
        *(
            (f"http://{key}@x", ("a-key", "sk-live-01234567", "c2stbGl2ZS0wMTIzNDU2Nzo="))
            for key in ("sk-live-01234567", "sk-live-01234567:")
        ),
    ],
)
def test_a_password_is_hidden_in_every_form(url: str, hidden: tuple[str, ...]) -> None:
    """As the address has it, decoded, and as Basic authorization sends it.

    A key in place of the user is hidden like a password. A name is not: "holdfast" stands in every
    report.
    """
    assert target.Target(url, "a-key").secrets == hidden
    assert set(target.Target(url, "a-key", "an-admin-key").secrets) == {*hidden, "an-admin-key"}


def test_half_a_character_is_sent_as_it_came() -> None:
    """A server may have it in the name of a model; UTF-8 has no bytes for it."""
    body, got = {"model": "\ud800"}, dict[str, Any]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = starlette.requests.Request(scope, receive)
            got.update(json.loads(await request.body()), kind=request.headers["content-type"])
            await JSONResponse({})(scope, receive, send)

    async def ask() -> None:
        async with (
            serving(app) as client,
            target.Target(str(client.base_url).rstrip("/")) as found,
        ):
            await found.ask(Request("POST", "/", body))

    asyncio.run(ask())
    assert got == {**body, "kind": "application/json"}
