"""The clients of the soak hear all of a stream, and know which answers may be compared."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs
from openai.types.responses import ResponseCompletedEvent, ResponseTextDeltaEvent

from heard_streams import HeardStream
from load_generator import CLEAR_MARGIN, LOG_PROB_TOLERANCE, Answer, Load, Question, margins
from stream_features import (
    CHAT_FEATURES,
    END_OF_THOUGHT,
    FEATURES,
    LETTERS,
    STOP,
    TOOL,
    feature_body,
    shows,
)
from streaming_load import EACH, asked_streams, half_featured

QUESTION = Question("streamed completion", (20,), 8)
WHOLE = Answer(QUESTION, ("abc", "", ""), frozenset({"length"}), (1, 2, 3), (1, 3), (-0.1, -0.2))
LETTERED = "a" * LETTERS
CALL = f'{TOOL}{{"text": "{LETTERED}"}}'


def a_chunk(delta: dict[str, Any], **further: Any) -> ChatCompletionChunk:
    """A chunk of a chat as vLLM sends it."""
    choice = {"index": 0, "delta": delta, "finish_reason": None, **further}
    named = {"id": "a", "created": 1, "model": "m", "object": "chat.completion.chunk"}
    return ChatCompletionChunk.model_validate({**named, "choices": [choice]})


def a_call(**function: str) -> dict[str, Any]:
    """A part of a tool call."""
    return {"tool_calls": [{"index": 0, "function": function}]}


def test_a_chat_is_heard() -> None:
    """What it says, thinks and calls, its tokens and their log-probs."""
    place = {"token": "b", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    heard = HeardStream()
    for chunk in (
        a_chunk({"role": "assistant", "content": ""}),
        a_chunk({"reasoning": "a"}, token_ids=[97]),
        a_chunk({"content": "b"}, token_ids=[124, 98], logprobs={"content": [place]}),
        a_chunk(a_call(name="hold")),
        a_chunk(a_call(arguments="{}"), finish_reason="stop"),
    ):
        heard.hear(chunk)
    assert heard.texts == ("b", "a", "hold{}")
    assert (heard.tokens, heard.log_probs, heard.reasons) == ([97, 124, 98], [-0.5], {"stop"})


def test_a_completion_is_heard() -> None:
    """With the usage, which comes last and without a choice."""
    choice = {"index": 0, "text": "b", "finish_reason": "length", "token_ids": [98]}
    log_probs = {"tokens": ["b"], "token_logprobs": [-0.5], "text_offset": [0], "top_logprobs": []}
    named = {"id": "a", "created": 1, "model": "m", "object": "text_completion"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    heard = HeardStream()
    for further in (
        {"choices": [{**choice, "logprobs": log_probs}]},
        {"choices": [], "usage": usage},
    ):
        heard.hear(Completion.model_validate({**named, **further}))
    assert heard.texts == ("b", "", "")
    assert (heard.tokens, heard.log_probs, heard.usage) == ([98], [-0.5], (3, 1))


def test_a_response_is_heard() -> None:
    """Its status is the reason why it ended."""
    usage = {"input_tokens": 3, "output_tokens": 1, "total_tokens": 4}
    heard = HeardStream()
    heard.hear(ResponseTextDeltaEvent.construct(type="response.output_text.delta", delta="b"))
    heard.hear(
        ResponseCompletedEvent.construct(
            type="response.completed", response={"status": "completed", "usage": usage}
        )
    )
    assert (heard.texts, heard.reasons, heard.usage) == (("b", "", ""), {"completed"}, (3, 1))


@pytest.mark.parametrize(
    "changed",
    [
        {"texts": ("abd", "", "")},
        {"texts": ("abc", "a", "")},
        {"tokens": (1, 2, 4)},
        {"usage": (1, 4)},
        {"finish_reasons": frozenset({"stop"})},
        {"log_probs": (-0.1, -0.2 - 2 * LOG_PROB_TOLERANCE)},
        {"log_probs": (-0.1,)},
    ],
)
def test_an_answer_that_differs_is_wrong(changed: dict[str, Any]) -> None:
    """In anything but the rounding of its log-probs."""
    rounded = replace(WHOLE, log_probs=(-0.1, -0.2 + LOG_PROB_TOLERANCE / 2))
    other = replace(WHOLE, **changed)
    assert Load({QUESTION: WHOLE}, [WHOLE, rounded, other]).wrong == [other]


def test_a_broken_stream_is_wrong_in_any_of_its_texts() -> None:
    """What it had sent has to be the beginning of what was said, thought and called."""
    broken = replace(WHOLE, texts=("ab", "", ""), error="APIError", is_begun=True)
    wrong = replace(broken, texts=("ab", "", "x"))
    assert Load({QUESTION: WHOLE}, [broken, wrong]).wrong == [wrong]


def test_a_margin_is_between_the_first_two_tokens() -> None:
    """By both routes; a token that a grammar leaves alone is ahead of all."""
    near = -1.0 - CLEAR_MARGIN / 2
    completion = Logprobs(top_logprobs=[{"token_id:1": near, "token_id:2": -1.0}, {"a": 0.0}])
    tops = [[{"token": "a", "logprob": value, "bytes": None} for value in (-1.0, near)]]
    content = [{"token": "a", "logprob": -1.0, "bytes": None, "top_logprobs": top} for top in tops]
    chat = ChoiceLogprobs.model_validate({"content": content})
    assert list(margins(completion)) == [pytest.approx(CLEAR_MARGIN / 2), float("inf")]
    assert list(margins(chat)) == [pytest.approx(CLEAR_MARGIN / 2)]


@pytest.mark.parametrize(
    ("feature", "texts", "log_probs"),
    [
        ("", ("a", "", ""), ()),
        ("stop string", (LETTERED, "", ""), ()),
        ("log-probs", ("a", "", ""), (-0.1,)),
        ("tool call", ("", "", CALL), ()),
        ("thought", (LETTERED, LETTERED, ""), ()),
    ],
)
def test_a_feature_is_known(
    feature: str, texts: tuple[str, ...], log_probs: tuple[float, ...]
) -> None:
    """An answer without it does not show it."""
    assert shows(feature, texts, log_probs)
    assert not shows(feature, ("", "", CALL[:-1]), ())


@pytest.mark.parametrize(
    ("feature", "text"),
    [
        ("stop string", f"{LETTERED}{STOP}{LETTERED}"),
        ("thought", f"{LETTERED}{END_OF_THOUGHT}{LETTERED}"),
    ],
)
def test_a_grammar_makes_the_answer_show_it(feature: str, text: str) -> None:
    """At one place of the text alone."""
    regex = feature_body(feature, is_chat=True)["structured_outputs"]["regex"]
    assert re.fullmatch(regex, text)
    assert not re.fullmatch(regex, text[1:])
    if feature == "stop string":
        assert not re.fullmatch(regex, f"{STOP}{text[len(STOP) :]}")


def test_half_of_the_streams_have_features() -> None:
    """Each feature as often as the others."""
    found = half_featured(asked_streams(1, longest_tokens=100))
    counts = Counter(question.feature for question in found)
    assert counts.pop("") == len(found) / 2
    assert counts == dict.fromkeys(FEATURES, EACH)
    assert all(one.kind == "streamed chat" for one in found if one.feature in CHAT_FEATURES)
    with pytest.raises(AssertionError, match="a thought"):
        half_featured([question for question in found if question.feature != "thought"])
