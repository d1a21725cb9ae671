"""A stream of `/v1/responses` whose engine dies ends with an error that clients understand."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, Self

import pytest
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.responses import api_router
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import GenerationError
from vllm.sampling_params import SamplingParams

from holdfast.patches.broken_responses import tell_broken_responses
from holdfast.patches.patch import original

REQUEST = ResponsesRequest(model="m", input="hi", stream=True)


class DyingAnswer:
    """The tokens of an engine that dies before the first one."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> None:
        raise GenerationError("The engine died.")


def a_serving_object() -> Any:
    """Return vLLM's, whose engine dies."""
    serving = object.__new__(OpenAIServingResponses)
    serving.use_harmony = False
    serving.log_error_stack = False
    serving._process_simple_streaming_events = lambda *_: DyingAnswer()
    return serving


def events_of(serving: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the data of each event that a client gets."""

    async def read() -> list[str]:
        stream = serving.responses_stream_generator(
            REQUEST,
            SamplingParams(),
            None,
            SimpleNamespace(),
            "m",
            None,
            SimpleNamespace(),
        )
        return [event async for event in api_router._convert_stream_to_sse_events(stream)]

    lines = [event.split("\n", 2) for event in asyncio.run(read())]
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data, _ in lines
    ]


@pytest.fixture
def told() -> None:
    """With the patch, applied twice as two engines would."""
    tell_broken_responses()
    tell_broken_responses()


@pytest.mark.usefixtures("told")
def test_a_broken_stream_ends_with_an_error() -> None:
    """In OpenAI's form, with the error that its client raises, and the next number."""
    *begun, (name, last) = events_of(a_serving_object())
    assert [name for name, _ in begun] == ["response.created", "response.in_progress"]
    assert name == last["type"] == "error"
    assert last["sequence_number"] == 2
    assert last["message"] == last["error"]["message"] == "The engine died."
    assert last["code"] == last["error"]["type"] == "InternalServerError"


def test_vllm_breaks_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it does not, the patch can go."""
    name = "_convert_generation_error_to_streaming_response"
    monkeypatch.setattr(GenerateBaseServing, name, original(GenerateBaseServing, name))
    with pytest.raises(ValueError, match="validation error"):
        events_of(a_serving_object())
