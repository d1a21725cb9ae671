"""vLLM's AsyncLLM, which refuses a request that cannot be sent to its engine."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM


class CheckedLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is Any to us
    """An AsyncLLM that is left as it was by a number of more than 64 bits.

    msgspec writes none (OverflowError). vLLM has the request among its own by then, for ever, and
    answers with an empty 500 (`AsyncLLM._add_request` and `generate`, 0.32).
    """

    async def add_request(self, request_id: str, *args: Any, **options: Any) -> Any:
        """Where its outputs come.

        Raises:
            VLLMValidationError: a number in it is too large; nothing is left of it.
        """
        try:
            return await super().add_request(request_id, *args, **options)
        except OverflowError as error:
            await self.abort(request_id)
            raise VLLMValidationError(f"A number in the request is too large: {error}.") from error
