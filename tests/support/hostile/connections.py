"""Attacks on connections: nothing here needs a request that is served."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType

import attacks
from hostile.target import KIB, MIB, Outcomes, Target, told, until_ended

DRIP_BYTES = 1280
"""More than 1 KiB a second, which is the least that a body may bring."""
WEBSOCKET = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
H2C = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABk"}


async def upgrades_with_bodies(target: Target) -> Outcomes:
    """Upgrades to WebSocket that announce a body, which never comes."""
    framing = [{"Content-Length": "5"}, {"Transfer-Encoding": "chunked"}]
    return await told(
        _held(target, target.head("GET", "/v1/x", WEBSOCKET | framing[number % 2], has_key=False))
        for number in range(60)
    )


async def refused_handshakes(target: Target) -> Outcomes:
    """Upgrades with a header that the protocol of WebSockets refuses and ours lets through."""
    head = target.head("GET", "/v1/x", {**WEBSOCKET, "X": "x" * 20 * KIB})
    return await told(_held(target, head) for _ in range(30))


async def silence(target: Target) -> Outcomes:
    """Connections that say nothing, or the first bytes of TLS."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    return await told(_held(target, target.chosen.choice((b"", hello))) for _ in range(200))


async def slow_bodies(target: Target) -> Outcomes:
    """Bodies of 32 MiB that come at 1.2 KiB/s, on as many connections as there are places."""
    paths = ("/v1/completions", "/v1/chat/completions", "/tokenize")
    return await told(_dripped(target, target.chosen.choice(paths)) for _ in range(24))


async def upgrades_to_http2(target: Target) -> Outcomes:
    """Upgrades to h2c and CONNECT with a body that is a request, in one segment and in two."""
    smuggled = target.head("GET", "/v1/smuggled")
    length = {"Content-Length": str(len(smuggled))}
    heads = (
        target.head("POST", "/v1/completions", H2C | length),
        target.head("CONNECT", "x:1", length),
    )
    return await told(
        _in_two(target, head, smuggled, pause_seconds)
        for head in heads
        for pause_seconds in (0.0, 0.2)
    )


async def unread_answers(target: Target) -> Outcomes:
    """Pipelined requests, with and without a key, with answers that nobody reads."""
    heads = (target.head("GET", "/livez", has_key=False) * 20, target.head("GET", "/v1/models"))
    return await told(_unread(target, target.chosen.choice(heads)) for _ in range(60))


async def pipelines(target: Target) -> Outcomes:
    """Hundreds of requests in one segment, and empty lines behind an answer."""
    requests = (
        target.head("GET", "/v1/models") * 200,
        target.head("GET", "/livez", has_key=False) + b"\r\n",
        target.head("GET", "/livez") + b"GET /v1/models\r\n",
        target.head("POST", "/v1/completions", {"Content-Length": "2"}) + b"{}" * 50,
        target.head("GET", "/x" * 8 * KIB),
        target.head("GET", "/livez", {f"X-{number}": "x" for number in range(200)}),
        target.head("POST", "/v1/completions", {"Content-Length": "3, 4"}) + b"{}x",
        target.head("POST", "/tokenize", {"Transfer-Encoding": "x", "Content-Length": "1"}) + b"x",
    )
    return await told(target.said(request, 5) for request in requests)


async def leaving(target: Target) -> Outcomes:
    """Clients that leave as soon as they have asked."""
    return await told(
        target.complete({"max_tokens": 64, "stream": number % 2 == 0}, 0.05, prompt=[20 + number])
        for number in range(50)
    )


async def of_strangers(name: str, count: int, target: Target) -> Outcomes:
    """One of the attacks that need no key, for as long as an attack may take."""
    begun = 0
    end = time.monotonic() + target.seconds

    def attack() -> None:
        nonlocal begun
        with contextlib.suppress(OSError):
            for _ in attacks.ATTACKS[name](target.port, count):
                begun += 1
                if time.monotonic() > end:
                    return

    await asyncio.to_thread(attack)
    return Counter({"steps": begun})


ATTACKS: Mapping[str, Callable[[Target], Awaitable[Outcomes]]] = MappingProxyType(
    {
        "upgrades with bodies": upgrades_with_bodies,
        "refused handshakes": refused_handshakes,
        "silence": silence,
        "slow bodies": slow_bodies,
        "upgrades to HTTP/2": upgrades_to_http2,
        "unread answers": unread_answers,
        "pipelines": pipelines,
        "leaving": leaving,
        "slow headers": partial(of_strangers, "slow_headers", 100),
        "large bodies": partial(of_strangers, "large_body", 64),
        "chunked bodies": partial(of_strangers, "chunked_body", 64),
        "deep JSON": partial(of_strangers, "deep_json", 100_000),
    }
)


async def _held(target: Target, request: bytes) -> str:
    try:
        async with target.connected() as (reader, writer):
            writer.write(request)
            return await until_ended(reader, target.seconds)
    except OSError:
        return "reset"


async def _dripped(target: Target, path: str) -> str:
    head = target.head("POST", path, {"Content-Length": str(32 * MIB)})
    async with target.connected() as (reader, writer):
        ending = asyncio.create_task(until_ended(reader, target.seconds))
        with contextlib.suppress(OSError):
            writer.write(head + b'{"prompt": "')
            while not ending.done():
                writer.write(b"x" * DRIP_BYTES)
                await asyncio.wait([ending], timeout=1)
        return await ending


async def _in_two(target: Target, head: bytes, body: bytes, pause_seconds: float) -> str:
    async with target.connected() as (reader, writer):
        with contextlib.suppress(OSError):
            if pause_seconds:
                writer.write(head)
                await writer.drain()
                await asyncio.sleep(pause_seconds)
                writer.write(body)
            else:
                writer.write(head + body)
        return await until_ended(reader, 3)


async def _unread(target: Target, request: bytes) -> str:
    async with target.connected(receive_bytes=KIB) as (reader, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket it is both
        writer.write(request)
        await asyncio.sleep(target.seconds)
        return "closed" if reader.at_eof() else "open"
