"""The chunks of a chat stream are those of vLLM's models, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion import protocol
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls

from holdfast.patches import chunks

TEXT_CHOICE = {"index": 0, "logprobs": None, "finish_reason": None, "token_ids": None}
CHUNK = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m"}


def ours(delta: dict[str, Any], choice: dict[str, Any], chunk: dict[str, Any]) -> Any:
    """A chunk made as vLLM's stream makes one."""
    made = chunks.choice(**choice, delta=chunks.delta(**delta))
    return chunks.chunk(**chunk, choices=[made])


def theirs(delta: dict[str, Any], choice: dict[str, Any], chunk: dict[str, Any]) -> Any:
    """The same of vLLM's models."""
    made = protocol.ChatCompletionResponseStreamChoice(
        **choice, delta=protocol.DeltaMessage(**delta)
    )
    return protocol.ChatCompletionStreamResponse(**chunk, choices=[made])


def test_this_vllm_writes_them_so() -> None:
    """They are used with the vLLM that is installed, and only the names in its stream change."""
    model = protocol.ChatCompletionStreamResponse
    assert chunks.write_text_directly()
    assert chunks.write_text_directly()
    assert protocol.ChatCompletionStreamResponse is model


@given(
    content=st.text(),
    index=st.integers(0, 200),
    created=st.integers(0, 2**40),
    request_id=st.text(),
    model=st.text(),
)
def test_text_is_written_as_the_models_write_it(
    content: str, index: int, created: int, request_id: str, model: str
) -> None:
    """Whatever a model says, on any choice of any request."""
    made = (
        {"content": content},
        {**TEXT_CHOICE, "index": index},
        {**CHUNK, "created": created, "id": request_id, "model": model},
    )
    options = {"exclude_unset": True}
    assert ours(*made).model_dump_json(**options) == theirs(*made).model_dump_json(**options)


@pytest.mark.parametrize("options", [{"exclude_unset": True}, {}, {"exclude_none": True}])
@pytest.mark.parametrize(
    ("delta", "choice", "chunk"),
    [
        ({}, TEXT_CHOICE, CHUNK),
        ({"content": None}, TEXT_CHOICE, CHUNK),
        ({"content": "x"}, TEXT_CHOICE, CHUNK),
        ({"role": "assistant", "content": ""}, TEXT_CHOICE, CHUNK),
        ({"reasoning": "because"}, TEXT_CHOICE, CHUNK),
        ({"content": "x"}, {**TEXT_CHOICE, "token_ids": [1, 2]}, CHUNK),
        ({"content": "x"}, {**TEXT_CHOICE, "finish_reason": "stop", "stop_reason": 3}, CHUNK),
        ({"content": "x"}, {**TEXT_CHOICE, "logprobs": {"content": []}}, CHUNK),
        ({"content": "x"}, {"index": 1}, CHUNK),
        ({"content": "x"}, TEXT_CHOICE, {**CHUNK, "prompt_token_ids": [5], "prompt_text": "p"}),
        ({"content": "x"}, TEXT_CHOICE, {"model": "m", "id": "i", "created": 1}),
    ],
)
def test_every_other_chunk_is_one_of_vllms_models(
    delta: dict[str, Any], choice: dict[str, Any], chunk: dict[str, Any], options: dict[str, bool]
) -> None:
    """The first, the last, and whatever has more than text."""
    made = (delta, choice, chunk)
    assert ours(*made).model_dump_json(**options) == theirs(*made).model_dump_json(**options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("usage", protocol.UsageInfo(prompt_tokens=1, completion_tokens=2, total_tokens=3)),
        ("system_fingerprint", "vllm-0.32"),
    ],
)
def test_what_is_set_on_a_chunk_later_is_written(name: str, value: object) -> None:
    """Usage with every token, and the fingerprint."""
    made = ({"content": "x"}, TEXT_CHOICE, CHUNK)
    our_chunk, their_chunk = ours(*made), theirs(*made)
    setattr(our_chunk, name, value)
    setattr(their_chunk, name, value)
    options = {"exclude_unset": True}
    assert our_chunk.model_dump_json(**options) == their_chunk.model_dump_json(**options)


def test_a_chunk_without_choices_is_one_of_vllms_models() -> None:
    """The one that ends a stream with its usage."""
    assert type(chunks.chunk(**CHUNK, choices=[])) is protocol.ChatCompletionStreamResponse


def test_a_choice_passes_the_filter_of_tool_calls() -> None:
    """`parallel_tool_calls: false` looks at every choice."""
    made = chunks.choice(**TEXT_CHOICE, delta=chunks.delta(content="x"))
    message = {"role": "user", "content": "hold"}
    request = protocol.ChatCompletionRequest(messages=[message], parallel_tool_calls=False)
    assert maybe_filter_parallel_tool_calls(made, request) is made
