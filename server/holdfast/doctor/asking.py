"""Asks the health port of a peer, which may be slow, endless, hostile or not a Holdfast server.

An answer has a limit in bytes, all answers together have one deadline, and a redirect is not
followed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from holdfast.doctor.reach import Address
from holdfast.nodes import strict_json

ANSWERS_SECONDS = 10.0
MAX_ANSWER_BYTES = 1024 * 1024
STATUS = "/statusz"
_PATHS = ("/livez", "/livez", "/livez", STATUS)
"""What is asked for: each answer tells the time of the peer."""
_OK = 200
_NO_KEY = {401, 403}


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One whole answer."""

    status: int
    body: bytes
    date: str
    """The peer's time, as it writes it; empty if it does not."""
    asked_seconds: float
    """In seconds since 1970 by the clock of this machine, as is the next one."""
    answered_seconds: float


@dataclass(frozen=True, slots=True)
class PeerReport:
    """What a health port answered."""

    port: int
    document: Mapping[str, Any]
    """What `/statusz` says; empty if it says nothing that can be used."""
    problem: str = ""
    """Why the document is empty."""
    answers: tuple[PeerAnswer, ...] = ()


class _UnusableError(Exception):
    """The peer answers, but not what was asked."""


def ask(address: Address, port: int, deadline_seconds: float = ANSWERS_SECONDS) -> PeerReport:
    """Return what the health port answers within the deadline."""
    return asyncio.run(_ask(address, port, deadline_seconds))


async def _ask(address: Address, port: int, deadline_seconds: float) -> PeerReport:
    host = f"[{address.host}]" if ":" in address.host else address.host
    problem = ""
    try:
        async with asyncio.timeout(deadline_seconds):
            for scheme in ("http", "https"):
                try:
                    return await _ask_once(f"{scheme}://{host}:{port}", port)
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    # A server with TLS ends a connection without it.
                    problem = problem or f"it is not a web server ({type(error).__name__})"
    except TimeoutError:
        problem = problem or f"its answers took longer than {deadline_seconds:g} s"
    return PeerReport(port, {}, problem)


async def _ask_once(url: str, port: int) -> PeerReport:
    # Not verified: nothing secret is sent, and the certificate names the public host.
    async with httpx.AsyncClient(
        base_url=url,
        verify=False,  # noqa: S501 - see above
        trust_env=False,
        timeout=None,  # noqa: S113 - the caller has a deadline for all of it
        headers={"Accept-Encoding": "identity"},
    ) as client:
        answers: list[PeerAnswer] = []
        try:
            answers = [await _get(client, path) for path in _PATHS]
            return PeerReport(port, _document(answers[-1]), answers=tuple(answers))
        except _UnusableError as error:
            return PeerReport(port, {}, str(error), tuple(answers))


async def _get(client: httpx.AsyncClient, path: str) -> PeerAnswer:
    body = bytearray()
    asked_seconds = time.time()
    async with client.stream("GET", path) as response:
        answered_seconds = time.time()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise _UnusableError(f"{path} sends more than {MAX_ANSWER_BYTES} bytes")
    return PeerAnswer(
        response.status_code,
        bytes(body),
        response.headers.get("date", ""),
        asked_seconds,
        answered_seconds,
    )


def _document(answer: PeerAnswer) -> Mapping[str, Any]:
    if answer.status in _NO_KEY:
        raise _UnusableError(f"{STATUS} asks for an API key")
    if answer.status != _OK:
        raise _UnusableError(f"{STATUS} answers HTTP {answer.status}")
    try:
        document = strict_json.parsed(answer.body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise _UnusableError(f"{STATUS} is not a JSON object")
    return document
