"""Answers of any model are searched for tool calls in bounded time, and honest ones as before."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from types import FrameType
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import GenerationError
from vllm.parser import ParserManager
from vllm.parser.engine.incremental_lexer import IncrementalLexer
from vllm.parser.engine.parser_engine import ParserEngine
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from any_tokenizer import Tokenizer
from holdfast.patches import answer_parsing
from holdfast.patches.answer_parsing import bound_answer_parsers

LINES = 'def f(a, b):\n    return {"a": [1, 2], \'b\': "x<y>"}  # call: {[(\n'
LONG_CHARACTERS = 60_000
TOOL_PARSERS = (
    "apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 "
    "deepseek_v41 dots ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc "
    "granite4 hermes hf hunyuan_a13b hy_v3 hy_v4 inkling internlm jamba k2_horizon kimi_k2 kimi_k3 "
    "lfm2 ling3 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5 minimax_m2 "
    "minimax_m3 mistral muse_glimmer olmo3 openai phi4_mini_json plamo3 poolside_v1 pythonic "
    "qwen3_coder qwen3_json qwen3_xml seed_oss step3 step3p5 xlam"
)
REASONING_PARSERS = (
    "cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 "
    "gemma4 glm45 glm47 granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4 inkling "
    "k2_horizon kimi_k2 kimi_k3 ling3 mimo minicpmv minimax_m2 minimax_m2_append_think minimax_m3 "
    "mistral muse_glimmer nemotron_v3 olmo3 openai_gptoss plamo3 poolside_v1 qwen3 seed_oss step3 "
    "step3p5"
)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM had before is there again afterwards."""
    monkeypatch.setattr(ParserManager, "get_parser", vars(ParserManager)["get_parser"])
    monkeypatch.setattr(IncrementalLexer, "feed", IncrementalLexer.feed)
    monkeypatch.setattr(ParserEngine, "_events_to_delta", ParserEngine._events_to_delta)


def request() -> ChatCompletionRequest:
    """A chat with a tool that takes a text."""
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "?"}], tools=[tool]
    )


def parser(name: str) -> Any:
    """One, as vLLM makes it for each answer."""
    made: Any = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True)
    return made(Tokenizer(), request().tools)


def parsed(name: str, answer: str) -> tuple[Any, ...]:
    """What vLLM finds in a whole answer, without the ids that it draws."""
    reasoning, content, calls = parser(name).parse(answer, request(), enable_auto_tools=True)
    return reasoning, content, [(one.name, one.arguments) for one in calls or ()]


def streamed(name: str, answer: str) -> tuple[str, str]:
    """What it finds in a stream of it: all content, and all arguments."""
    made, content, arguments = parser(name), "", ""
    for at in range(0, len(answer), 16):
        delta = made.parse_delta(
            answer[at : at + 16],
            [5],
            request(),
            prompt_token_ids=[2],
            finished=at + 16 >= len(answer),
        )
        content += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or ():
            arguments += (call.function and call.function.arguments) or ""
    return content, arguments


def call(name: str, characters: int) -> str:
    """How a model calls the tool with so long a program as its argument."""
    text = "".join(itertools.islice(itertools.cycle(LINES), characters))
    given = json.dumps({"a": text})
    named = f'{{"name": "f", "arguments": {given}}}'
    element = f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>"
    forms = {
        "seed_oss": f"<seed:tool_call>{element}</seed:tool_call>",
        "mistral": f"[TOOL_CALLS]f[ARGS]{given}",
        "gemma4": f'<|tool_call>call:f{{a:<|"|>{text}<|"|>}}<tool_call|>',
        "granite": f"<|tool_call|>[{named}]",
        "hermes": f"<tool_call>\n{named}\n</tool_call>",
        "ernie45": f"<tool_call>\n{named}\n</tool_call>\n",
        "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="a">'
        f"{text}</parameter></invoke></minimax:tool_call>",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        f"<|tool_call_argument_begin|>{given}<|tool_call_end|><|tool_calls_section_end|>",
        "glm45": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }
    return forms.get(name, f"<tool_call>\n{element}\n</tool_call>")


