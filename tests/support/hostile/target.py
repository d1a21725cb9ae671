"""The server under attack, as an adversary reaches it: raw bytes, bounded in time and size."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

KIB = 1024
MIB = 1024 * KIB
MAX_ANSWER_BYTES = 4 * MIB
QUERY_MARK = "sekret-of-somebody"
"""Stands in every query string and guessed key: no line of a log may hold it."""

Outcomes = Counter[str]
"""What became of the requests of an attack: a status, or how the connection ended."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server listens, the one key of the adversary, and its own random choices."""

    port: int
    key: str
    model: str
    chosen: Random
    seconds: float
    """No attack takes much longer."""

    @asynccontextmanager
    async def connected(
        self, *, receive_bytes: int = 0
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection, aborted in the end whatever it still has to say."""
        more: dict[str, Any] = {"limit": receive_bytes} if receive_bytes else {}
        opening = asyncio.open_connection("127.0.0.1", self.port, **more)
        reader, writer = await asyncio.wait_for(opening, self.seconds)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def head(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        *,
        has_key: bool = True,
    ) -> bytes:
        """A first line and headers, up to and with the empty line."""
        known = {"Host": "x", **({"Authorization": f"Bearer {self.key}"} if has_key else {})}
        lines = [f"{name}: {value}" for name, value in (known | dict(headers or {})).items()]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()

    async def get(
        self, path: str, headers: Mapping[str, str] | None = None, *, has_key: bool = True
    ) -> str:
        """What becomes of one GET."""
        more = {"Connection": "close", **(headers or {})}
        return await self.said(self.head("GET", path, more, has_key=has_key))

    async def post(
        self, path: str, body: bytes | Mapping[str, Any], seconds: float | None = None
    ) -> str:
        """What becomes of one POST of JSON; left without a word after `seconds`."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.said(self.head("POST", path, _json(len(sent))) + sent, seconds)

    async def complete(
        self, options: Mapping[str, Any], seconds: float | None = None, *, prompt: Any = "hostile"
    ) -> str:
        """What becomes of one completion."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, **options}
        return await self.post("/v1/completions", body, seconds)

    async def chat(self, options: Mapping[str, Any], seconds: float | None = None) -> str:
        """What becomes of one chat."""
        messages = [{"role": "user", "content": f"hostile {self.chosen.random()}"}]
        body = {"model": self.model, "messages": messages, "max_tokens": 8, **options}
        return await self.post("/v1/chat/completions", body, seconds)

    async def said(self, request: bytes, seconds: float | None = None) -> str:
        """The status that answers these bytes, or how it ended without one."""
        answer = bytearray()
        try:
            async with asyncio.timeout(seconds or self.seconds), self.connected() as (reader, out):
                sending = asyncio.create_task(_sent(out, request))
                try:
                    while len(answer) < MAX_ANSWER_BYTES and (part := await reader.read(64 * KIB)):
                        answer += part
                finally:
                    sending.cancel()
        except TimeoutError:
            return status_of(answer) or "left"
        except OSError:
            return status_of(answer) or "reset"
        return status_of(answer) or "closed"


def status_of(answer: bytes | bytearray) -> str:
    """The status of an answer; nothing if there is none."""
    words = bytes(answer[:16]).split(b" ")
    return words[1].decode() if len(words) > 1 and words[0].startswith(b"HTTP/") else ""


async def told(attempts: Iterable[Awaitable[str]]) -> Outcomes:
    """What became of all of these, made at once."""
    return Counter(await asyncio.gather(*attempts))


async def until_ended(reader: asyncio.StreamReader, seconds: float) -> str:
    """What the server says to a connection that says no more: a status, `closed`, or `open`."""
    answer = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while part := await reader.read(64 * KIB):
                answer = (answer + part)[: 64 * KIB]
    except TimeoutError:
        return status_of(answer) or "open"
    except OSError:
        return status_of(answer) or "reset"
    return status_of(answer) or "closed"


async def _sent(writer: asyncio.StreamWriter, request: bytes) -> None:
    with contextlib.suppress(OSError):
        for start in range(0, len(request), MIB):
            writer.write(request[start : start + MIB])
            await writer.drain()


def _json(length: int) -> dict[str, str]:
    return {
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(length),
    }
