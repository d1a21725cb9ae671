"""How long is the longest context, where vLLM fits it to the memory (`--max-model-len auto`)?

EngineCore fits it after the workers have said what memory there is (0.32, 0.33), and a reservation
comes before that. So it is found here first, from the same KV cache specs.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

_FITTED = -1
"""What vLLM keeps in `original_max_model_len` if it is to choose."""


def is_length_fitted(vllm_config: Any) -> bool:
    """Whether vLLM is to choose the longest context."""
    return getattr(vllm_config.model_config, "original_max_model_len", None) == _FITTED


def with_length(vllm_config: Any, tokens: int) -> Any:
    """The same configuration with another `max_model_len`."""
    changed = copy.copy(vllm_config)
    changed.model_config = copy.copy(vllm_config.model_config)
    changed.model_config.max_model_len = tokens
    return changed


def fitted_tokens(
    vllm_config: Any,
    specs: Mapping[str, Any],
    available_bytes: int,
    reserved_bytes: Callable[[int], int],
) -> int:
    """The longest context that EngineCore may choose beside its reservation; 0 if no token fits.

    `specs` is what `get_kv_cache_spec` of a worker answers. EngineCore's own length is shorter by
    the block that it keeps back, and where it pads groups of layers. Of a world it is that of the
    rank with the least, on which the caller agrees with the others.
    """

    def kv_bytes(tokens: int) -> int:
        changed = with_length(vllm_config, tokens)
        return sum(int(spec.max_memory_usage_bytes(changed)) for spec in specs.values())

    lengths = range(1, int(vllm_config.model_config.max_model_len) + 1)
    tokens = bisect_right(
        lengths, available_bytes, key=lambda length: kv_bytes(length) + reserved_bytes(length)
    )
    if not tokens:
        return 0
    # KV caches come in blocks and reservations in 2 MiB, so that some tokens more may fit.
    return bisect_right(lengths, available_bytes - reserved_bytes(tokens), key=kv_bytes)
