"""The server over HTTP. Every wait has a deadline, and no header stands in what is recorded."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import httpx

from holdfast.remote_server import server_verification
from holdfast.verify.answers import MalformedError, dig, dig_or, excerpt, read_json
from holdfast.verify.records import Request
from holdfast.verify.streams import Received, StreamedAnswer

REQUEST_SECONDS = 120.0
"""The deadline of one answer, unless the caller has another."""
PATIENT_SECONDS = 600.0
"""For an answer that may wait for a new engine, for the longest prompt, for many tokens or for
others."""
CONNECT_SECONDS = 10.0
_MAX_CONNECTIONS = 256
_MAX_IDLE_CONNECTIONS = 0
"""No connection is used twice: a server closes an idle one after some seconds, and a request that
is on its way then gets no answer. On a busy machine a client may notice only after it has asked."""
ADMIN = "/admin/"
"""How the paths begin that get the admin key."""
_PLAIN = "identity"
"""The only encoding whose bytes can be counted before they fill the memory."""
_THOUGHTS = ("reasoning", "reasoning_content")
_DETAILS = "completion_tokens_details"
_MAX_BYTES = 64 * 1024 * 1024
"""The maximum of one answer."""
_MAX_MARKS = 3_000_000
"""The maximum of `{`, `[` and `,` in one: JSON takes about a hundred bytes of memory for each. The
log-probs of a prompt have 50,000 of them, and the ids of the longest prompt 2,000,000."""
_MOST_BYTES_AT_ONCE = 1024 * 1024
"""A longer one is taken apart in a thread, as a stream of any type: Ctrl-C and other requests go on
beside it. For JSON a thread would be of no use, since Python reads it without a pause."""
_LEAST_KEY = 16
"""Characters of a key in the place of a user; names are shorter."""


THOUGHT_BEGINS, THOUGHT_ENDS = "<think>", "</think>"
"""Around thoughts that a server leaves in the text."""


class NoAnswerError(Exception):
    """A request got no answer, or no whole one, within its deadline."""

    def __init__(self, request: Request, why: str) -> None:
        super().__init__(f"{request.method} {request.path}: {why}")
        self.request = request


@dataclass(frozen=True)
class Answer:
    """A whole answer, with any status."""

    request: Request
    status: int
    content_type: str
    """As the server wrote it, in any case."""
    text: str
    seconds: float
    retry_after: str = ""
    """The header; empty if there is none."""
    location: str = ""
    """The header of a redirect, in the same way."""

    @cached_property
    def document(self) -> dict[str, Any]:
        """The JSON object in it.

        Raises:
            MalformedError: it is not one.
        """
        found = read_json(self.text)
        if not isinstance(found, dict):
            raise MalformedError(f"the answer is not a JSON object: {excerpt(self.text)}")
        return found

    def content(self, index: int = 0) -> str:
        """The text of a chat or a completion; a chat without any has the empty one.

        Raises:
            MalformedError: there is no such choice.
        """
        choice = dig(self.document, "choices", index, kind=dict)
        if "text" in choice:
            return dig(choice, "text", kind=str)
        message = dig(choice, "message", kind=dict)
        return "" if message.get("content") is None else dig(message, "content", kind=str)

    def thoughts(self, index: int = 0) -> dict[str, str]:
        """The fields that tell what a chat thought before it answered, also where that is empty."""
        message: dict[str, Any] = dig_or(self.document, "choices", index, "message", default={})
        return {name: message[name] for name in _THOUGHTS if isinstance(message.get(name), str)}

    def reasoning(self, index: int = 0) -> str:
        """What a chat thought before it answered, under either name; empty if it did not."""
        return next(filter(None, self.thoughts(index).values()), "")

    def finish_reason(self, index: int = 0) -> str:
        """Why the choice ended."""
        return dig(self.document, "choices", index, "finish_reason", kind=str)

    def is_cut_in_thought(self) -> bool:
        """Whether `max_tokens` ended a chat in its thoughts: it might have answered.

        A server may also hide thoughts and only count them, or leave them in the text.
        """
        said = self.content().strip()
        is_open = said.startswith(THOUGHT_BEGINS) and THOUGHT_ENDS not in said
        counted = dig_or(self.document, "usage", _DETAILS, "reasoning_tokens", default=0)
        has_thought = bool(self.reasoning()) or counted > 0
        return (is_open or (has_thought and not said)) and self.finish_reason() == "length"

    def usage(self) -> dict[str, Any]:
        """The token counts."""
        return dig(self.document, "usage", kind=dict)


class Target:
    """The server that is verified. It is a context manager, since it holds connections."""

    def __init__(self, url: str, api_key: str = "", admin_key: str = "") -> None:
        """Take the keys of a server that asks for them; the admin key goes to `/admin/` alone."""
        self.url = url
        self.api_key = api_key
        self.secrets = _secrets_of(url, api_key, admin_key)
        """What no report may contain."""
        self.headers = _authorization(api_key)
        self.has_admin_key = bool(admin_key)
        self._admin_headers = _authorization(admin_key)
        limits = httpx.Limits(
            max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_IDLE_CONNECTIONS
        )
        # The deadline of each request bounds it as a whole; a part of it may take as long.
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={**self.headers, "Accept-Encoding": _PLAIN},
            limits=limits,
            timeout=timeout,
            verify=server_verification(url),
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.__aexit__(kind, error, traceback)

    async def ask(self, request: Request, *, deadline_seconds: float = REQUEST_SECONDS) -> Answer:
        """The whole answer, with any status.

        Raises:
            NoAnswerError: there is none in time.
        """
        streamed = await self.stream(request, deadline_seconds=deadline_seconds)
        return Answer(
            request,
            streamed.status,
            streamed.content_type,
            streamed.text,
            streamed.seconds,
            streamed.retry_after,
            streamed.location,
        )

    async def stream(
        self, request: Request, *, deadline_seconds: float = REQUEST_SECONDS
    ) -> StreamedAnswer:
        """The whole answer, with the time at which each part of it arrived.

        Raises:
            NoAnswerError: it did not end in time.
        """
        found = await self._read(request, deadline_seconds)
        if sum(len(chunk.content) for chunk in found.chunks) > _MOST_BYTES_AT_ONCE:
            await asyncio.to_thread(_parse, found)
        return found

    async def leave_early(
        self, request: Request, *, after_bytes: int, deadline_seconds: float = REQUEST_SECONDS
    ) -> StreamedAnswer:
        """Close the connection once this much of the answer has come; what has come.

        Raises:
            NoAnswerError: that much did not come in time.
        """
        return await self._read(request, deadline_seconds, after_bytes)

    async def _read(
        self, request: Request, deadline_seconds: float, enough_bytes: int = _MAX_BYTES + 1
    ) -> StreamedAnswer:
        started_seconds = time.monotonic()
        received = Received()
        async with self._sent(request, deadline_seconds) as response:
            async for content in response.aiter_bytes():
                received.add(time.monotonic() - started_seconds, content)
                if received.byte_count > _MAX_BYTES:
                    raise NoAnswerError(request, f"the answer is longer than {_MAX_BYTES} bytes")
                if received.mark_count > _MAX_MARKS:
                    said = f"the answer has more than {_MAX_MARKS:,} `{{`, `[` and `,`"
                    raise NoAnswerError(request, said)
                if received.byte_count >= enough_bytes:
                    break
        return StreamedAnswer(
            request,
            response.status_code,
            response.headers.get("content-type", ""),
            received.chunks(),
            time.monotonic() - started_seconds,
            response.headers.get("retry-after", ""),
            response.headers.get("location", ""),
        )

    @asynccontextmanager
    async def _sent(
        self, request: Request, deadline_seconds: float
    ) -> AsyncIterator[httpx.Response]:
        content = _content(request)
        is_admin = request.path.startswith(ADMIN)
        built = self._client.build_request(
            request.method,
            request.path,
            content=content,
            headers={
                **({"Content-Type": "application/json"} if content else {}),
                **(self._admin_headers if is_admin else {}),
            },
        )
        try:
            async with asyncio.timeout(deadline_seconds):
                response = await self._client.send(built, stream=True)
                try:
                    _require_plain(request, response)
                    yield response
                finally:
                    await response.aclose()
        except TimeoutError:
            raise NoAnswerError(
                request, f"no complete answer within {deadline_seconds:.0f} s"
            ) from None
        except httpx.HTTPError as error:
            why = f"{type(error).__name__} {error}".rstrip()
            raise NoAnswerError(request, why) from error


def _content(request: Request) -> bytes | None:
    """The body. JSON is in ASCII: UTF-8 has no half characters, which a server may have sent."""
    if request.body is not None:
        return json.dumps(request.body).encode()
    return request.raw.encode() or None


def _parse(answer: StreamedAnswer) -> None:
    """Take a stream apart, so that it need not be done later."""
    with suppress(MalformedError):  # each check that asks for the documents is told
        _ = answer.documents


def _require_plain(request: Request, response: httpx.Response) -> None:
    """Refuse an answer that httpx would unpack.

    Raises:
        NoAnswerError: it is packed, though the request accepts no encoding.
    """
    encoding = response.headers.get("content-encoding", "").strip() or _PLAIN
    if encoding.casefold() != _PLAIN:
        raise NoAnswerError(
            request,
            f"the answer is encoded as {excerpt(encoding)!r}, though only {_PLAIN} was accepted",
        )


def _authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _secrets_of(url: str, *keys: str) -> tuple[str, ...]:
    """The keys, and the password in every form in which a server may get and repeat it.

    A user without a password may be a key, too. One as short as a name is taken for a name: words
    of the report may be the same.
    """
    parts = urlsplit(url)
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    sent = base64.b64encode(f"{user}:{password}".encode()).decode() if user or password else ""
    is_key = not password and len(user) >= _LEAST_KEY
    given = (parts.username, user) if is_key else (parts.password, password)
    return tuple(dict.fromkeys(filter(None, (*keys, *given, sent))))
