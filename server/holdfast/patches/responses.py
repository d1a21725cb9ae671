"""Bounds what requests to `/v1/responses` make vLLM keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError

from holdfast.patches.patch import original, replace


def bound_responses(shorten: Callable[[str], str]) -> None:
    """Shorten the IDs that bodies give, and keep no response unasked; idempotent.

    vLLM 0.32 repeats such an ID, of any length, in each event of a stream. It refuses `background`
    without `store` in the JSON of a request, where `"false"` counts as true. Once that is read as
    False, vLLM takes it for a request whose `store` was checked, and keeps the response forever.
    """
    as_vllm = original(OpenAIServingResponses, "create_responses")

    def create_responses(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        if request.background and not request.store:
            raise VLLMValidationError(  # as vLLM words it
                "background can only be used when `store` is true", parameter="background"
            )
        request.request_id = shorten(request.request_id)
        return as_vllm(self, request, *args, **options)

    replace(OpenAIServingResponses, "create_responses", create_responses)
