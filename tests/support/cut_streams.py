"""Streams that are cut by the end of their engine, and what their clients have got of them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import openai
import psutil

from heard_streams import HeardStream
from servers import Server, wait_until

BEGUN_CHUNKS = 10
"""A stream that has sent this many chunks is cut in its answer, not before it."""
ATTEMPTS = 5
DEADLINE_SECONDS = 300.0
STREAM_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a stream, by one of the routes of the official client."""

    route: str
    body: Mapping[str, Any]


@dataclass(slots=True)
class Streamed:
    """What a client has got of a stream."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    heard: HeardStream = field(default_factory=HeardStream)
    error: str = ""
    has_ended: bool = False
    has_begun: threading.Event = field(default_factory=threading.Event)

    @property
    def text(self) -> str:
        """Everything that was said."""
        return self.heard.said

    @property
    def tokens(self) -> list[int]:
        """The tokens of a completion or a chat that was asked for them."""
        return self.heard.tokens

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The choice in each chunk that has one."""
        return [choice for chunk in self.chunks for choice in chunk.get("choices") or ()]

    @property
    def finish_reasons(self) -> list[str]:
        """All that were named, of a response its status; there should be one."""
        named = [choice.get("finish_reason") for choice in self.choices]
        named += [
            chunk["response"]["status"]
            for chunk in self.chunks
            if chunk.get("type") in {"response.completed", "response.incomplete"}
        ]
        return [reason for reason in named if reason]

    @property
    def usage(self) -> Any:
        """What was counted in the end."""
        last = self.chunks[-1]
        return last.get("usage") or (last.get("response") or {}).get("usage")


@contextmanager
def streams(server: Server, asked: Sequence[Asked]) -> Iterator[list[Streamed]]:
    """Ask for all of them at once; on leaving, wait until each has ended."""
    found = [Streamed() for _ in asked]
    with ThreadPoolExecutor(len(asked)) as clients:
        reading: list[Future[None]] = [
            clients.submit(_read, server, one, into) for one, into in zip(asked, found, strict=True)
        ]
        yield found
        for one in reading:
            one.result()


def _read(server: Server, asked: Asked, into: Streamed) -> None:
    """Read a stream to its end, which may be an error."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=STREAM_SECONDS
    ) as client:
        create: Any = {
            "completions": client.completions.create,
            "chat": client.chat.completions.create,
            "responses": client.responses.create,
        }[asked.route]
        try:
            for chunk in create(model=server.model, stream=True, **asked.body):
                into.chunks.append(chunk.model_dump())
                into.heard.hear(chunk)
                if len(into.chunks) >= BEGUN_CHUNKS:
                    into.has_begun.set()
        except openai.APIError as error:
            into.error = f"{type(error).__name__}: {error}"
        finally:
            into.has_ended = True
            into.has_begun.set()


def whole_streams(server: Server, asked: Sequence[Asked]) -> list[Streamed]:
    """Ask for all of them at once, of a server that nobody disturbs."""
    with streams(server, asked) as found:
        pass
    return found


def cut_streams(server: Server, victim: psutil.Process, asked: Sequence[Asked]) -> list[Streamed]:
    """Ask for all of them at once, and kill a process of the engine in the middle of each."""
    for _ in range(ATTEMPTS):
        with streams(server, asked) as found:
            for stream in found:
                assert stream.has_begun.wait(DEADLINE_SECONDS)
            victim.suspend()
            is_in_time = server.metric("requests_in_flight") == len(asked)
            if is_in_time:
                victim.kill()
            else:
                victim.resume()
        if is_in_time:
            wait_until(
                lambda: server.get("/readyz").status_code == 200,
                deadline_seconds=DEADLINE_SECONDS,
                what=lambda: "no next engine",
            )
            return found
    raise AssertionError(f"in {ATTEMPTS} attempts some stream ended before all had begun")


@contextmanager
def carried_over(server: Server, asked: Asked) -> Iterator[None]:
    """While entered, a stream is in the middle of its answer; its engine has to end meanwhile.

    On leaving, the stream has gone on in the next engine, and is as it would have been without.
    """
    (whole,) = whole_streams(server, [asked])
    name = uuid4().hex
    named = Asked(asked.route, {**asked.body, "extra_headers": {"x-request-id": name}})
    with streams(server, [named]) as (stream,):
        assert stream.has_begun.wait(DEADLINE_SECONDS)
        yield
    assert not stream.error
    assert stream.tokens == whole.tokens
    assert stream.text == whole.text
    assert stream.finish_reasons == whole.finish_reasons
    server.until(lambda: f"id={name}" in server.log, "the line of the stream in the log")
    assert re.search(rf"continued_at_tokens=\d+ .*id={name}", server.log)
