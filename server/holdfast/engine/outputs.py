"""Reads vLLM's outputs and errors for `replay`, and puts our errors in the form its routes expect.

Seen in vLLM 0.32 and, by its source, in 0.33.
"""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from http import HTTPStatus
from typing import Any

from vllm import envs
from vllm.exceptions import GenerationError, GracefulHTTPError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import EMPTY_CPU_TENSOR

from holdfast.engine.checked_llm import UnsentError
from holdfast.engine.requests.continuation import ContinuedPrompt
from holdfast.engine.requests.request import Method, SentAnswer
from holdfast.engine.requests.sizes import fields_of, size_bytes_of
from holdfast.errors import HoldfastError
from holdfast.patches import fits

# These do not count for the keys of others either. With a bug that one of them triggers, a client
# could have a prompt that it guesses refused to others: two deaths buy one prompt, and three
# in an hour suspend its key. But every client has seeds and salts of its own. If they counted, a
# prompt that kills would end engines for each key that sends it, and be charged to each.
_INCIDENTAL = frozenset({"arrival_time", "cache_salt"})
"""Parts of a prompt."""
_INCIDENTAL_PARAMETERS = frozenset(
    {"seed", "max_tokens", "output_kind", "skip_clone", "stream_interval"}
)
_NOT_REBUILT = ("trace_decode_token_ids", "prompt_logprob_token_ids")
"""Parameters whose state does not follow from the tokens of the answer (0.32)."""
_THINKING_BUDGETS = "patches.thinking_budgets.count_sent_thoughts"
_CHILD_SEPARATOR = "_"
_RANDOM_SEPARATOR = "-"


