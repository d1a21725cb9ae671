"""Ends a stream of `/v1/responses` that cannot go on with an error, as vLLM ends those of chats.

vLLM makes the error of a chat and reads it as an event of a response, which it is not: pydantic
raises, and the client sees a cut connection (`OpenAIServingResponses.responses_stream_generator`,
0.32, 0.33). The form of the event is https://platform.openai.com/docs/api-reference/responses-streaming,
and vLLM's own error is a member of it: OpenAI's client raises for that one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.responses import api_router
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

from holdfast.patches.patch import original, replace


class _BrokenResponseError(Exception):
    """The answer of a stream cannot go on; `error` is what vLLM says of it."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error.get("message"))
        self.error = error


def tell_broken_responses() -> None:
    """Write an `error` event as the last one of such a stream; again changes nothing."""
    error_of = original(GenerateBaseServing, "_convert_generation_error_to_streaming_response")
    as_events = original(api_router, "_convert_stream_to_sse_events")

    def error_or_raise(self: Any, error: Exception) -> Any:
        said = error_of(self, error)
        if isinstance(self, OpenAIServingResponses):
            raise _BrokenResponseError(json.loads(said)["error"]) from error
        return said

    async def as_events_to_the_end(generator: Any) -> AsyncGenerator[str, None]:
        sent = 0
        try:
            async for event in as_events(generator):
                yield event
                sent += 1
        except _BrokenResponseError as broken:
            yield _event(broken.error, sent)

    replace(GenerateBaseServing, "_convert_generation_error_to_streaming_response", error_or_raise)
    replace(api_router, "_convert_stream_to_sse_events", as_events_to_the_end)


def _event(error: dict[str, Any], number: int) -> str:
    event = {
        "type": "error",
        "sequence_number": number,
        "code": error.get("type"),
        "message": error.get("message"),
        "param": error.get("param"),
        "error": error,
    }
    return f"event: error\ndata: {json.dumps(event)}\n\n"
