"""Which parallel sizes can an engine have, by the heads of its model?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.errors import UsageError

_PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)


def refuse_layout(arguments: Any, heads: int, kv_heads: int) -> None:
    """Check the sizes and the heads as vLLM does when it makes its configuration and its layers.

    `kv_heads` are those that the ranks share out, 0 for a latent cache.

    Raises:
        UsageError: no engine can have this many ranks.
    """
    for name in _PARALLEL_SIZES:
        if (size := getattr(arguments, name)) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag}: {size} is not a number of ranks.", remedy="use 1 or more.")
    _refuse_tensor_size(arguments.tensor_parallel_size, heads, kv_heads)
    _refuse_decode_size(arguments, heads, kv_heads)


def _refuse_tensor_size(size: int, heads: int, kv_heads: int) -> None:
    """Refuse a size with which a rank would have a part of a head (vLLM's QKVParallelLinear)."""
    sizes = [one for one in _divisors(heads) if _can_share_out(kv_heads, one)]
    if heads % size:
        cause = f"--tensor-parallel-size {size} does not divide the {heads} attention heads."
    elif not _can_share_out(kv_heads, size):
        cause = (
            f"--tensor-parallel-size {size} neither divides the {kv_heads} KV heads nor is a "
            f"multiple of {kv_heads}."
        )
    else:
        return
    raise UsageError(cause, remedy=f"use {_alternatives(sizes)}.")


def _can_share_out(kv_heads: int, size: int) -> bool:
    return not kv_heads or kv_heads % size == 0 or size % kv_heads == 0


def _refuse_decode_size(arguments: Any, heads: int, kv_heads: int) -> None:
    """Refuse a size of context parallelism as vLLM's ParallelConfig and ModelConfig do.

    Decoding takes the ranks of prefill, or splits those of tensor parallelism. These may only split
    a KV head that several of them have.
    """
    tensor, prefill = arguments.tensor_parallel_size, arguments.prefill_context_parallel_size
    size = arguments.decode_context_parallel_size
    sizes = _divisors(tensor) if prefill == 1 else sorted({1, prefill, tensor * prefill})
    shown = f"--tensor-parallel-size {tensor}"
    if prefill > 1:
        shown += f" and --prefill-context-parallel-size {prefill}"
    if kv_heads:
        shown += f" with {kv_heads} KV heads"
        copies, queries = tensor // kv_heads, heads // kv_heads
        sizes = [one for one in sizes if one == 1 or (one <= copies and queries % one == 0)]
    if size not in sizes:
        raise UsageError(
            f"--decode-context-parallel-size {size} does not fit {shown}.",
            remedy=f"use {_alternatives(sizes)}, or change --tensor-parallel-size.",
        )


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _alternatives(sizes: Sequence[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
