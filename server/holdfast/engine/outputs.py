"""Recognises how vLLM reports an engine's death, and tells its routes what to answer.

Seen in vLLM 0.32 and, by its source, in 0.33.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GenerationError, GracefulHTTPError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from holdfast.engine.checked_llm import UnsentError
from holdfast.engine.digests import digest_of, size_bytes_of
from holdfast.engine.request import Method
from holdfast.errors import HoldfastError

_INCIDENTAL = frozenset({"arrival_time", "cache_salt"})
"""Parts of a prompt."""
_INCIDENTAL_PARAMETERS = frozenset(
    {"seed", "max_tokens", "output_kind", "skip_clone", "stream_interval"}
)
_CHILD_SEPARATOR = "_"
_RANDOM_SEPARATOR = "-"


class VllmDialect:
    """Implements `request.Dialect` for an AsyncLLM."""

    def __init__(self, transfers_kv: Callable[[], bool] = lambda: True) -> None:
        """Take `transfers_kv`, which says whether the engine exchanges KV caches with others."""
        self._transfers_kv = transfers_kv

    def is_death(self, error: Exception, llm: Any) -> bool:
        """Whether `error` comes from the engine's end.

        A call that is being sent just when the sockets close fails with an EngineGenerateError.
        """
        if isinstance(error, EngineDeadError):
            return True
        return isinstance(error, EngineGenerateError) and bool(llm.errored)

    def is_unsent(self, error: Exception) -> bool:
        """Whether the call was still waiting for its turn in the engine."""
        return isinstance(error, UnsentError)

    def is_abort(self, output: Any) -> bool:
        """Whether the engine aborted the request, as a core that got SIGTERM does with all."""
        return output.finished and any(
            getattr(one, "finish_reason", None) == "abort" for one in _completions(output)
        )

    def lifted(self, error: HoldfastError) -> Exception:
        """Return what vLLM reports cleanly, also within a stream, or under its own status.

        Any other class is logged with its traceback for each request.
        """
        answer: Exception = (
            GenerationError(error.cause)
            if error.http_status == HTTPStatus.INTERNAL_SERVER_ERROR
            else GracefulHTTPError(error.cause, HTTPStatus(error.http_status))
        )
        return answer

    def is_replayable(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the prompt does not come as a stream and no other engine holds a part of it.

        Such a part is a KV cache to transfer, or an image sent before (0.32, 0.33). If nothing is
        transferred, a client that mentions it changes nothing.
        """
        if self.is_streamed(arguments) or _is_sent_in_part(arguments.get("prompt")):
            return False
        extra = getattr(arguments.get("sampling_params"), "extra_args", None) or {}
        return "kv_transfer_params" not in extra or not self._transfers_kv()

    def is_streamed(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the prompt comes as a stream, as in a realtime transcription."""
        return isinstance(arguments.get("prompt"), AsyncGenerator)

    def identity(self, arguments: Mapping[str, Any]) -> str:
        """Digest prompt and parameters, except those that do not change what is computed first.

        A client can vary these freely: the seed, the salt of the cache, how long the answer may be,
        and whether it is streamed.
        """
        parameters = arguments.get("sampling_params") or arguments.get("pooling_params")
        prompt = arguments.get("prompt")
        if isinstance(prompt, Mapping):
            prompt = {name: part for name, part in prompt.items() if name not in _INCIDENTAL}
        lora = arguments.get("lora_request")
        return digest_of(prompt, _essential(parameters), getattr(lora, "lora_name", None))

    def size_bytes(self, arguments: Mapping[str, Any]) -> int:
        """Estimate the size of the prompt; parameters are small."""
        return size_bytes_of(arguments.get("prompt"))

    def for_trial(self, method: Method, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for an output after each token, as for a stream."""
        if method == "encode":
            return dict(arguments)
        parameters: SamplingParams = arguments["sampling_params"].clone()
        parameters.output_kind = RequestOutputKind.CUMULATIVE
        return {**arguments, "sampling_params": parameters}

    def context_tokens(self, output: Any) -> int:
        """Count the tokens of the prompt and of its longest answer."""
        made = [len(getattr(one, "token_ids", None) or ()) for one in _completions(output)]
        return len(output.prompt_token_ids or ()) + max(made, default=0)

    def prompt_tokens(self, output: Any) -> int:
        """Count the prompt's tokens, whether the tokenizer made them or the client sent them."""
        return len(output.prompt_token_ids or ())

    def new_tokens(self, output: Any) -> int:
        """Count all its tokens: vLLM's routes ask for new ones only, or for all at once."""
        return sum(len(getattr(one, "token_ids", None) or ()) for one in _completions(output))

    def request_ids(self, internal_id: str) -> tuple[str, ...]:
        """Undo vLLM's naming: `-` and 8 characters appended, a child's index and `_` in front."""
        name = internal_id.rpartition(_RANDOM_SEPARATOR)[0]
        index, _, rest = name.partition(_CHILD_SEPARATOR)
        return (name, rest) if index.isdigit() else (name,)


def _essential(parameters: Any) -> dict[str, Any]:
    """Return the fields of SamplingParams or PoolingParams that make up an identity."""
    return {
        name: getattr(parameters, name)
        for name in getattr(parameters, "__struct_fields__", ())
        if name not in _INCIDENTAL_PARAMETERS and not name.startswith("_")
    }


def _completions(output: Any) -> tuple[Any, ...]:
    """Return the answers in an output; a pooling output has one, which is not a list."""
    outputs = getattr(output, "outputs", ())
    return tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)


def _is_sent_in_part(prompt: Any) -> bool:
    """Whether an item only refers to what the engine got with an earlier request."""
    items = prompt.get("mm_kwargs") if isinstance(prompt, Mapping) else None
    parts = items.values() if isinstance(items, Mapping) else ()
    return any(item is None for part in parts for item in part)
