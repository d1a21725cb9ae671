"""How large is the Lamport all-reduce workspace of MiniMax models? It is outside the slots.

vLLM allocates it before the lock, while it builds the model, and keeps it in a cache of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from holdfast.workspace.plan import Term, round_up
from holdfast.workspace.reservers import (
    ReserverContext,
    Undetermined,
    device_of_platform,
)

_ALLOCATION_GRANULE_BYTES = 2 * 1024 * 1024
_BUFFERS = 3
"""The kernel writes one, reads one and clears one."""
_MAX_FUSED_TOKENS = 2048
"""vLLM's MINIMAX_QK_NORM_MAX_TOKEN_NUM: larger steps take another path."""
_MODULE = "lamport_workspace"
"""The module is found by the last part of its name, because versions of vLLM moved it."""
_ARCHITECTURES = {
    "MiniMaxForCausalLM",
    "MiniMaxM1ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MiniMaxText01ForCausalLM",
}


def buffer_bytes(max_tokens: int, world_size: int) -> int:
    """Return vLLM's `comm_size`: two variances of every group of four tokens from every rank."""
    groups = -(-max_tokens // 4)
    return round_up(world_size * 2 * groups * 16, _ALLOCATION_GRANULE_BYTES)


def workspace_bytes(max_tokens: int, world_size: int) -> int:
    """Return what one rank allocates for a group of `world_size`."""
    return _BUFFERS * buffer_bytes(max_tokens, world_size)


def lamport_bytes() -> int:
    """Return what this process has allocated in vLLM's cache; 0 if no model needed any."""
    caches = [
        vars(module).get("_workspace_cache", {})
        for name, module in list(sys.modules.items())
        if name.startswith("vllm.") and name.rpartition(".")[2] == _MODULE
    ]
    # A module with two names has one cache.
    held = {id(workspace): workspace for cache in caches for workspace in cache.values()}
    return sum(_BUFFERS * int(workspace.comm_size) for workspace in held.values())


def declare(context: ReserverContext) -> Iterable[Term | Undetermined]:
    """Declare no term, because no slot holds it; only tell `holdfast plan` the largest size."""
    architectures = set(getattr(context.hf_config, "architectures", None) or ())
    if not architectures & _ARCHITECTURES:
        return ()
    ranks = context.vllm_config.parallel_config.tensor_parallel_size
    device = context.device or device_of_platform()
    if ranks < 2 or (device is not None and not device.is_cuda):
        return ()
    max_bytes = workspace_bytes(_MAX_FUSED_TOKENS, ranks)
    return (
        Undetermined(
            "Lamport all-reduce",
            f"{max_bytes} bytes per rank outside the slots if the GPUs reach each other's memory",
        ),
    )
