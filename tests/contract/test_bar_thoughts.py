"""Thoughts end with a bar, where a request thinks at all."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager

from heard_streams import HeardStream
from holdfast.demo.tokenizer import write_tokenizer
from stream_features import (
    END_OF_THOUGHT,
    LETTERS,
    PARSER_FILE,
    PARSER_FLAGS,
    PARSER_NAME,
    TOOL,
    feature_body,
    shows,
)

THOUGHT, SAID = "a|b".split(END_OF_THOUGHT)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """That of the demo model."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 2048)
    return AutoTokenizer.from_pretrained(directory)


MESSAGES: list[Any] = [{"role": "user", "content": "Say |"}]
"""With a bar in the prompt, too."""


@pytest.fixture(autouse=True, scope="module")
def plugin() -> Iterator[ModuleType]:
    """The parser, which vLLM knows only while these tests run: other tests count vLLM's own.

    An import at the top would register it as soon as the tests are collected.
    """
    ReasoningParserManager.import_reasoning_parser(str(PARSER_FILE))
    yield sys.modules[PARSER_FILE.stem]
    del ReasoningParserManager.reasoning_parsers[PARSER_NAME]


def prompt_of(tokenizer: Any) -> Any:
    """The tokens of the prompt."""
    return tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)


def a_parser(tokenizer: Any, tools: Any, *, thinking: bool) -> Any:
    """The parser of one answer of a server with the flags of the soak."""
    kind: Any = ParserManager.get_parser(
        tool_parser_name="hermes",
        reasoning_parser_name=PARSER_NAME,
        enable_auto_tools=True,
        tokenizer=tokenizer,
    )
    return kind(tokenizer, tools, chat_template_kwargs={"thinking": thinking}, model_config=None)


def read(tokenizer: Any, pieces: list[str], *, thinking: bool) -> tuple[str, str]:
    """What was thought and said, as the chat route streams it."""
    parser = a_parser(tokenizer, None, thinking=thinking)
    deltas = [
        parser.parse_delta(
            delta_text=piece,
            delta_token_ids=list(piece.encode()),
            request=ChatCompletionRequest(messages=MESSAGES),
            prompt_token_ids=prompt_of(tokenizer),
            finished=number == len(pieces),
        )
        for number, piece in enumerate(pieces, start=1)
    ]
    found = [delta for delta in deltas if delta is not None]
    thoughts = "".join(delta.reasoning or "" for delta in found)
    return thoughts, "".join(delta.content or "" for delta in found)


@pytest.mark.parametrize("pieces", [["a", "|", "b"], ["a|", "b"], ["a", "|b"], ["a|b"]])
def test_a_thought_ends_with_the_bar(tokenizer: Any, pieces: list[str]) -> None:
    """However the answer is cut."""
    assert read(tokenizer, pieces, thinking=True) == (THOUGHT, SAID)


def test_a_request_that_does_not_think_has_content(tokenizer: Any) -> None:
    """Also with a bar in it."""
    assert read(tokenizer, ["a|", "b"], thinking=False) == ("", "a|b")


def test_the_grammar_of_a_call_stays_that_of_the_request(tokenizer: Any) -> None:
    """The parser of the calls puts none of its own in its place, and reads what it makes."""
    body = feature_body("tool call", is_chat=True)
    arguments = f'{{"text": "{"a" * LETTERS}"}}'
    call = f'<tool_call>\n{{"name": "{TOOL}", "arguments": {arguments}}}\n</tool_call>'
    regex = body["structured_outputs"]["regex"]
    assert re.fullmatch(regex, call)
    request = ChatCompletionRequest(messages=MESSAGES, **body)
    parser = a_parser(tokenizer, request.tools, thinking=False)
    assert parser.adjust_request(request).structured_outputs.regex == regex
    heard = HeardStream()
    for number, piece in enumerate(call, start=1):
        delta = parser.parse_delta(
            delta_text=piece,
            delta_token_ids=list(piece.encode()),
            request=request,
            prompt_token_ids=prompt_of(tokenizer),
            finished=number == len(call),
        )
        calls = delta.tool_calls if delta is not None else ()
        heard.called += "".join(
            (one.function.name or "") + (one.function.arguments or "") for one in calls
        )
    assert shows("tool call", heard.texts, ())


def test_the_flags_name_the_parser(plugin: ModuleType) -> None:
    """The server imports the file without the module of the flags."""
    assert f"--reasoning-parser={plugin.NAME}" in PARSER_FLAGS
    assert f"--reasoning-parser-plugin={plugin.__file__}" in PARSER_FLAGS
    assert plugin.END == END_OF_THOUGHT