HONEST = [
    "mimo",
    "qwen3_coder",
    "step3p5",
    "seed_oss",
    "mistral",
    "gemma4",
    "granite",
    "hermes",
    "ernie45",
    "minimax_m2",
    "kimi_k2",
    "glm45",
]


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("characters", [40, 1500])
def test_honest_answers_are_read_as_before(name: str, characters: int) -> None:
    """Whole and streamed: text, a call, and text after it."""
    answer = f"{LINES * (characters // 50)}{call(name, characters)}{LINES}"
    expected = [parsed(name, answer), streamed(name, answer)]
    bound_answer_parsers()
    assert [parsed(name, answer), streamed(name, answer)] == expected


@pytest.mark.parametrize("name", HONEST)
def test_a_long_argument_is_read_in_time(name: str) -> None:
    """A file that a tool is to write took some formats half a minute."""
    bound_answer_parsers()
    (_, arguments) = parsed(name, call(name, LONG_CHARACTERS))[2][0]
    assert len(json.loads(arguments)["a"].strip()) >= LONG_CHARACTERS - len(LINES)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mimo", "<function=f><parameter=a>"),
        ("qwen3_coder", "<function=f><parameter=a>"),
        ("seed_oss", "<function=f><parameter=a>"),
        ("ernie45", '<tool_call>{"name":'),
    ],
)
def test_what_takes_for_ever_ends_with_an_error(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next answer is read."""
    bound_answer_parsers()
    monkeypatch.setattr(answer_parsing, "LIMIT_SECONDS", 0.1)
    monkeypatch.setattr(answer_parsing, "SECONDS_PER_CHARACTER", 0.0)
    with pytest.raises(GenerationError, match="reasoning and tool calls takes too long") as caught:
        parsed(name, text * 40_000)
    assert caught.value.status_code == 422
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert parsed(name, "a" * LONG_CHARACTERS)[1] == "a" * LONG_CHARACTERS


def test_a_delta_of_a_stream_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that an engine which is ahead of its client gives in one piece."""
    bound_answer_parsers()
    monkeypatch.setattr(answer_parsing, "LIMIT_SECONDS", 0.1)
    monkeypatch.setattr(answer_parsing, "SECONDS_PER_CHARACTER", 0.0)
    text = "<function=f><parameter=a>" * 40_000
    with pytest.raises(GenerationError, match="reasoning and tool calls takes too long"):
        parser("mimo").parse_delta(text, [5], request(), prompt_token_ids=[2], finished=True)


def test_a_search_in_another_thread_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM derenders there, and regular expressions would hold up the event loop all the same."""

    async def scene() -> None:
        bound_answer_parsers()
        text = "<function=f><parameter=a>" * 40_000
        with monkeypatch.context() as hurried:
            hurried.setattr(answer_parsing, "LIMIT_SECONDS", 0.1)
            hurried.setattr(answer_parsing, "SECONDS_PER_CHARACTER", 0.0)
            with pytest.raises(GenerationError, match="reasoning and tool calls takes too long"):
                await asyncio.to_thread(parsed, "mimo", text)
        honest = call("mimo", 4 * answer_parsing.FREE_CHARACTERS)
        for read in (parsed, streamed):
            assert await asyncio.to_thread(read, "mimo", honest) == read("mimo", honest)

    asyncio.run(scene())


def test_nothing_is_left_that_may_hold_a_lock() -> None:
    """Only code that searches; a late signal finds nothing to end."""

    def frame_in(module: str) -> FrameType:
        space: dict[str, Any] = {"__name__": module, "sys": sys}
        exec("frame = sys._getframe()", space)  # noqa: S102 - a frame of a module of that name
        frame: FrameType = space["frame"]
        return frame

    left = ["vllm.parser.qwen3", "vllm.tool_parsers.utils", "regex._main", "json.decoder"]
    kept = ["vllm.logger", "logging", "prometheus_client.metrics", "asyncio.events", "regexes"]
    assert [answer_parsing._is_interruptible(frame_in(one)) for one in [*left, *kept]] == (
        [True] * len(left) + [False] * len(kept)
    )


def test_all_parsers_were_measured() -> None:
    """A new one is to be tried with what holds the others up, and its honest calls."""
    tools = {*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}
    reasoning = {
        *ReasoningParserManager.reasoning_parsers,
        *ReasoningParserManager.lazy_parsers,
    }
    assert tools <= set(TOOL_PARSERS.split())
    assert reasoning <= set(REASONING_PARSERS.split())
