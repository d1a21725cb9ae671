"""What users do with the official client, against a real engine."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from servers import Greedy, Server

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("demo")]


MESSAGES: list[Any] = [{"role": "user", "content": "What is a workspace?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["scratch", "persistent"]},
        "is_locked": {"type": "boolean"},
    },
    "required": ["kind", "is_locked"],
    "additionalProperties": False,
}
"""Bounded, so that random weights close it."""


@pytest.fixture(scope="module")
def client(demo: Server) -> openai.OpenAI:
    """The official client on the shared server."""
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_chat_answers_with_usage(client: openai.OpenAI, demo: Server) -> None:
    """A chat completion has an answer of the length that was asked for."""
    answer = client.chat.completions.create(
        model=demo.model,
        messages=MESSAGES,
        max_completion_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_stream_equals_whole_answer_and_ends_with_usage(
    client: openai.OpenAI, demo: Server
) -> None:
    """The pieces of a stream make the answer that is given at once, and usage comes last."""
    options: dict[str, Any] = {
        "model": demo.model,
        "messages": MESSAGES,
        "max_completion_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_completion_gives_log_probs(client: openai.OpenAI, demo: Server) -> None:
    """Log-probs come for each token, with the alternatives that were asked for."""
    answer = client.completions.create(
        model=demo.model,
        prompt="hold",
        max_tokens=6,
        temperature=0,
        logprobs=3,
        extra_body={"ignore_eos": True},
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert len(found.token_logprobs) == 6
    assert all(value is not None and value <= 0 for value in found.token_logprobs)
    assert found.top_logprobs is not None
    assert all(len(top) >= 3 for top in found.top_logprobs)


def test_json_schema_is_followed(client: openai.OpenAI, demo: Server) -> None:
    """A response format with a schema gives JSON that the schema admits."""
    answer = client.chat.completions.create(
        model=demo.model,
        messages=MESSAGES,
        temperature=0,  # a grammar lets in any number of spaces, and a draw may be nothing else
        max_completion_tokens=400,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "slot", "schema": SCHEMA, "strict": True},
        },
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


def test_named_tool_call_validates_against_its_schema(client: openai.OpenAI, demo: Server) -> None:
    """A tool that is asked for by name is called, with arguments that its schema admits."""
    answer = client.chat.completions.create(
        model=demo.model,
        messages=MESSAGES,
        temperature=0,  # as above
        max_completion_tokens=400,
        tools=[
            {
                "type": "function",
                "function": {"name": "reserve", "parameters": SCHEMA, "strict": True},
            }
        ],
        tool_choice={"type": "function", "function": {"name": "reserve"}},
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    assert calls[0].function.name == "reserve"
    jsonschema.validate(json.loads(calls[0].function.arguments), SCHEMA)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["at once", "streamed"])
def test_a_tool_call_is_counted(client: openai.OpenAI, demo: Server, is_streamed: bool) -> None:
    """Once, and one whose arguments keep the schema is not broken."""
    calls, broken = demo.metric("tool_calls_total"), demo.metric("broken_tool_calls_total")
    answer = client.chat.completions.create(
        model=demo.model,
        messages=MESSAGES,
        temperature=0,  # as above
        max_completion_tokens=400,
        tools=[
            {
                "type": "function",
                "function": {"name": "reserve", "parameters": SCHEMA, "strict": True},
            }
        ],
        tool_choice={"type": "function", "function": {"name": "reserve"}},
        stream=is_streamed,
    )
    if isinstance(answer, openai.Stream):
        assert any(chunk.choices[0].finish_reason for chunk in answer if chunk.choices)
    assert demo.metric("tool_calls_total") == calls + 1
    assert demo.metric("broken_tool_calls_total") == broken


def test_models_are_listed(client: openai.OpenAI, demo: Server) -> None:
    """The model list names what is served, with its length."""
    models = client.models.list().data
    assert [model.id for model in models] == [demo.model] == ["holdfast-demo"]


def test_bad_request_is_a_typed_error(client: openai.OpenAI, demo: Server) -> None:
    """A wrong parameter raises the client's BadRequestError, whose body says which."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=demo.model, messages=MESSAGES, temperature=-1)
    assert "temperature" in str(caught.value)


def test_unknown_model_is_a_typed_error(client: openai.OpenAI) -> None:
    """A model that is not served raises the client's NotFoundError."""
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=MESSAGES)


PROMPTS = ("hold fast", "The quick brown fox", "a" * 300, "0123456789" * 250)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)} characters")
def test_greedy_output_equals_transformers(
    demo: Server, trained_greedy_reference: Greedy, prompt: str
) -> None:
    """Token for token, what transformers generates from the same weights."""
    answer = demo.completion(prompt, max_tokens=24, return_token_ids=True, ignore_eos=True).json()
    assert answer["choices"][0]["token_ids"] == trained_greedy_reference(prompt, 24)
