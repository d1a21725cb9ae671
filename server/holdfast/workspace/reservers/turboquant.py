"""What do TurboQuant and UltraQuant unpack? The cached context of one request, and decode scratch.

vLLM reserves the same when it builds the attention: after the KV cache was sized, only in the slot
of the thread that builds, and without the continuation if chunked prefill is off, although a hit in
the prefix cache then needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.workspace.plan import Term, round_up
from holdfast.workspace.reservers import ReserverContext

_DECODED_AS_CONTINUATION_TOKENS = 128
"""A continuation of up to this many tokens uses the decode kernel instead."""
_MAX_BLOCK_TOKENS = 128
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class ContinuationSizes:
    """The numbers that determine the unpacked context; heads are those of one rank."""

    max_model_len: int
    kv_heads: int
    head_size: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """The numbers that determine the decode scratch; heads are those of one rank."""

    max_num_seqs: int
    heads: int
    head_size: int
    splits: int


def continuation_bytes(sizes: ContinuationSizes) -> int:
    """Return the bytes of the longest cached context, unpacked to 16 bits for any type of query."""
    cached_tokens = round_up(max(0, sizes.max_model_len - 1), sizes.block_tokens)
    unpacked_bytes = sizes.kv_heads * cached_tokens * sizes.head_size * 2
    return 2 * round_up(unpacked_bytes, _ALIGNMENT_BYTES)


def decode_bytes(sizes: DecodeSizes) -> int:
    """Return the bytes of the partial outputs, the output in 16 bits and the log-sum-exp."""
    rows = sizes.max_num_seqs * sizes.heads
    tensors = (
        rows * sizes.splits * (sizes.head_size + 1) * 4,
        rows * sizes.head_size * 2,
        rows * 4,
    )
    return sum(round_up(tensor_bytes, _ALIGNMENT_BYTES) for tensor_bytes in tensors)


def declare(context: ReserverContext) -> Iterable[Term]:
    """Declare terms for the packed formats; none for other KV caches."""
    config = context.vllm_config
    if config is None:
        return
    packing = str(config.cache_config.cache_dtype)
    if not packing.startswith("turboquant_") and packing != "ultraquant_4bit":
        return
    family = "UltraQuant" if packing == "ultraquant_4bit" else "TurboQuant"
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    head_size = model.get_head_size()
    decode = DecodeSizes(
        max_num_seqs=context.max_num_seqs,
        heads=model.get_num_attention_heads(parallel),
        head_size=head_size,
        splits=config.attention_config.tq_max_kv_splits_for_cuda_graph,
    )
    yield Term("declared", f"{family} decode", decode_bytes(decode))
    is_continued = (
        config.scheduler_config.enable_chunked_prefill is not False
        or cache.enable_prefix_caching is not False
    )
    if is_continued and context.max_num_batched_tokens > _DECODED_AS_CONTINUATION_TOKENS:
        continuation = ContinuationSizes(
            max_model_len=context.max_model_len,
            kv_heads=model.get_num_kv_heads(parallel),
            head_size=head_size,
            block_tokens=cache.block_size or _MAX_BLOCK_TOKENS,
        )
        yield Term("declared", f"{family} continuation", continuation_bytes(continuation))
