"""Whether a server still answers; the rest of the survey is seen in the tests of the command."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.verify.records import Server
from holdfast.verify.survey import is_answering
from holdfast.verify.target import Target

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
