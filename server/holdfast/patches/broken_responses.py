"""Ends a response or a message that cannot go on with an error, as vLLM ends a chat.

In `/v1/responses`, vLLM catches only GenerationError, and reads the error of a chat as an event of
a response, which it is not: pydantic raises. So the client sees a cut connection. A response in the
background stays `queued`, or fails without a reason, and those that follow its events wait forever
(`OpenAIServingResponses`, 0.32, 0.33). The form of the event is
https://platform.openai.com/docs/api-reference/responses-streaming, and vLLM's own error is a member
of it: OpenAI's client raises for that one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import VLLMError, VLLMValidationError

from holdfast.errors import our_type_of
from holdfast.patches.log_lines import shortened
from holdfast.patches.patch import original, replace

_ENDINGS = (VLLMError, ValueError, RuntimeError)
"""What ends a response: our refusals and losses, which are VLLMErrors here, vLLM's own ones, and
what its parsers raise for an answer that they cannot read."""

_ERROR_CHUNK = 'data: {"error"'
"""The beginning of a chat's error in its stream; no chunk of an answer begins like this."""

logger = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class _ErrorEvent:
    """The last event of a response that cannot go on; vLLM writes it as it writes its own."""

    error: dict[str, Any]
    sequence_number: int
    type: str = "error"

    def model_dump_json(self, **_options: Any) -> str:
        """Return the event's data."""
        return json.dumps(
            {
                "type": self.type,
                "sequence_number": self.sequence_number,
                "code": self.error["type"],
                "message": self.error["message"],
                "param": self.error["param"],
                "error": self.error,
            }
        )


def tell_broken_responses() -> None:
    """Have each response that cannot go on say that it has failed; idempotent."""
    error_of = original(GenerateBaseServing, "_convert_generation_error_to_streaming_response")
    events_of = original(OpenAIServingResponses, "responses_stream_generator")

    def error_or_raise(self: Any, error: Exception) -> Any:
        if isinstance(self, OpenAIServingResponses):
            raise error
        return error_of(self, error)

    async def events_to_the_end(
        self: Any, request: Any, *arguments: Any, **options: Any
    ) -> AsyncGenerator[Any, None]:
        sent = 0
        try:
            async for event in events_of(self, request, *arguments, **options):
                yield event
                sent += 1
        except _ENDINGS as error:
            await _record_failure(self, request, error)
            yield _event_of(error, sent)

    async def run_to_the_end(self: Any, request: Any, *arguments: Any, **options: Any) -> None:
        try:
            answer = await self.responses_full_generator(request, *arguments, **options)
        except _ENDINGS as error:
            await _record_failure(self, request, error)
        else:
            if isinstance(answer, ErrorResponse):
                await _record_error(self, request, answer.error)

    replace(GenerateBaseServing, "_convert_generation_error_to_streaming_response", error_or_raise)
    replace(OpenAIServingResponses, "responses_stream_generator", events_to_the_end)
    replace(OpenAIServingResponses, "_run_background_request", run_to_the_end)
    replace(OpenAIServingResponses, "responses_background_stream_generator", _background_events)
    _refuse_missing_events()


def _refuse_missing_events() -> None:
    """Refuse to stream a response without events while it can still have a status of its own."""
    retrieve = original(OpenAIServingResponses, "retrieve_responses")

    async def retrieve_with_events(
        self: Any, response_id: str, starting_after: int | None, stream: bool | None
    ) -> Any:
        if stream and response_id in self.response_store and response_id not in self.event_store:
            return self.create_error_response(
                f"The response '{response_id}' has no events to stream: it was not made with both "
                "`background` and `stream`. Ask for it without `stream`.",
                err_type="invalid_request_error",
                param="stream",
            )
        return await retrieve(self, response_id, starting_after=starting_after, stream=stream)

    replace(OpenAIServingResponses, "retrieve_responses", retrieve_with_events)


def tell_broken_messages() -> None:
    """Have a stream of `/v1/messages` that cannot go on end with the words of the error.

    vLLM 0.32 reads the error of the chat behind it as a chunk: the client gets pydantic's words,
    and the log a traceback. 0.33 has an object for it, not text, and sends its words.
    """
    events_of = original(AnthropicServingMessages, "message_stream_converter")

    async def events_to_the_end(self: Any, chunks: AsyncGenerator[Any, None]) -> AsyncIterator[str]:
        error: dict[str, Any] | None = None

        async def until_error() -> AsyncIterator[Any]:
            nonlocal error
            async for chunk in chunks:
                if isinstance(chunk, str) and chunk.startswith(_ERROR_CHUNK):
                    error = json.loads(chunk.removeprefix("data:"))["error"]
                    return
                yield chunk

        async for event in events_of(self, until_error()):
            yield event
        if error is not None:
            kind = our_type_of(error["type"], error["code"])
            said = {"type": kind, "message": error["message"]}
            yield f"event: error\ndata: {json.dumps({'type': 'error', 'error': said})}\n\n"

    replace(AnthropicServingMessages, "message_stream_converter", events_to_the_end)


async def _background_events(
    self: Any, response_id: str, starting_after: int | None = None
) -> AsyncGenerator[Any, None]:
    """Yield the events of a response in the background until nothing makes more of them.

    vLLM's own waits for `response.completed`, which one that failed or was cancelled never has.
    """
    if response_id not in self.event_store:
        error = VLLMValidationError(f"Unknown response_id: {response_id}", parameter="response_id")
        yield _event_of(error, 0)
        return
    events, has_more = self.event_store[response_id]
    at = 0 if starting_after is None else starting_after + 1
    while True:
        has_more.clear()
        while at < len(events):
            yield events[at]
            at += 1
        making = self.background_tasks.get(response_id)
        if making is None or making.done():
            return
        await has_more.wait()


async def _record_failure(serving: Any, request: Any, error: Exception) -> None:
    """Give a stored response its error, and log what vLLM has no class for."""
    is_unknown = not isinstance(error, VLLMError)
    if is_unknown:
        logger.warning("the response %s has failed", request.request_id, exc_info=error)
    said = OpenAIServingResponses.create_error_response(error).error
    await _record_error(serving, request, said, is_logged=not is_unknown)


async def _record_error(
    serving: Any, request: Any, said: ErrorInfo, *, is_logged: bool = True
) -> None:
    """Give a stored response its status and the error that a plain request would get.

    Its request was answered long ago, so the cause is logged here.
    """
    async with serving.response_store_lock:
        stored = serving.response_store.get(request.request_id)
        if stored is None or stored.status in ("completed", "cancelled", "failed"):
            return
        stored.status = "failed"
        # vLLM's class allows fields that it does not name, and writes them.
        stored.error = {"code": _code_of(said.code), "message": said.message}
    if is_logged:
        logger.warning(
            "the response %s has failed: %s", request.request_id, shortened(said.message)
        )


def _code_of(status: int) -> str:
    """Return the word that OpenAI's API has for the error of a response."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_exceeded"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"


def _event_of(error: Exception, number: int) -> _ErrorEvent:
    said = OpenAIServingResponses.create_error_response(error).error
    kind = our_type_of(said.type, said.code)
    return _ErrorEvent({**said.model_dump(), "type": kind}, number)
