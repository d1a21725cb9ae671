"""What cannot go on ends with an error that clients understand: responses, and messages."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Self

import pytest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
from vllm.entrypoints.openai.responses import api_router
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import SamplingParams

from holdfast.patches.broken_responses import tell_broken_messages, tell_broken_responses
from holdfast.patches.patch import original

REQUEST = ResponsesRequest(model="m", input="hi", stream=True)
DIED = GenerationError("The engine died.")
REFUSED = GracefulHTTPError("The server is draining.", HTTPStatus.SERVICE_UNAVAILABLE)
REPLACED = (
    (GenerateBaseServing, "_convert_generation_error_to_streaming_response"),
    (OpenAIServingResponses, "_run_background_request"),
    (OpenAIServingResponses, "responses_background_stream_generator"),
    (OpenAIServingResponses, "responses_stream_generator"),
    (OpenAIServingResponses, "retrieve_responses"),
    (AnthropicServingMessages, "message_stream_converter"),
)
WAIT_SECONDS = 10.0


class NoAnswer:
    """The tokens of an answer that ends before the first one."""

    def __init__(self, error: Exception | None) -> None:
        """Take the error that ends it; None if it hangs."""
        self._error = error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> None:
        if self._error is None:
            await asyncio.Event().wait()
        else:
            raise self._error


def a_serving_object(error: Exception | None = DIED) -> Any:
    """Return vLLM's, for an answer that ends with `error`, or hangs."""
    serving = object.__new__(OpenAIServingResponses)
    serving.use_harmony = False
    serving.log_error_stack = False
    serving.event_store, serving.background_tasks = {}, {}
    serving.response_store, serving.response_store_lock = {}, asyncio.Lock()
    serving._process_simple_streaming_events = lambda *_: NoAnswer(error)
    return serving


def arguments() -> tuple[Any, ...]:
    """Return what vLLM makes the answer to `REQUEST` from."""
    return REQUEST, SamplingParams(), None, SimpleNamespace(), "m", None, SimpleNamespace()


def store(serving: Any) -> ResponsesResponse:
    """Store the response to `REQUEST` as vLLM does before it makes it in the background."""
    response = ResponsesResponse.from_request(
        REQUEST, SamplingParams(), model_name="m", created_time=1, output=[], status="queued"
    )
    serving.response_store[REQUEST.request_id] = response
    return response


def in_background(serving: Any, making: Awaitable[None]) -> asyncio.Task[None]:
    """Run what makes the response to `REQUEST` as vLLM does."""
    task = asyncio.ensure_future(making)
    serving.background_tasks[REQUEST.request_id] = task
    return task


async def as_read(stream: AsyncIterator[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the data of each event that a client gets of a stream."""
    async with asyncio.timeout(WAIT_SECONDS):
        events = [event async for event in api_router._convert_stream_to_sse_events(stream)]
    lines = [event.split("\n", 2) for event in events]
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data, _ in lines
    ]


def events_of(error: Exception) -> list[tuple[str, dict[str, Any]]]:
    """Return what a client gets of a stream that ends with `error`."""

    async def scene() -> list[tuple[str, dict[str, Any]]]:
        return await as_read(a_serving_object(error).responses_stream_generator(*arguments()))

    return asyncio.run(scene())


@pytest.fixture
def told() -> None:
    """With the patch, applied twice as two engines would."""
    for _ in range(2):
        tell_broken_responses()
        tell_broken_messages()


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what vLLM has."""
    for owner, name in REPLACED:
        monkeypatch.setattr(owner, name, original(owner, name))


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DIED, "InternalServerError"),
        (REFUSED, "service_unavailable"),
        (VLLMValidationError("The grammar is wrong."), "BadRequestError"),
        (ValueError("no such channel"), "BadRequestError"),
    ],
)
def test_a_broken_stream_ends_with_an_error(error: Exception, kind: str) -> None:
    """In OpenAI's form, with the error that its client raises, and the next number."""
    *begun, (name, last) = events_of(error)
    assert [name for name, _ in begun] == ["response.created", "response.in_progress"]
    assert name == last["type"] == "error"
    assert last["sequence_number"] == 2
    assert last["message"] == last["error"]["message"] == str(error)
    assert last["code"] == last["error"]["type"] == kind


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("is_raised", [True, False])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DIED, "server_error"),
        (REFUSED, "server_error"),
        (VLLMValidationError("The grammar is wrong."), "invalid_prompt"),
        (GracefulHTTPError("Slow down.", HTTPStatus.TOO_MANY_REQUESTS), "rate_limit_exceeded"),
    ],
)
def test_a_response_that_is_lost_in_the_background_has_failed(
    error: Exception, code: str, caplog: pytest.LogCaptureFixture, *, is_raised: bool
) -> None:
    """Its client asks for it again and again, and hears of the error nowhere else."""

    async def fail(*_: Any, **_options: Any) -> Any:
        if is_raised:
            raise error
        return OpenAIServingResponses.create_error_response(error)

    async def scene() -> dict[str, Any]:
        serving = a_serving_object()
        serving.responses_full_generator = fail
        response = store(serving)
        await serving._run_background_request(*arguments())
        return dict(response.model_dump(mode="json", by_alias=True))

    with caplog.at_level(logging.WARNING):
        stored = asyncio.run(scene())
    assert stored["status"] == "failed"
    assert stored["error"] == {"code": code, "message": str(error)}
    assert [record.message for record in caplog.records] == [
        f"the response {REQUEST.request_id} has failed: {error}"
    ]


