"""Ends a request with the reason for which the engine gave its grammar up.

`patches.grammars` has the engine name that reason in the last output. Seen in vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from vllm.exceptions import VLLMValidationError

from holdfast.engine.vllm_errors import as_http_errors
from holdfast.errors import RETRY_AFTER_SECONDS, OverloadedError
from holdfast.patches.grammar_compilation import COMPILES_TOO_LONG, NOT_COMPILED
from holdfast.patches.grammar_memory import NO_ROOM
from holdfast.patches.grammar_steps import HAD_NO_TIME, TOO_LARGE, TOO_SLOW
from holdfast.patches.grammars import DEAD_END
from holdfast.request_context import current_request

_REFUSALS = {
    TOO_SLOW: "it takes the engine too much CPU time per token",
    TOO_LARGE: "its answer takes the engine too much memory",
}
_LATER = {
    NO_ROOM: "The grammars of all requests take the engine too much memory. Try again later.",
    NOT_COMPILED: "The grammars of other requests take the engine too long. Try again later.",
    HAD_NO_TIME: "The engine had no time for the grammar of the request. Try again later.",
    # A trial needed at most half of that time.
    COMPILES_TOO_LONG: "The engine is too busy to compile the grammar. Try again later.",
}
_COUNTED = frozenset({DEAD_END, *_REFUSALS, *_LATER})
_DEAD_END = "The answer reached a point where the grammar allows no token."


async def refusing(
    outputs: Any, refuse: Callable[[], None], *, has_begun: bool = False
) -> AsyncIterator[Any]:
    """Yield the outputs of a request that has a grammar; `has_begun` if its prompt was counted.

    Raises:
        VLLMValidationError: the engine gave the grammar up, see `patches.grammars`, or it leads
            nowhere.
        GracefulHTTPError: it gave it up because others took its memory or its time.
    """
    async with aclosing(outputs):
        async for output in outputs:
            reasons = {one.stop_reason for one in output.outputs if one.finish_reason == "error"}
            if reasons & _COUNTED:
                # Nothing else counts them: the caller does not get this output. vLLM asks a grammar
                # about the first token of an answer, so the engine has read the prompt.
                prompt_tokens = 0 if has_begun else len(output.prompt_token_ids or ())
                output_tokens = sum(len(one.token_ids) for one in output.outputs)
                current_request().count_tokens(prompt_tokens, output_tokens)
            # First: the answers of a slow grammar take time from each other.
            if refused := reasons & _REFUSALS.keys():
                refuse()
                reason = _REFUSALS[refused.pop()]
                raise VLLMValidationError(f"The grammar of the request is refused: {reason}.")
            if DEAD_END in reasons:
                raise VLLMValidationError(_DEAD_END)
            if later := reasons & _LATER.keys():
                with as_http_errors(current_request()):
                    cause = _LATER[later.pop()]
                    raise OverloadedError(cause, retry_after_seconds=RETRY_AFTER_SECONDS)
            has_begun = True
            yield output
