"""Limits the time for which vLLM searches an answer for reasoning and tool calls.

vLLM's parsers run on the event loop (0.32). Many take time quadratic in an answer's length or
worse, and clients decide what a model says: 60,000 repetitions of `[f(` take some parsers minutes.
A thread would not help, because regular expressions hold the interpreter's lock. They do check for
signals, so a CPU timer can end a search with an error. Only the main thread handles signals, so
searches of other threads (`/derender`) run there too.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from itertools import groupby
from types import FrameType
from typing import Any

from vllm.exceptions import GenerationError
from vllm.parser import ParserManager
from vllm.parser.engine.events import EventType, SemanticEvent
from vllm.parser.engine.incremental_lexer import IncrementalLexer
from vllm.parser.engine.parser_engine import ParserEngine

from holdfast.request_context import current_request

logger = logging.getLogger("holdfast.engine")

LIMIT_SECONDS = 0.5
"""The CPU time for one search, however short the answer is."""
SECONDS_PER_CHARACTER = 2e-5
"""The additional CPU time for each character: three times what honest tool calls take."""
FREE_CHARACTERS = 2048
"""The length up to which no search takes longer than `LIMIT_SECONDS`."""
SLICE_CHARACTERS = 2048
"""The text that vLLM's lexer gets at once: at each mark it copies everything that is unread."""
MANY_EVENTS = 64
"""More events than one delta of a stream has, which stays as it is."""
_TICK_SECONDS = 0.02
_PACKAGES = ("vllm", "partial_json_parser", "regex", "re", "json")
_SEARCHERS = ("vllm.parser.", "vllm.reasoning.", "vllm.tool_parsers.")
_MARK = "holdfast_bounded"


def bound_answer_parsers() -> None:
    """Limit the parsers that vLLM makes from now on; idempotent."""
    original = ParserManager.get_parser
    if hasattr(original, _MARK):
        return
    timer = _SearchTimer()

    def get_parser(*arguments: Any, **options: Any) -> Any:
        parser = original(*arguments, **options)
        return None if parser is None else _bounded(parser, timer)

    setattr(get_parser, _MARK, True)
    _read_in_slices()
    _convert_arguments_once()
    ParserManager.get_parser = staticmethod(get_parser)


def _read_in_slices() -> None:
    """Make vLLM's lexer find the same tokens in a time linear in the text's length.

    Otherwise honest answers in some models' formats take seconds.
    """
    read_at_once: Any = IncrementalLexer.feed

    def feed(
        self: Any, text: str, token_texts: tuple[str, ...] = (), token_count: int = 0
    ) -> list[Any]:
        if len(text) <= SLICE_CHARACTERS:
            tokens: list[Any] = read_at_once(self, text, token_texts, token_count)
            return tokens
        counts = self._char_token_counts(text, token_texts, token_count)
        found: list[Any] = []
        for at in range(0, len(text), SLICE_CHARACTERS):
            end = at + SLICE_CHARACTERS
            self.buffer += text[at:end]
            self._token_counts.extend(counts[at:end])
            more = self._drain()
            if found and more and {found[-1].terminal, more[0].terminal} == {self.content_terminal}:
                found[-1].value += more[0].value
                found[-1].token_count += more[0].token_count
                del more[0]
            found += more
        return found

    IncrementalLexer.feed = feed


def _convert_arguments_once() -> None:
    """Convert the argument of a tool call once per delta, and not once per piece that is parsed.

    With a file of 60 KB as its argument, a call took half a minute.
    """
    convert_each = ParserEngine._events_to_delta  # noqa: SLF001 - there is no other way in

    def events_to_delta(self: Any, events: list[Any], *arguments: Any, **options: Any) -> Any:
        if len(events) > MANY_EVENTS:
            events = [one for run in _runs(events) for one in run]
        return convert_each(self, events, *arguments, **options)

    ParserEngine._events_to_delta = events_to_delta  # noqa: SLF001 - as above