class VllmOutputs:
    """Implements `requests.request.EngineOutputs` for an AsyncLLM."""

    def __init__(
        self,
        transfers_kv: Callable[[], bool] = lambda: True,
        continues_streams: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take callbacks: whether the engine exchanges KV caches, and whether streams may go on."""
        self._transfers_kv = transfers_kv
        self._continues_streams = continues_streams

    def is_death(self, error: Exception, llm: Any) -> bool:
        """Whether `error` comes from the engine's end.

        A request that is being sent just when the sockets close fails with an EngineGenerateError.
        """
        if isinstance(error, EngineDeadError):
            return True
        return isinstance(error, EngineGenerateError) and bool(llm.errored)

    def is_unsent(self, error: Exception) -> bool:
        """Whether the request was still queued when the engine died."""
        return isinstance(error, UnsentError)

    def is_abort(self, output: Any) -> bool:
        """Whether the engine aborted the request, as a core that got SIGTERM does with all."""
        return output.finished and (
            _is_without_vector(output)
            or any(getattr(one, "finish_reason", None) == "abort" for one in _completions(output))
        )

    def is_cut(self, output: Any) -> bool:
        """Whether an answer was ended by a limit of tokens or a stop string of the client.

        The token that ends the model's own answers is a number, or is not named at all.
        """
        return output.finished and any(
            getattr(one, "finish_reason", "stop") != "stop"
            or isinstance(getattr(one, "stop_reason", None), str)
            for one in _completions(output)
        )

    def is_failure(self, output: Any) -> bool:
        """Whether the engine ended the request with an error, as it does if a grammar fails."""
        return output.finished and any(
            getattr(one, "finish_reason", None) == "error" for one in _completions(output)
        )

    def is_answer(self, output: Any) -> bool:
        """Whether an output is the last of a whole answer, which needs the engine no more."""
        return output.finished and not self.is_abort(output) and not self.is_failure(output)

    def as_vllm_error(self, error: HoldfastError) -> Exception:
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

    def is_continuable(self, arguments: Mapping[str, Any]) -> bool:
        """Whether it is a stream of one answer, whose state follows from its tokens.

        What vLLM's routes do not stream yields only once, so nothing of it is sent before its end.
        """
        parameters = arguments.get("sampling_params")
        return (
            isinstance(parameters, SamplingParams)
            and parameters.n == 1
            and parameters.output_kind is RequestOutputKind.DELTA
            and all(getattr(parameters, name, None) is None for name in _NOT_REBUILT)
            and (parameters.thinking_token_budget is None or fits(_THINKING_BUDGETS))
            and self._continues_streams()
        )

    def is_answer_streamed(self, arguments: Mapping[str, Any]) -> bool:
        """Whether it is generated for one of vLLM's streamed routes."""
        parameters = arguments.get("sampling_params")
        return (
            isinstance(parameters, SamplingParams)
            and parameters.output_kind is RequestOutputKind.DELTA
        )

    def add_sent(self, sent: SentAnswer, output: Any) -> None:
        """Add the new tokens of an output."""
        sent.token_ids += output.outputs[0].token_ids
        sent.last_output = output

    def continued_arguments(
        self, arguments: Mapping[str, Any], sent: SentAnswer, llm: Any
    ) -> Mapping[str, Any] | None:
        """Have `CheckedLLM` go on, if prompt and answer leave room for a token in the context.

        `max_tokens` is what fits: its route may have computed it from the limit of another engine.
        """
        limit_tokens = llm.model_config.max_model_len
        if not sent.token_ids:
            return _within(arguments, limit_tokens - self.given_tokens(arguments))
        prompt_tokens = self.prompt_tokens(sent.last_output)
        if prompt_tokens + len(sent.token_ids) >= limit_tokens:
            return None
        begun = {**arguments, "prompt": ContinuedPrompt(arguments["prompt"], sent)}
        return _within(begun, limit_tokens - prompt_tokens)

    def digest_of(self, arguments: Mapping[str, Any]) -> str:
        """Digest prompt and parameters, except those that do not change what is computed first.

        A client can vary these freely: the seed, the salt of the cache, how long the answer may be,
        and whether it is streamed.
        """
        parameters = arguments.get("sampling_params") or arguments.get("pooling_params")
        prompt = arguments.get("prompt")
        if isinstance(prompt, Mapping):
            prompt = {name: part for name, part in prompt.items() if name not in _INCIDENTAL}
        lora = arguments.get("lora_request")
        return _digest_of(prompt, _essential(parameters), getattr(lora, "lora_name", None))

    def size_bytes(self, arguments: Mapping[str, Any]) -> int:
        """Estimate the size of the prompt; parameters are small."""
        return size_bytes_of(arguments.get("prompt"))

    def trial_arguments(self, method: Method, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for an output after each token, as for a stream."""
        if method == "encode":
            return dict(arguments)
        parameters: SamplingParams = arguments["sampling_params"].clone()
        parameters.output_kind = RequestOutputKind.CUMULATIVE
        parameters.stream_interval = None
        return {**arguments, "sampling_params": parameters}

    def context_tokens(self, output: Any) -> int:
        """Count the tokens of the prompt and of its longest answer."""
        made = [len(getattr(one, "token_ids", None) or ()) for one in _completions(output)]
        return len(output.prompt_token_ids or ()) + max(made, default=0)

    def given_tokens(self, arguments: Mapping[str, Any]) -> int:
        """Count the token IDs, or else the embeddings, of a prompt as vLLM's renderer made it."""
        prompt = arguments.get("prompt")
        read = prompt.get if isinstance(prompt, Mapping) else partial(getattr, prompt)
        parts = (read(name, None) for name in ("prompt_token_ids", "prompt_embeds"))
        return next((len(part) for part in parts if part is not None), 0)

    def prompt_tokens(self, output: Any) -> int:
        """Count the prompt's tokens, whether the tokenizer made them or the client sent them."""
        return len(output.prompt_token_ids or ())

    def new_tokens(self, output: Any) -> int:
        """Count all its tokens: vLLM's routes ask for new ones only, or for all at once."""
        return sum(len(getattr(one, "token_ids", None) or ()) for one in _completions(output))

    def request_ids(self, internal_id: str) -> tuple[str, ...]:
        """Undo vLLM's naming: `-` and 8 characters appended, a child's index and `_` in front.

        `VLLM_DISABLE_REQUEST_ID_RANDOMIZATION`, which vLLM means to remove, has nothing appended.
        """
        is_kept = getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False)
        name = internal_id if is_kept else internal_id.rpartition(_RANDOM_SEPARATOR)[0]
        index, _, rest = name.partition(_CHILD_SEPARATOR)
        return (name, rest) if index.isdigit() else (name,)


def _within(arguments: Mapping[str, Any], most_tokens: int) -> Mapping[str, Any]:
    """Return arguments for an answer of at most `most_tokens`; vLLM itself refuses less than 1."""
    parameters: Any = arguments.get("sampling_params")
    wanted_tokens = getattr(parameters, "max_tokens", None)
    if wanted_tokens is None or wanted_tokens <= max(most_tokens, 1):
        return arguments
    parameters = copy.copy(parameters)
    parameters.max_tokens = max(most_tokens, 1)
    parameters.min_tokens = min(parameters.min_tokens, parameters.max_tokens)
    return {**arguments, "sampling_params": parameters}


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


def _is_without_vector(output: Any) -> bool:
    """Whether a pooling request was aborted: vLLM says so only with this empty vector (0.32, 0.33).

    Another one is an answer, as that of some models to an empty text. What comes with an error was
    not aborted.
    """
    data = getattr(getattr(output, "outputs", None), "data", None)
    return data is EMPTY_CPU_TENSOR and getattr(output, "error", None) is None


def _is_sent_in_part(prompt: Any) -> bool:
    """Whether an item only refers to what the engine got with an earlier request."""
    items = prompt.get("mm_kwargs") if isinstance(prompt, Mapping) else None
    parts = items.values() if isinstance(items, Mapping) else ()
    return any(item is None for part in parts for item in part)


def _digest_of(*values: Any) -> str:
    """Return the SHA-256 of values, as 64 hexadecimal digits. Each tensor element counts."""
    digest = hashlib.sha256()
    pending = [*reversed(values)]  # the next one last; a client may nest deeper than calls may
    while pending:
        pending += reversed(_feed(digest, pending.pop()))
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> Sequence[Any]:
    """Digest a value with its kind and its length, so that no two values look alike.

    Return the parts of it that are to be digested next.
    """
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return _feed_all(digest, "map", [part for item in items for part in item])
    if isinstance(value, AbstractSet):
        return _feed_all(digest, "set", sorted(value, key=str))
    if isinstance(value, list | tuple):
        return _feed_all(digest, "list", value)
    if (fields := fields_of(value)) is not None:
        return _feed_all(digest, type(value).__name__, fields)
    _feed_plain(digest, value)
    return ()


def _feed_plain(digest: Any, value: Any) -> None:
    if isinstance(value, bytes | bytearray | memoryview):
        _feed_bytes(digest, "bytes", value)
    elif hasattr(value, "untyped_storage"):
        _feed_bytes(digest, f"tensor {value.dtype} {tuple(value.shape)}", _content(value))
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
        _feed_bytes(digest, f"array {value.dtype} {value.shape}", value.tobytes())
    else:
        _feed_bytes(digest, type(value).__name__, str(value).encode("utf-8", "surrogatepass"))


def _feed_all(digest: Any, kind: str, values: Sequence[Any]) -> Sequence[Any]:
    try:
        content = array("q", values).tobytes()  # a prompt: much faster as a whole
    except (TypeError, OverflowError):
        digest.update(f"{kind} {len(values)}:".encode())
        return values
    _feed_bytes(digest, f"{kind} of integers", content)
    return ()


def _feed_bytes(digest: Any, kind: str, content: bytes | bytearray | memoryview) -> None:
    content = memoryview(content).cast("B")
    digest.update(f"{kind} {len(content)}:".encode())
    digest.update(content)


def _content(tensor: Any) -> bytes | memoryview:
    """Return all elements as bytes: NumPy knows neither bfloat16 nor the 8-bit floats.

    Contiguous elements on the CPU are not copied, since copying would block all threads.
    """
    import torch  # noqa: PLC0415 - a process without torch has no tensor

    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy()) if plain.numel() else b""
