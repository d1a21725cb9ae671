"""Tool calls are counted once per answer, streamed or not, with what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser import ParserManager

from any_tokenizer import Tokenizer
from holdfast.engine.outputs import VllmOutputs
from holdfast.labels import ToolCallDefect
from holdfast.patches.answer_parsing import bound_answer_parsers
from holdfast.patches.patch import original
from holdfast.patches.tool_calls import count_tool_calls
from holdfast.request_context import REQUEST, RequestContext

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FUNCTION = {"name": "f", "parameters": PARAMETERS}


def call(arguments: str, name: str = "f") -> str:
    """A call in the form of Hermes."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'


GOOD = call('{"a": "b"}')
ANSWERS: dict[str, tuple[str, list[ToolCallDefect | None]]] = {
    "no call": ("Hello.", []),
    "a good call": (GOOD, [None]),
    "text and two calls": (f"Hello. {GOOD}{call('{}')}", [None, "schema_mismatch"]),
    "an unknown name": (call("{}", "g"), ["unknown_name"]),
    "a wrong type": (call('{"a": 1}'), ["schema_mismatch"]),
}
every_answer = pytest.mark.parametrize(("answer", "defects"), ANSWERS.values(), ids=ANSWERS)


def chat(**fields: Any) -> ChatCompletionRequest:
    """A chat with a tool that takes a text."""
    tool = {"type": "function", "function": FUNCTION}
    fields = {"tools": [tool], **fields}
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}], **fields)


def response() -> ResponsesRequest:
    """The same, as `/v1/responses` takes it."""
    return ResponsesRequest(model="m", input="?", tools=[{"type": "function", **FUNCTION}])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[ToolCallDefect | None]:
    """What was counted; vLLM is as before afterwards."""
    monkeypatch.setattr(ParserManager, "get_parser", vars(ParserManager)["get_parser"])
    found: list[ToolCallDefect | None] = []
    for _ in range(2):  # as if the first engine had died while vLLM's application was built
        count_tool_calls(found.append)
    return found


def parser(request: Any) -> Any:
    """One, as vLLM makes it for each answer."""
    made: Any = ParserManager.get_parser(tool_parser_name="hermes", enable_auto_tools=True)
    return made(Tokenizer(), request.tools)


def stream(answer: str, request: Any, *, is_finished: bool = True) -> list[Any]:
    """Every delta of a stream of an answer."""
    made = parser(request)
    return [
        made.parse_delta(
            delta_text=answer[at : at + 7],
            delta_token_ids=[5],
            request=request,
            prompt_token_ids=[2],
            finished=is_finished and at + 7 >= len(answer),
        )
        for at in range(0, len(answer), 7)
    ]


@every_answer
@pytest.mark.parametrize("request_", [chat(), response()], ids=["chat", "responses"])
def test_calls_of_a_whole_answer_are_counted(
    answer: str,
    defects: list[ToolCallDefect | None],
    request_: Any,
    counted: list[ToolCallDefect | None],
) -> None:
    """Each once, and the caller gets them as before."""
    calls = parser(request_).parse(answer, request_, enable_auto_tools=True)[2]
    assert len(calls or ()) == len(defects)
    assert counted == defects


@every_answer
@pytest.mark.parametrize("request_", [chat(), response()], ids=["chat", "responses"])
def test_calls_of_a_stream_are_counted_at_its_end(
    answer: str,
    defects: list[ToolCallDefect | None],
    request_: Any,
    counted: list[ToolCallDefect | None],
) -> None:
    """Put together from their pieces; a stream that its client left counts nothing."""
    stream(answer, request_, is_finished=False)
    assert counted == []
    stream(answer, request_)
    assert counted == defects


@pytest.mark.usefixtures("counted")
def test_the_deltas_are_those_of_vllm() -> None:
    """Counting changes nothing that a client gets, except the ids that are drawn."""

    def said(deltas: list[Any]) -> list[Any]:
        pieces = [(one.content, one.tool_calls) for one in deltas if one is not None]
        return [(text, [(c.index, c.function) for c in calls]) for text, calls in pieces]

    ours = said(stream(GOOD, chat()))
    ParserManager.get_parser = original(ParserManager, "get_parser")
    assert said(stream(GOOD, chat())) == ours
    arguments = "".join(c.arguments or "" for _, calls in ours for _, c in calls)
    assert json.loads(arguments) == {"a": "b"}


def test_arguments_that_are_not_json_are_counted(counted: list[ToolCallDefect | None]) -> None:
    """A stream shows them as they come; a whole answer shows them as text."""
    stream(call("{'a': 1}"), chat())
    assert counted == ["invalid_json"]


def test_an_answer_that_was_cut_is_not_called_broken(
    counted: list[ToolCallDefect | None],
) -> None:
    """The engine says so before vLLM reads the end of the answer."""
    context = RequestContext(is_cut=True)
    token = REQUEST.set(context)
    try:
        stream(call('{"a": "b"}')[:-20], chat())
    finally:
        REQUEST.reset(token)
    assert counted == [None]


def test_no_json_of_one_of_many_streams_is_judged(counted: list[ToolCallDefect | None]) -> None:
    """Nothing says which of them was cut."""
    stream(call("{'a': 1}"), chat(n=2))
    assert counted == [None]


def test_a_request_without_tools_counts_nothing(counted: list[ToolCallDefect | None]) -> None:
    """Even if the model says what looks like a call, which is text then."""
    request = chat(tools=None)
    stream("Hello.", request)
    parser(request).parse("Hello.", request, enable_auto_tools=True)
    assert counted == []


def test_both_patches_of_the_parsers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their order, and installing one again, change nothing."""
    monkeypatch.setattr(ParserManager, "get_parser", vars(ParserManager)["get_parser"])
    found: list[ToolCallDefect | None] = []
    bound_answer_parsers()
    count_tool_calls(found.append)
    bound_answer_parsers()
    parser(chat()).parse(GOOD, chat(), enable_auto_tools=True)
    assert found == [None]
    made = ParserManager.get_parser(tool_parser_name="hermes", enable_auto_tools=True)
    assert [kind.__qualname__ for kind in made.__mro__[:3]] == [made.__qualname__] * 3


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "is_cut"),
    [
        ("stop", None, False),
        ("stop", 2, False),
        ("stop", "END", True),
        ("length", None, True),
        ("abort", None, True),
    ],
)
def test_the_end_of_an_answer_says_whether_it_was_cut(
    finish_reason: str, stop_reason: int | str | None, is_cut: bool
) -> None:
    """A limit or a stop string of the client cuts; the model's own last token does not."""
    answer = CompletionOutput(
        index=0,
        text="",
        token_ids=[1],
        cumulative_logprob=None,
        logprobs=None,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )
    ended, running = (
        RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=[1],
            prompt_logprobs=None,
            outputs=[answer],
            finished=finished,
        )
        for finished in (True, False)
    )
    assert VllmOutputs().is_cut(ended) is is_cut
    assert VllmOutputs().is_cut(running) is False
