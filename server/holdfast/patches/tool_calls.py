"""Counts the model's tool calls, and the broken ones, where vLLM has found them in an answer.

Chats, `/v1/messages` and `/v1/responses`, streamed or not, have their answers searched by one
parser per answer (0.32, 0.33). A stream is judged once, when it has ended. Answers in OpenAI's
Harmony format to `/v1/responses` do not pass here, and a call in which a parser recognises none,
such as one without a name, is text to the client and to this count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from vllm.parser import ParserManager

from holdfast.labels import ToolCallDefect
from holdfast.patches.patch import original, replace
from holdfast.patches.tool_call_defects import defect_of, schemas_of
from holdfast.request_context import current_request

Count = Callable[[ToolCallDefect | None], None]
"""Counts one call of the model, with its defect if it has one."""


def count_tool_calls(count: Count) -> None:
    """Have the calls counted in all answers of the parsers that vLLM makes from now on.

    Calling it again replaces the count.
    """
    as_vllm = original(ParserManager, "get_parser")

    @wraps(as_vllm)
    def get_parser(*arguments: Any, **options: Any) -> Any:
        parser = as_vllm(*arguments, **options)
        if parser is None or parser.tool_parser_cls is None:
            return parser
        return _counting(parser, count)

    replace(ParserManager, "get_parser", get_parser)


def _counting(parser: Any, count: Count) -> Any:
    """Return a subclass of a parser class that counts the calls that it finds."""

    class Counting(parser):  # type: ignore[misc]  # a class of vLLM's registry
        _streamed: _StreamedCalls | None = None

        def parse(self, model_output: str, request: Any, *arguments: Any, **options: Any) -> Any:
            answer = super().parse(model_output, request, *arguments, **options)
            if calls := answer[2]:
                _judge([(call.name, call.arguments) for call in calls], request, count)
            return answer

        def parse_delta(
            self,
            delta_text: str,
            delta_token_ids: list[int],
            request: Any,
            *arguments: Any,
            finished: bool,
            **options: Any,
        ) -> Any:
            delta = super().parse_delta(
                delta_text, delta_token_ids, request, *arguments, finished=finished, **options
            )
            if delta is not None and delta.tool_calls:
                self._streamed = self._streamed or _StreamedCalls()
                self._streamed.add(delta.tool_calls)
            if finished and self._streamed is not None:
                is_one_of_many = (getattr(request, "n", None) or 1) > 1
                _judge(self._streamed.calls(), request, count, is_one_of_many=is_one_of_many)
            return delta

    Counting.__name__, Counting.__qualname__ = parser.__name__, parser.__qualname__
    return Counting


class _StreamedCalls:
    """The calls of one stream, put together from their pieces as a client does."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, pieces: Iterable[Any]) -> None:
        """Add what one delta says of some calls."""
        for piece in pieces:
            if piece.function is None:
                continue
            self._names.setdefault(piece.index, piece.function.name or "")
            self._arguments.setdefault(piece.index, []).append(piece.function.arguments or "")

    def calls(self) -> list[tuple[str, str]]:
        """Return the name and the arguments of each call."""
        return [(name, "".join(self._arguments[at])) for at, name in self._names.items()]


def _judge(
    calls: Iterable[tuple[str, str]], request: Any, count: Count, *, is_one_of_many: bool = False
) -> None:
    """Count the calls of a finished answer.

    Nothing tells which of the many answers of a stream was cut, so each is taken to be.
    """
    is_cut = is_one_of_many or current_request().is_cut
    schemas = schemas_of(request.tools or ())
    for name, arguments in calls:
        count(defect_of(name, arguments, schemas, is_cut=is_cut))
