"""The probe reads over a connection exactly what was sent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from asgi_server import DEADLINE_SECONDS, serving
from holdfast.errors import ProbeFailedError
from holdfast.probe import client

BREAKS = "\x85\u2028\u2029"
"""The characters that str.splitlines takes for the end of a line, and JSON leaves unescaped."""


def events(text: str) -> bytes:
    """Return a whole streamed answer of one choice, as vLLM writes it."""
    choice = {"index": 0, "text": text, "finish_reason": "length"}
    sent: list[Any] = [{"choices": [choice]}, {"choices": [], "usage": {"completion_tokens": 1}}]
    lines = [json.dumps(event, ensure_ascii=False) for event in sent]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()


async def read_in_parts(parts: list[bytes]) -> None:
    """Have the probe read an answer that comes in these parts."""

    async def answer(_: Request) -> StreamingResponse:
        return StreamingResponse(iterate_in_threadpool(parts))

    app = Starlette(routes=[Route(client.COMPLETIONS, answer, methods=["POST"])])
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        serving(app) as http,
        client.stream(http, client.Message(client.COMPLETIONS, {})) as stream,
    ):
        await stream.until_all_began()
        await stream.to_its_end()


@pytest.mark.parametrize("text", BREAKS)
def test_text_that_looks_like_the_end_of_a_line_is_read(text: str) -> None:
    """A model may answer with any character, and the proof passes."""
    asyncio.run(read_in_parts([events(f"a{text}b")]))


def test_events_may_come_in_any_parts() -> None:
    """An event, or a character, that comes in two parts is read whole."""
    asyncio.run(read_in_parts([bytes([byte]) for byte in events("\u2028")]))


def test_stream_that_is_cut_off_is_not_an_answer() -> None:
    """An answer without its last line was not served whole."""
    with pytest.raises(ProbeFailedError, match="closed its stream"):
        asyncio.run(read_in_parts([events("a").removesuffix(b"data: [DONE]\n\n")]))
