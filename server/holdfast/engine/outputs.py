"""How vLLM says that an engine died, and how its routes are told what to answer.

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
    """`calls.Dialect` for an AsyncLLM."""

    def __init__(self, transfers_kv: Callable[[], bool] = lambda: True) -> None:
        """`transfers_kv` says whether the engine gets KV caches from others."""
        self._transfers_kv = transfers_kv

    def is_death(self, error: Exception, llm: Any) -> bool:
        """Whether `error` came of the engine's end.

        A call that is just being sent when the sockets close fails with an EngineGenerateError.
        """
        if isinstance(error, EngineDeadError):
            return True
        return isinstance(error, EngineGenerateError) and bool(llm.errored)

    def is_unsent(self, error: Exception) -> bool:
        """Whether it waited for its turn in the engine."""
        return isinstance(error, UnsentError)

    def is_abort(self, output: Any) -> bool:
        """Whether the engine gave the request up: what a core that got SIGTERM answers to all."""
        return output.finished and any(
            getattr(one, "finish_reason", None) == "abort" for one in _completions(output)
        )

    def lifted(self, error: HoldfastError) -> Exception:
        """GenerationError, which vLLM answers cleanly before and within a stream, or its status.

        Any other class is logged with its traceback for each request.
        """
        answer: Exception = (
            GenerationError(error.cause)
            if error.http_status == HTTPStatus.INTERNAL_SERVER_ERROR
            else GracefulHTTPError(error.cause, HTTPStatus(error.http_status))
        )
        return answer

    def is_replayable(self, arguments: Mapping[str, Any]) -> bool:
        """Not a prompt that comes as a stream, nor one of which another engine holds a part.

        That is a KV cache to transfer, or an image that was sent before (0.32, 0.33). Where nothing
        is transferred, a client that speaks of it changes nothing.
        """
        if self.is_streamed(arguments) or _is_sent_in_part(arguments.get("prompt")):
            return False
        extra = getattr(arguments.get("sampling_params"), "extra_args", None) or {}
        return "kv_transfer_params" not in extra or not self._transfers_kv()

    def is_streamed(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the prompt comes as a stream: that of a realtime transcription does."""
        return isinstance(arguments.get("prompt"), AsyncGenerator)

    def identity(self, arguments: Mapping[str, Any]) -> str:
        """The digest of prompt and parameters, without what does not change what is computed first.

        A client varies that freely: the seed, the salt of the cache, how long the answer may be,
        and whether it is streamed.
        """
        parameters = arguments.get("sampling_params") or arguments.get("pooling_params")
        prompt = arguments.get("prompt")
        if isinstance(prompt, Mapping):
            prompt = {name: part for name, part in prompt.items() if name not in _INCIDENTAL}
        lora = arguments.get("lora_request")
        return digest_of(prompt, _essential(parameters), getattr(lora, "lora_name", None))

    def size_bytes(self, arguments: Mapping[str, Any]) -> int:
        """That of the prompt; parameters are small."""
        return size_bytes_of(arguments.get("prompt"))

    def for_trial(self, method: Method, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """With an output after each token, as a stream has it."""
        if method == "encode":
            return dict(arguments)
        parameters: SamplingParams = arguments["sampling_params"].clone()
        parameters.output_kind = RequestOutputKind.CUMULATIVE
        return {**arguments, "sampling_params": parameters}

    def context_tokens(self, output: Any) -> int:
        """The prompt and the longest of its answers."""
        made = [len(getattr(one, "token_ids", None) or ()) for one in _completions(output)]
        return len(output.prompt_token_ids or ()) + max(made, default=0)

    def prompt_tokens(self, output: Any) -> int:
        """Those that the tokenizer made, or that were sent."""
        return len(output.prompt_token_ids or ())

    def new_tokens(self, output: Any) -> int:
        """All of its tokens: vLLM's routes ask for what is new, or for the whole at once."""
        return sum(len(getattr(one, "token_ids", None) or ()) for one in _completions(output))

    def request_ids(self, internal_id: str) -> tuple[str, ...]:
        """vLLM appends `-` and 8 characters, and puts the index of a child and `_` before it."""
        name = internal_id.rpartition(_RANDOM_SEPARATOR)[0]
        index, _, rest = name.partition(_CHILD_SEPARATOR)
        return (name, rest) if index.isdigit() else (name,)


def _essential(parameters: Any) -> dict[str, Any]:
    """The fields of SamplingParams or PoolingParams that an identity consists of."""
    return {
        name: getattr(parameters, name)
        for name in getattr(parameters, "__struct_fields__", ())
        if name not in _INCIDENTAL_PARAMETERS and not name.startswith("_")
    }


def _completions(output: Any) -> tuple[Any, ...]:
    """The answers in an output; a pooling output has one, which is no list."""
    outputs = getattr(output, "outputs", ())
    return tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)


def _is_sent_in_part(prompt: Any) -> bool:
    """Whether an item stands only for what the engine was given with an earlier request."""
    items = prompt.get("mm_kwargs") if isinstance(prompt, Mapping) else None
    parts = items.values() if isinstance(items, Mapping) else ()
    return any(item is None for part in parts for item in part)
