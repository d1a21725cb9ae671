"""Makes all ranks of a world agree while an engine starts, each time within a deadline.

They agree on the size of a reservation and, with `--max-model-len auto`, the longest context that
fits the memory of every rank. A rank that raises, is late or reduces something else causes an error
in all of them, and never an endless wait.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch.distributed import AllreduceOptions, ReduceOp
from vllm.distributed.parallel_state import get_world_group

from holdfast.errors import EngineStartError

_FITTED = -1
"""The value of `original_max_model_len` with which vLLM chooses the length."""


def is_length_fitted(vllm_config: Any) -> bool:
    """Whether vLLM chooses the longest context."""
    return getattr(vllm_config.model_config, "original_max_model_len", None) == _FITTED


def with_length(vllm_config: Any, tokens: int) -> Any:
    """Return the same configuration with another `max_model_len`."""
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
    """Return the longest context that fits beside its reservation on this rank; 0 if none fits.

    `specs` is what a worker's `get_kv_cache_spec` returns. The ranks of a world have to agree on
    the shortest of their lengths, which is the caller's task.
    """
    lengths = _lengths(vllm_config)

    def needed_bytes(tokens: int) -> int:
        return _kv_bytes(vllm_config, specs, tokens) + reserved_bytes(tokens)

    tokens = bisect_right(lengths, available_bytes, key=needed_bytes)
    if tokens and _kv_bytes(vllm_config, specs, tokens) == _kv_bytes(
        vllm_config, specs, lengths[-1]
    ):
        # A KV cache that does not grow further, as that of a sliding window, bounds no context.
        return lengths[-1]
    return tokens


def fitted_kv_bytes(
    vllm_config: Any,
    specs: Mapping[str, Any],
    available_bytes: int,
    fitted_tokens: int,
    missing_bytes: Callable[[int], int],
) -> int:
    """Return how much of the memory the KV cache may get, so that its contexts stay reserved for.

    EngineCore chooses the longest context that fits in what it gets, whatever is reserved. It gets
    too little for the first length whose reservation misses something, yet always enough for
    `fitted_tokens`. As it keeps one block back and pads groups of layers, it chooses no more.
    """
    lengths = _lengths(vllm_config)
    reserved_tokens = bisect_right(lengths, 0, key=missing_bytes)
    if reserved_tokens == len(lengths):
        return available_bytes
    enough_bytes = _kv_bytes(vllm_config, specs, fitted_tokens)
    too_much_bytes = _kv_bytes(vllm_config, specs, reserved_tokens + 1)
    return min(available_bytes, max(enough_bytes, too_much_bytes - 1))


def _lengths(vllm_config: Any) -> range:
    return range(1, int(vllm_config.model_config.max_model_len) + 1)


def _kv_bytes(vllm_config: Any, specs: Mapping[str, Any], tokens: int) -> int:
    """Return what a context of this length takes of the KV cache."""
    changed = with_length(vllm_config, tokens)
    return sum(int(spec.max_memory_usage_bytes(changed)) for spec in specs.values())


AGREEMENT_SECONDS = 600.0
"""The wait for the slowest rank, unless vLLM's `--cpu-distributed-timeout-seconds` is given: a rank
may compile what another has in its cache."""
_SIGNATURE = 0x484F_4C44_4641_5354


class Subject(IntEnum):
    """What the ranks agree on."""

    RESERVATION = 1
    GROWTH_LIMIT = 2
    CONTEXT_LENGTH = 3


def smallest(values: list[int], subject: Subject, parallel_config: Any) -> list[int]:
    """Return the smallest of each of `values` over all ranks, otherwise as `largest`."""
    negated = largest([-value for value in values], subject, parallel_config)
    return [-value for value in negated]


def largest(values: list[int], subject: Subject, parallel_config: Any) -> list[int]:
    """Return the largest of each of `values` over all ranks; a lone rank gets its own back.

    Raises:
        EngineStartError: a rank was late, ended, or was reducing something else.
    """
    group = get_world_group()
    if group.world_size == 1:
        return values
    signature = _SIGNATURE + subject
    # Negated too: the largest of both are the same only if all are. That holds while no rank takes
    # another operation, because gloo reduces in each rank by the operation of that rank.
    signed = [signature, -signature]
    tensor = torch.tensor(signed + values, dtype=torch.int64)
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.MAX
    # A limit of the operation, not of the wait: a running one would delay the process's end.
    given: timedelta | None = parallel_config.cpu_distributed_timeout
    options.timeout = given or timedelta(seconds=AGREEMENT_SECONDS)
    try:
        group.cpu_group.allreduce([tensor], options).wait()
    except RuntimeError as error:
        raise _disagreement(group, subject, str(error)) from error
    found = [int(value) for value in tensor.tolist()]
    if found[:2] != signed:
        raise _disagreement(group, subject, "another rank was agreeing on something else")
    return found[2:]


def _disagreement(group: Any, subject: Subject, reason: str) -> EngineStartError:
    what = subject.name.lower().replace("_", " ")
    return EngineStartError(
        f"rank {group.rank_in_group} could not agree with the other ranks on the {what}: {reason}",
        remedy="see the logs of the other ranks above, and install the same version of holdfast "
        "for each; --cpu-distributed-timeout-seconds gives them more time.",
    )
