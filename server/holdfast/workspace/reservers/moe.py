"""How much do fused experts need in a full step? The kernel of each layer says it.

vLLM reserves nothing for them. It relies on a profile run of the full size, which speculation with
a draft model shortens, pooling models skip, and uneven routing exceeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.platforms import current_platform

from holdfast.workspace.plan import TARGET_LANE, Term, round_up
from holdfast.workspace.reservers import ReserverContext, Undetermined

_ASKED_BY = "fused MoE"
_ALIGNMENT_BYTES = 256
_WEIGHT_NAMES = (
    ("w13_weight", "w2_weight"),
    ("w13_weight_packed", "w2_weight_packed"),
    ("w13_qweight", "w2_qweight"),
)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class ExpertShapes:
    """The three shapes that vLLM's `workspace_shapes` returns, and the bytes of an element."""

    first_and_third: tuple[int, ...]
    second: tuple[int, ...]
    output: tuple[int, ...]
    element_bytes: int


def experts_bytes(shapes: ExpertShapes) -> int:
    """Return what the kernel requests: the first buffer also holds the output."""
    first = max(prod(shapes.first_and_third), prod(shapes.output)) * shapes.element_bytes
    second = prod(shapes.second) * shapes.element_bytes
    return round_up(first, _ALIGNMENT_BYTES) + round_up(second, _ALIGNMENT_BYTES)


def gathered_tokens(max_num_batched_tokens: int, data_parallel: int, sequence_parallel: int) -> int:
    """Return the maximum tokens that a rank's experts see: those of all data-parallel ranks."""
    return round_up(max_num_batched_tokens, sequence_parallel) * data_parallel


def layer_bytes(layer: Any, kernel: Any, max_num_batched_tokens: int) -> int:
    """Return what `kernel`, a modular kernel of vLLM, requests in a full step of `layer`."""
    experts = kernel.impl.fused_experts
    first_weight, second_weight = _weights(layer)
    inputs, chosen = _inputs(layer, experts, first_weight.shape[0], max_num_batched_tokens)
    _, tokens, width, hidden, chosen_count = experts.moe_problem_size(
        inputs, first_weight, second_weight, chosen
    )
    first_and_third, second, output = experts.workspace_shapes(
        tokens,
        width,
        hidden,
        chosen_count,
        layer.global_num_experts,
        first_weight.shape[0],
        None,
        layer.activation,
    )
    dtype = experts.workspace_dtype(layer.moe_config.in_dtype)
    return experts_bytes(ExpertShapes(first_and_third, second, output, dtype.itemsize))


def declare(context: ReserverContext) -> Iterable[Term | Undetermined]:
    """Declare a term for the largest layer, and one for the draft's; none without experts."""
    if context.model is None:
        if _has_experts(context.hf_config):
            yield Undetermined(_ASKED_BY, "the device decides which kernel its experts use")
        return
    if current_platform.is_cpu():
        # vLLM's experts use no workspace there.
        return
    yield from _term(context.model, context.max_num_batched_tokens, TARGET_LANE)
    if context.draft_model is not None:
        yield from _term(context.draft_model, _draft_tokens(context), context.draft_lane)


def _term(model: Any, tokens: int, lane: int) -> Iterator[Term]:
    needs: dict[str, int] = {}
    for layer, kernel in _layers(model):
        name = type(kernel.impl.fused_experts).__name__
        needs[name] = max(needs.get(name, 0), layer_bytes(layer, kernel, tokens))
    if needs:
        largest = max(needs, key=needs.__getitem__)
        yield Term("declared", f"{_ASKED_BY}: {largest}", needs[largest], lanes=(lane,))


def _draft_tokens(context: ReserverContext) -> int:
    """Return the maximum tokens of a draft step; in its own lane it sees no prompt (DFlash)."""
    if context.draft_lane == TARGET_LANE:
        return context.max_num_batched_tokens
    drafted = int(context.vllm_config.speculative_config.num_speculative_tokens)
    return min(context.max_num_batched_tokens, context.max_num_seqs * (1 + drafted))


def _layers(model: Any) -> Iterator[tuple[Any, Any]]:
    for module in model.modules():
        if hasattr(module, "base_layer"):
            continue  # a wrapper of LoRA, which answers for the layer in it and has no weights
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        implementation = getattr(kernel, "impl", None)
        if isinstance(implementation, modular_kernel.FusedMoEKernelModularImpl):
            yield module, kernel


def _weights(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    for first, second in _WEIGHT_NAMES:
        if hasattr(layer, first) and hasattr(layer, second):
            return getattr(layer, first), getattr(layer, second)
    raise LookupError(f"{type(layer).__name__} keeps its expert weights under unknown names")


def _inputs(
    layer: Any, experts: Any, local_experts: int, max_num_batched_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors of the shapes that reach the experts, without memory."""
    config = layer.moe_config
    parallel = config.moe_parallel_config
    tokens = gathered_tokens(max_num_batched_tokens, parallel.dp_size, parallel.sp_size)
    hidden = config.hidden_dim
    if experts.quant_dtype == "nvfp4" and not experts.expects_unquantized_inputs:
        hidden //= 2  # two values in a byte
    shape: tuple[int, ...] = (tokens, hidden)
    if experts.activation_format() == modular_kernel.FusedMoEActivationFormat.BatchedExperts:
        shape = (local_experts, experts.max_num_tokens * experts.num_dispatchers, hidden)
    chosen_shape = (shape[0], config.experts_per_token)
    return torch.empty(shape, device="meta"), torch.empty(chosen_shape, device="meta")


def _has_experts(hf_config: Any) -> bool:
    text = getattr(hf_config, "text_config", None) or hf_config
    return any((getattr(text, name, 0) or 0) > 1 for name in _EXPERT_COUNTS)
