"""Whether a server still answers, and what it can do; the tests of the command show the rest."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from asgi_server import serving
from holdfast.errors import UsageError
from holdfast.verify.records import Server
from holdfast.verify.survey import is_answering, survey
from holdfast.verify.target import Target
from openai_double import OpenAIDouble

NOTHING_KNOWN = Server(
    url="",
    model="",
    models=(),
    max_model_len=None,
    owner="",
    vllm="",
    abilities=(),
    routes=(),
)


@pytest.mark.parametrize(("closed", "is_there"), [(0, True), (1, True), (2, False)])
def test_one_connection_may_be_closed(closed: int, is_there: bool) -> None:
    """As one is that was kept, behind an error; a server that closes each is gone."""
    left = closed

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        await reader.readuntil(b"\r\n\r\n")
        if left:
            left -= 1
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def asked() -> bool:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Target(f"http://127.0.0.1:{port}") as target:
            return await is_answering(target, NOTHING_KNOWN)

    assert asyncio.run(asked()) is is_there


class Refusing(OpenAIDouble):
    """Answers every chat and every completion with one status."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self._status = status

    async def _chat(self, _request: Request) -> Response:
        return JSONResponse({}, self._status)

    async def _completion(self, _request: Request) -> Response:
        return JSONResponse({}, self._status)


class Proving(OpenAIDouble):
    """Says what a test likes of its proof."""

    def __init__(self, proof: dict[str, Any]) -> None:
        super().__init__()
        self._proof = proof

    async def _statusz(self, _request: Request) -> Response:
        return JSONResponse({"state": "READY", "engine": {}, "probe": self._proof})


def surveyed(app: OpenAIDouble) -> Server:
    async def found() -> Server:
        async with serving(app) as client, Target(str(client.base_url)) as target:
            return await survey(target)

    return asyncio.run(found())


@pytest.mark.parametrize(
    ("status", "is_there"), [(404, False), (400, False), (408, True), (429, True), (500, True)]
)
def test_a_route_without_time_is_there(status: int, is_there: bool) -> None:
    """As is one that fails; one that refuses the smallest request is not."""
    able = set(surveyed(Refusing(status)).abilities)
    assert ({"chat", "completions", "tools"} <= able) is is_there


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_may_be_asked_for_only_where_answers_come_from(status: int) -> None:
    """The error is that of a list of models that asks for one."""
    with pytest.raises(UsageError, match=f"the server asks for a key .HTTP {status}"):
        surveyed(Refusing(status))


def test_only_plain_values_of_a_proof_are_kept() -> None:
    """The report has them, and has no room for what a server may nest or repeat."""
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    holdfast = surveyed(Proving({"passed": True, "limited": deep, "proven_tokens": 640})).holdfast
    assert holdfast is not None
    assert holdfast.proof == {"passed": True, "limited": None, "proven_tokens": 640}
