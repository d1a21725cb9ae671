"""Answers of a model are searched for reasoning and tool calls for a while, and not for ever.

vLLM's parsers do that on the event loop (0.32). Many take time with the square of an answer's
length or worse, and what a model says is up to its client: 60,000 times `[f(` keep some at it for
minutes. A thread would not help, as regular expressions keep the interpreter to themselves. They do
look for signals, so that a timer of the CPU ends one search with an error.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
"""Of the CPU, for one search."""
SECONDS_A_CHARACTER = 2e-5
"""And so much for each character of the answer: three times what honest tool calls take."""
FREE_CHARACTERS = 2048
"""In so short an answer no search takes longer than that."""
SLICE_CHARACTERS = 2048
"""vLLM's lexer copies what it still has to read, with numbers for each character, at each mark."""
MANY_EVENTS = 64
"""So many are in no delta of a stream, which stays as it is."""
_TICK_SECONDS = 0.02
_PACKAGES = ("vllm", "partial_json_parser", "regex", "re", "json")
_SEARCHERS = ("vllm.parser.", "vllm.reasoning.", "vllm.tool_parsers.")
_MARK = "holdfast_bounded"


def bound_answer_parsers() -> None:
    """Have parsers that vLLM makes from now on end in time; calling it again changes nothing."""
    original = ParserManager.get_parser
    if hasattr(original, _MARK):
        return
    watch = _Watch()

    def get_parser(*arguments: Any, **options: Any) -> Any:
        parser = original(*arguments, **options)
        return None if parser is None else _bounded(parser, watch)

    setattr(get_parser, _MARK, True)
    _read_in_slices()
    _convert_arguments_once()
    ParserManager.get_parser = staticmethod(get_parser)


def _read_in_slices() -> None:
    """Have vLLM's lexer find the same tokens in a long text in a time that grows with its length.

    Without that honest answers of some models' formats take seconds.
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
    """Have the argument of a tool call converted as often as there is more of it to send, and not
    for each piece that it is read in: a file of 60 KB as an argument took half a minute.
    """
    convert_each = ParserEngine._events_to_delta  # noqa: SLF001 - there is no other way in

    def events_to_delta(self: Any, events: list[Any], *arguments: Any, **options: Any) -> Any:
        if len(events) > MANY_EVENTS:
            events = [one for run in _runs(events) for one in run]
        return convert_each(self, events, *arguments, **options)

    ParserEngine._events_to_delta = events_to_delta  # noqa: SLF001 - as above


def _runs(events: list[Any]) -> Iterator[list[Any]]:
    """Pieces of one argument as one piece, and all other events as they are."""
    for (kind, index), run in groupby(events, key=lambda one: (one.type, one.tool_index)):
        if kind is not EventType.ARG_VALUE_CHUNK:
            yield list(run)
            continue
        pieces = list(run)
        tokens = sum(one.token_count for one in pieces)
        text = "".join(one.value for one in pieces)
        yield [SemanticEvent(kind, value=text, tool_index=index, token_count=tokens)]


def _bounded(parser: Any, watch: _Watch) -> Any:
    """The same class of parsers, whose searches end in time."""

    class Bounded(parser):  # type: ignore[misc]  # known when it runs
        _characters = 0

        def parse(self, model_output: str, *arguments: Any, **options: Any) -> Any:
            with watch.over(len(model_output)):
                return super().parse(model_output, *arguments, **options)

        def parse_delta(self, delta_text: str, *arguments: Any, **options: Any) -> Any:
            self._characters += len(delta_text)
            if self._characters <= FREE_CHARACTERS:
                return super().parse_delta(delta_text, *arguments, **options)
            with watch.over(self._characters):
                return super().parse_delta(delta_text, *arguments, **options)

    Bounded.__name__, Bounded.__qualname__ = parser.__name__, parser.__qualname__
    return Bounded


class _OutOfTime(BaseException):
    """Nothing that a parser catches."""


class _Watch:
    """Ends what runs too long in the main thread, where the event loop is; elsewhere nothing."""

    def __init__(self) -> None:
        self._ends_seconds: float | None = None
        """By the CPU time of the thread; None while nothing is watched."""
        self._is_able = threading.current_thread() is threading.main_thread()
        if self._is_able:
            # It stays: a signal that comes late would end the process if nobody took it.
            signal.signal(signal.SIGVTALRM, self._expire)
            signal.siginterrupt(signal.SIGVTALRM, False)

    @contextmanager
    def over(self, characters: int) -> Iterator[None]:
        """While entered, a search of so much text runs.

        Raises:
            GenerationError: it took too long.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not (self._is_able and is_main and characters > FREE_CHARACTERS) or self._ends_seconds:
            yield
            return
        limit_seconds = LIMIT_SECONDS + characters * SECONDS_A_CHARACTER
        self._ends_seconds = time.thread_time() + limit_seconds
        signal.setitimer(signal.ITIMER_VIRTUAL, limit_seconds, _TICK_SECONDS)
        try:
            yield
        except _OutOfTime:
            self._ends_seconds = None
            logger.warning(
                "the search of a %d-character answer for reasoning and tool calls was stopped, "
                "as it took longer than %.1f s",
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
        if is_over and _may_be_left(frame):
            raise _OutOfTime


def _may_be_left(frame: FrameType | None) -> bool:
    """Whether it is code that only searches: what it uses, such as a log, may hold a lock."""
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    if name.startswith("vllm."):
        return name.startswith(_SEARCHERS)
    is_library = name.partition(".")[0] in _PACKAGES
    return is_library and frame is not None and frame.f_code.co_name != "_compile"


def _error() -> GenerationError:
    """What vLLM answers cleanly before and within a stream."""
    error = GenerationError(
        "It takes too long to search the answer of the model for reasoning and tool calls."
    )
    error.status_code = HTTPStatus.UNPROCESSABLE_ENTITY
    return error