@pytest.mark.usefixtures("told")
def test_a_response_without_events_is_refused_before_a_stream_begins() -> None:
    """It exists, so it is not called unknown."""

    async def scene() -> tuple[Any, Any]:
        serving = a_serving_object()
        response = store(serving)
        refused = await serving.retrieve_responses(REQUEST.request_id, None, stream=True)
        assert await serving.retrieve_responses(REQUEST.request_id, None, stream=False) is response
        return refused, await serving.retrieve_responses("resp_x", None, stream=True)

    refused, unknown = asyncio.run(scene())
    assert (refused.error.code, refused.error.param) == (400, "stream")
    assert "has no events" in refused.error.message
    assert unknown.error.code == 404


@pytest.mark.usefixtures("told")
def test_the_events_of_a_response_that_is_lost_in_the_background_end_with_an_error() -> None:
    """For each client that reads them, and the stored response has failed."""

    async def scene() -> None:
        serving = a_serving_object(REFUSED)
        response = store(serving)
        await in_background(serving, serving._run_background_request_stream(*arguments()))
        read = serving.responses_background_stream_generator
        *_, (name, last) = await as_read(read(REQUEST.request_id))
        assert (name, last["message"]) == ("error", str(REFUSED))
        assert response.status == "failed"
        assert response.model_dump()["error"]["message"] == str(REFUSED)
        assert await as_read(read(REQUEST.request_id, last["sequence_number"])) == []

    asyncio.run(scene())


@pytest.mark.usefixtures("told")
def test_the_events_of_a_cancelled_response_end() -> None:
    """A client that reads them would wait forever."""

    async def scene() -> None:
        serving = a_serving_object(None)
        store(serving)
        making = in_background(serving, serving._run_background_request_stream(*arguments()))
        await until(lambda: REQUEST.request_id in serving.event_store)
        events = serving.responses_background_stream_generator(REQUEST.request_id)
        reading = asyncio.ensure_future(as_read(events))
        await until(lambda: len(serving.event_store[REQUEST.request_id][0]) == 2)
        making.cancel()
        assert [name for name, _ in await reading] == ["response.created", "response.in_progress"]

    asyncio.run(scene())


@pytest.mark.usefixtures("told")
def test_the_events_of_an_unknown_response_are_an_error() -> None:
    """The status has been sent by then."""

    async def scene() -> list[tuple[str, dict[str, Any]]]:
        return await as_read(a_serving_object().responses_background_stream_generator("resp_x"))

    [(name, event)] = asyncio.run(scene())
    assert (name, event["param"]) == ("error", "response_id")


@pytest.mark.usefixtures("untold")
@pytest.mark.parametrize("error", [DIED, REFUSED])
def test_vllm_breaks_the_connection(error: Exception) -> None:
    """Once it does not, the patch can go."""
    with pytest.raises((ValueError, GracefulHTTPError)):
        events_of(error)


def message_events_of(error: Exception) -> list[tuple[str, dict[str, Any]]]:
    """Return what a client of `/v1/messages` gets of a chat that breaks after its first chunk."""
    serving = object.__new__(AnthropicServingMessages)

    async def chunks() -> AsyncIterator[str]:
        begun = ChatCompletionStreamResponse(
            model="m", choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]
        )
        yield f"data: {begun.model_dump_json(exclude_unset=True)}\n\n"
        yield f"data: {serving.create_streaming_error_response(error)}\n\n"
        yield "data: [DONE]\n\n"

    async def scene() -> list[str]:
        return [event async for event in serving.message_stream_converter(chunks())]

    events = [event.split("\n", 2) for event in asyncio.run(scene())]
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data, _ in events
    ]


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("error", "kind"), [(DIED, "InternalServerError"), (REFUSED, "service_unavailable")]
)
def test_a_broken_message_ends_with_the_words_of_the_error(
    error: Exception, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In Anthropic's form, without a traceback for each stream of a lost engine."""
    (first, _), *rest = message_events_of(error)
    assert first == "message_start"
    expected = {"type": "error", "error": {"type": kind, "message": str(error)}}
    assert rest == [("error", expected)]
    assert caplog.records == []


@pytest.mark.usefixtures("untold")
def test_vllm_tells_clients_of_messages_what_it_could_not_read() -> None:
    """Once 0.32, which does so, is not supported, the patch can go."""
    *_, (name, event) = message_events_of(DIED)
    assert name == "error"
    assert "validation error" in event["error"]["message"]


async def until(is_true: Callable[[], bool]) -> None:
    """Return once it is true."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not is_true():  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0)
