"""Bounds the parameters of requests, which vLLM copies, walks, and passes to its engine.

vLLM 0.32 bounds hardly any of them. Each prompt of a request and each of its n sequences gets all
of them: 31 MB of stop strings with n = 128 take 4 GB in EngineCore and in each worker, and a
`logit_bias` of 466,000 entries with 1,024 prompts blocks the event loop for minutes. A value that
msgpack cannot encode fails when the request is sent, after vLLM has registered it forever. The V2
model runner raises in the worker, which ends the engine, on more entries than its buffers have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

import msgspec
from vllm import envs
from vllm.entrypoints.generate.beam_search import online
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import logprobs

from holdfast.patches.patch import original, replace
from holdfast.patches.request_bodies import take_prompts
from holdfast.patches.tokenizer import CHARACTERS_PER_TOKEN
from holdfast.request_context import current_request

MAX_BYTES = 8 << 20
"""The parameters of all sequences of one request together: a walk through them takes a second."""
MAX_ENTRIES = 1024
"""What the buffers of vLLM's V2 model runner have room for (`gpu.sample.logit_bias`, 0.32, 0.33).
So an answer does not depend on the runner."""
MAX_STOP_TOKEN_IDS = 128
"""The same for tokens that may not end an answer before its `min_tokens`."""
_BOUNDED = ("allowed_token_ids", "logit_bias", "stop_token_ids")
MAX_COMPARISONS = 32 * 1024
"""What `repetition_detection` may compare after each token: 5 ms of EngineCore's only thread. vLLM
compares each length of a pattern with all its repetitions (`check_sequence_repetition`, 0.32)."""
MAX_PROMPT_COPIES_TOKENS = 1 << 25
"""1.5 GB in EngineCore, which has an object for each token."""
MAX_MEDIA_COPIES_BYTES = 1 << 30
"""Media and embeddings of a prompt in all its copies, each of which is encoded and sent alone: 85
answers to an image of one megapixel."""
MAX_PROMPT_LOGPROBS = 1 << 19
"""The log-probs of all prompts in all answers of a request. The event loop makes an object and JSON
of each."""
MAX_ANSWER_LOGPROBS = 1 << 20
"""The same for the answers of a request that is not streamed."""
MAX_KEPT_TEXTS = 1 << 16
"""The tokens whose texts are kept."""

MAX_LENGTH_PENALTY = 32
"""The power of a length of 2^30 tokens that a float still holds."""

_INT64_MAX = 2**63 - 1
_SENT = (
    *("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids"),
    *("extra_args", "structured_outputs"),
)


def bound_parameters() -> None:
    """Refuse sampling parameters beyond the bounds; idempotent."""
    verify_as_vllm = original(SamplingParams, "_verify_args")
    update_as_vllm = original(SamplingParams, "update_from_generation_config")
    tokenize_as_vllm = original(SamplingParams, "update_from_tokenizer")

    def verify_args(self: Any) -> None:
        _check(self)
        verify_as_vllm(self)

    def update_from_generation_config(self: Any, *args: Any, **options: Any) -> None:
        update_as_vllm(self, *args, **options)
        _check_stop_tokens(self)

    def update_from_tokenizer(self: Any, tokenizer: Any) -> None:
        _check_characters(self.bad_words or ())
        tokenize_as_vllm(self, tokenizer)
        _check_bad_tokens(self)

    replace(SamplingParams, "_verify_args", verify_args)
    replace(SamplingParams, "update_from_generation_config", update_from_generation_config)
    replace(SamplingParams, "update_from_tokenizer", update_from_tokenizer)


def bound_batches(most: float) -> None:
    """Refuse batches of more chats than `most`, or with large parameters; idempotent.

    vLLM 0.32 copies and validates the parameters for each chat.
    """
    as_vllm = original(OpenAIServingChatBatch, "create_batch_chat_completion")

    async def create_batch_chat_completion(self: Any, request: Any, *args: Any) -> Any:
        take_prompts(len(request.messages), most, "chats")
        check_size([request.model_dump(exclude={"messages"}, exclude_unset=True)], sequences=1)
        return await as_vllm(self, request, *args)

    replace(OpenAIServingChatBatch, "create_batch_chat_completion", create_batch_chat_completion)


def bound_request_ids(shorten: Callable[[str], str]) -> None:
    """Shorten the IDs that bodies give to requests; idempotent.

    vLLM 0.32 repeats such an ID, of any length, in each event of a stream.
    """
    as_vllm = original(BaseServing, "_base_request_id")

    def base_request_id(raw_request: Any, default: str | None = None) -> Any:
        return as_vllm(raw_request, None if default is None else shorten(default))

    replace(BaseServing, "_base_request_id", base_request_id)


def bound_length_penalty() -> None:
    """Refuse powers of a length that no float can hold; idempotent.

    vLLM 0.32 divides by such a power, which is a 500 with a traceback in the log.
    """
    as_vllm = original(online, "create_sort_beams_key_function")

    def create_sort_beams_key_function(*args: Any) -> Any:
        if not abs(args[-1]) <= MAX_LENGTH_PENALTY:  # NaN is refused too
            raise VLLMValidationError(
                f"length_penalty must be in [-{MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}].",
                parameter="length_penalty",
            )
        return as_vllm(*args)

    replace(online, "create_sort_beams_key_function", create_sort_beams_key_function)


def keep_token_texts() -> None:
    """Keep the text of each token that log-probs name; idempotent.

    vLLM 0.32 decodes each of them again on the event loop, which takes 8 us.
    """
    as_vllm = original(logprobs, "convert_ids_list_to_tokens")

    def convert_ids_list_to_tokens(tokenizer: Any, token_ids: list[int]) -> list[str]:
        if not hasattr(tokenizer, "holdfast_texts"):
            tokenizer.holdfast_texts = {}
        texts: dict[int, str] = tokenizer.holdfast_texts
        if len(texts) > MAX_KEPT_TEXTS:
            texts.clear()
        new = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in texts]
        texts.update(zip(new, as_vllm(tokenizer, new), strict=True))
        return [texts[token_id] for token_id in token_ids]

    replace(logprobs, "convert_ids_list_to_tokens", convert_ids_list_to_tokens)


def check_size(values: Iterable[Any], *, sequences: int) -> None:
    """Check that parameters can be sent for this many sequences of each prompt of the request.

    Raises:
        VLLMValidationError: they have no encoding, or are too large.
    """
    given = [value for value in values if value]
    if not given:
        return
    try:
        size_bytes = len(msgspec.msgpack.encode(given))
    except (OverflowError, RecursionError, TypeError, UnicodeError) as error:
        raise VLLMValidationError(f"A parameter of the request has no encoding: {error}") from error
    copies = _copies(sequences)
    if size_bytes * copies > MAX_BYTES:
        raise VLLMValidationError(
            f"The parameters of the request take {size_bytes} bytes for {copies} sequences "
            f"(prompts times n); at most {MAX_BYTES} bytes are allowed for all of them."
        )


def check_prompt_copies(sequences: int, prompt_tokens: int) -> None:
    """Check how many tokens EngineCore gets with a prompt, which it copies for each sequence.

    Raises:
        VLLMValidationError: too many.
    """
    if sequences * prompt_tokens > MAX_PROMPT_COPIES_TOKENS:
        raise VLLMValidationError(
            f"The request asks for {sequences} answers to a prompt of {prompt_tokens} tokens; at "
            f"most {MAX_PROMPT_COPIES_TOKENS} tokens are allowed in all copies of a prompt.",
            parameter="n",
        )


def check_media_copies(sequences: int, media_bytes: int) -> None:
    """Check what EngineCore gets with a prompt beside its tokens, in copies for several sequences.

    Raises:
        VLLMValidationError: too much.
    """
    if sequences * media_bytes > MAX_MEDIA_COPIES_BYTES:
        raise VLLMValidationError(
            f"The request asks for {sequences} answers to a prompt whose media and embeddings have "
            f"{media_bytes} bytes; at most {MAX_MEDIA_COPIES_BYTES} bytes are allowed in all its "
            "copies.",
            parameter="n",
        )


def check_prompt_logprobs(
    params: Any, request_id: str, prompt_tokens: int, vocabulary: Callable[[], int]
) -> None:
    """Check how many log-probs a request wants of its prompts; a repeated one counts once.

    Raises:
        VLLMValidationError: too many.
    """
    asked = getattr(params, "prompt_logprobs", None)
    if asked is None:
        return
    each = _log_probs_of_token(asked, vocabulary)
    wanted = current_request().prompt_logprobs
    wanted[request_id] = prompt_tokens * each * params.n
    if (total := sum(wanted.values())) > MAX_PROMPT_LOGPROBS:
        raise VLLMValidationError(
            f"The request asks for {each} log-probs of each token of its prompts, {total} in all "
            f"its answers; at most {MAX_PROMPT_LOGPROBS} are allowed.",
            parameter="prompt_logprobs",
        )


def limit_answer_logprobs(
    params: Any, vocabulary: Callable[[], int], is_length_given: Callable[[], bool]
) -> Any:
    """Return the parameters with a `max_tokens` that bounds the log-probs of an answer.

    Only an answer that comes as a whole needs it: the event loop makes all of it in one turn. It
    ends with "length" then.

    Raises:
        VLLMValidationError: the client itself has asked for a longer answer.
    """
    asked = getattr(params, "num_logprobs", None)
    if asked is None or params.output_kind is not RequestOutputKind.FINAL_ONLY:
        return params
    each = _log_probs_of_token(asked, vocabulary)
    copies = _copies(params.n)
    most = max(1, MAX_ANSWER_LOGPROBS // (each * copies))
    if params.max_tokens is not None and params.max_tokens <= most:
        return params
    if is_length_given():
        raise VLLMValidationError(
            f"The request asks for {each} log-probs of each of {params.max_tokens} tokens, in "
            f"{copies} answers (prompts times n); at most {MAX_ANSWER_LOGPROBS} are allowed. "
            "Please ask for a stream, for fewer logprobs, or for smaller max_tokens.",
            parameter="logprobs",
        )
    limited = copy(params)
    limited.max_tokens, limited.min_tokens = most, min(params.min_tokens, most)
    return limited


def _log_probs_of_token(asked: int, vocabulary: Callable[[], int]) -> int:
    """Return how many a token has: its own, and those asked for; -1 asks for all."""
    return 1 + (vocabulary() if asked < 0 else asked)


def _copies(sequences: int) -> int:
    """Return how often vLLM copies what one prompt of the present request has."""
    return max(1, sequences) * max(1, current_request().prompts)


def _check(params: Any) -> None:
    for name in _BOUNDED:
        count = len(getattr(params, name) or ())
        if count > MAX_ENTRIES:
            raise VLLMValidationError(
                f"{name} has {count} entries; at most {MAX_ENTRIES} are allowed.", parameter=name
            )
    if len(params.stop) > envs.VLLM_MAX_STOP_STRINGS:
        raise VLLMValidationError(
            f"stop has {len(params.stop)} strings; at most {envs.VLLM_MAX_STOP_STRINGS} are "
            "allowed.",
            parameter="stop",
        )
    sequences = params.n if isinstance(params.n, int) else 1
    if isinstance(params.seed, int) and params.seed > _INT64_MAX - max(0, sequences - 1):
        raise VLLMValidationError(
            f"seed must be at most {_INT64_MAX} less n - 1: each sequence gets the next seed.",
            parameter="seed",
        )
    _check_repetitions(params.repetition_detection)
    check_size((getattr(params, name) for name in _SENT), sequences=sequences)


def _check_repetitions(wanted: Any) -> None:
    if wanted is None:
        return
    unread = max(1, wanted.min_pattern_size) - 1
    comparisons = (wanted.max_pattern_size**2 - unread**2) * wanted.min_count
    if wanted.max_pattern_size > 0 and comparisons > MAX_COMPARISONS:
        raise VLLMValidationError(
            "(max_pattern_size^2 - (min_pattern_size - 1)^2) * min_count is "
            f"{comparisons}; at most {MAX_COMPARISONS} is allowed.",
            parameter="repetition_detection",
        )


def _check_characters(bad_words: Iterable[str]) -> None:
    """Refuse long `bad_words` before the event loop tokenizes them: vLLM counts them afterwards."""
    most = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS * CHARACTERS_PER_TOKEN
    if sum(map(len, bad_words)) > most:
        raise VLLMValidationError(
            f"The bad_words are longer than {most} characters.", parameter="bad_words"
        )


def _check_bad_tokens(params: Any) -> None:
    """Refuse what the V2 model runner has no room for, now that tokens are known."""
    most = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    tokens = sum(map(len, params.bad_words_token_ids or ()))
    if tokens > most:
        raise VLLMValidationError(
            f"The bad_words have {tokens} tokens; at most {most} are allowed.",
            parameter="bad_words",
        )


def _check_stop_tokens(params: Any) -> None:
    """Refuse what the V2 model runner has no room for, now that those of the model are known."""
    if params.min_tokens > 0 and len(params.all_stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise VLLMValidationError(
            f"With min_tokens, at most {MAX_STOP_TOKEN_IDS} stop_token_ids are allowed, those of "
            "the model included.",
            parameter="stop_token_ids",
        )