def _runs(events: list[Any]) -> Iterator[list[Any]]:
    """Yield the pieces of one argument as one piece, and all other events unchanged."""
    for (kind, index), run in groupby(events, key=lambda one: (one.type, one.tool_index)):
        if kind is not EventType.ARG_VALUE_CHUNK:
            yield list(run)
            continue
        pieces = list(run)
        tokens = sum(one.token_count for one in pieces)
        text = "".join(one.value for one in pieces)
        yield [SemanticEvent(kind, value=text, tool_index=index, token_count=tokens)]


def _bounded(parser: Any, timer: _SearchTimer) -> Any:
    """Return a subclass of a parser class with limited searches."""

    class Bounded(parser):  # type: ignore[misc]  # a class of vLLM's registry
        _characters = 0

        def parse(self, model_output: str, *arguments: Any, **options: Any) -> Any:
            search = partial(super().parse, model_output, *arguments, **options)
            return timer.run(search, len(model_output))

        def parse_delta(self, delta_text: str, *arguments: Any, **options: Any) -> Any:
            self._characters += len(delta_text)
            if self._characters <= FREE_CHARACTERS:
                return super().parse_delta(delta_text, *arguments, **options)
            search = partial(super().parse_delta, delta_text, *arguments, **options)
            return timer.run(search, self._characters)

    Bounded.__name__, Bounded.__qualname__ = parser.__name__, parser.__qualname__
    return Bounded


class _SearchTimeout(BaseException):
    """Ends a search; no parser catches it."""


class _SearchTimer:
    """Ends searches that take too long in the main thread, which runs the event loop."""

    def __init__(self) -> None:
        self._ends_seconds: float | None = None
        """A CPU time of the thread; None while no search runs."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of the main thread, if one runs there."""
        self._is_able = _is_main_thread()
        if self._is_able:
            with suppress(RuntimeError):
                self._loop = asyncio.get_running_loop()
            # It stays: without a handler, a late signal would end the process.
            signal.signal(signal.SIGVTALRM, self._expire)
            signal.siginterrupt(signal.SIGVTALRM, False)

    def run(self, search: Callable[[], Any], characters: int) -> Any:
        """Return what a limited search of a text of this length finds; any thread may call it.

        Raises:
            GenerationError: the search took too long.
        """
        if self._loop is None or characters <= FREE_CHARACTERS or _is_main_thread():
            with self._limited(characters):
                return search()
        found = asyncio.run_coroutine_threadsafe(self._run(search, characters), self._loop)
        return found.result()

    async def _run(self, search: Callable[[], Any], characters: int) -> Any:
        with self._limited(characters):
            return search()

    @contextmanager
    def _limited(self, characters: int) -> Iterator[None]:
        is_able = self._is_able and _is_main_thread()
        if not (is_able and characters > FREE_CHARACTERS) or self._ends_seconds:
            yield
            return
        limit_seconds = LIMIT_SECONDS + characters * SECONDS_PER_CHARACTER
        self._ends_seconds = time.thread_time() + limit_seconds
        signal.setitimer(signal.ITIMER_VIRTUAL, limit_seconds, _TICK_SECONDS)
        try:
            yield
        except _SearchTimeout:
            self._ends_seconds = None
            logger.warning(
                "the search of a %d-character answer for reasoning and tool calls was stopped, "
                "because it took longer than %.1f s",
                characters,
                limit_seconds,
            )
            current_request().may_be_retried = False
            raise _error() from None
        finally:
            self._ends_seconds = None
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _expire(self, _signal: int, frame: FrameType | None) -> None:
        is_over = self._ends_seconds is not None and time.thread_time() >= self._ends_seconds
        if is_over and _is_interruptible(frame):
            raise _SearchTimeout


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_interruptible(frame: FrameType | None) -> bool:
    """Whether this is code that only searches; other code, such as logging, may hold a lock."""
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    if name.startswith("vllm."):
        return name.startswith(_SEARCHERS)
    is_library = name.partition(".")[0] in _PACKAGES
    return is_library and frame is not None and frame.f_code.co_name != "_compile"


def _error() -> GenerationError:
    """Return an error that vLLM reports well both before and within a stream."""
    error = GenerationError(
        "Searching the model's answer for reasoning and tool calls takes too long. Ask for a "
        "shorter answer."
    )
    error.status_code = HTTPStatus.UNPROCESSABLE_ENTITY
    return error
