"""What does the prefill of DeepSeek-V4 and V4.1 gather? vLLM's bound, and what it leaves out.

vLLM reserves the same three tensors in its profile run, but takes the width of the index tensor
from the indexer. Layers with ratio 128 have no indexer: at run time their index is as wide as the
compressed context, which is larger with a long context and many tokens in a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.workspace.plan import Term, round_up
from holdfast.workspace.reservers import (
    Device,
    ReserverContext,
    Undetermined,
    device_of_platform,
)

_CHUNK_REQUESTS = 4
"""vLLM's PREFILL_CHUNK_SIZE."""
_INDEX_ALIGNMENT = 128
_FULL_INDEX_RATIO = 128
"""Layers of this ratio index every compressed token instead of the best ones."""
_ALIGNMENT_BYTES = 256
_ASKED_BY = "DeepSeek-V4 prefill"
_FLASHINFER = frozenset({"FLASHINFER_MLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV41"})
_FLASHMLA = frozenset(
    {
        "FLASHMLA_MEGA_ATTN_DSV41",
        "FLASHMLA_SPARSE",
        "FLASHMLA_SPARSE_DSV4",
        "FLASHMLA_SPARSE_DSV41",
    }
)
"""The names in vLLM's registry, `AttentionBackendEnum`."""
_FLASHINFER_CAPABILITY_MAJOR = 12
"""GB10 and RTX PRO 6000: vLLM defaults to FlashInfer there, which keeps its own buffer."""


@dataclass(frozen=True, slots=True)
class PrefillSizes:
    """The numbers that determine the gathered prefill of one model."""

    max_model_len: int
    max_num_batched_tokens: int
    window_tokens: int
    head_size: int
    index_topk: int
    image_tokens: int = 0
    ratios: tuple[int, ...] = (0,)
    """Tokens per compressed entry of each kind of layer; 0 for layers with only a window."""


def prefill_bytes(sizes: PrefillSizes) -> int:
    """Return the largest request of any kind of layer."""
    return max(layer_bytes(sizes, ratio) for ratio in sizes.ratios)


def layer_bytes(sizes: PrefillSizes, ratio: int) -> int:
    """Return what a layer requests in the worst step: gathered KV, indices and their lengths."""
    rows = sizes.max_num_batched_tokens
    compressed_tokens = -(-sizes.max_model_len // ratio) if ratio else 0
    gathered_tokens = compressed_tokens + sizes.window_tokens + rows
    selected_tokens = sizes.index_topk if ratio else 0
    if ratio == _FULL_INDEX_RATIO:
        selected_tokens = max(selected_tokens, round_up(compressed_tokens, _INDEX_ALIGNMENT))
    width = round_up(selected_tokens + sizes.window_tokens + sizes.image_tokens, _INDEX_ALIGNMENT)
    tensors = (
        _CHUNK_REQUESTS * gathered_tokens * sizes.head_size * 2,
        rows * width * 4,
        rows * 4,
    )
    return sum(round_up(tensor_bytes, _ALIGNMENT_BYTES) for tensor_bytes in tensors)


def declare(context: ReserverContext) -> Iterable[Term | Undetermined]:
    """Declare one term where the FlashMLA kernels run; none for other models and kernels."""
    sizes = _sizes(context)
    if sizes is None:
        return ()
    device = context.device or device_of_platform()
    if device is None:
        return (Undetermined(_ASKED_BY, "the device decides between FlashMLA and FlashInfer"),)
    if not device.is_cuda:
        return (
            Undetermined(_ASKED_BY, f"Holdfast knows its kernels on CUDA, not on {device.name}"),
        )
    if not _gathers_in_workspace(context.vllm_config, device):
        return ()
    return (Term("declared", _ASKED_BY, prefill_bytes(sizes)),)


def _sizes(context: ReserverContext) -> PrefillSizes | None:
    config = context.hf_config
    kind = getattr(config, "model_type", None)
    if kind not in {"deepseek_v4", "deepseek_v41"}:
        return None
    ratios = _compress_ratios(config)
    has_images = kind == "deepseek_v4" and getattr(config, "vision_n_layers", 0) > 0
    if kind == "deepseek_v4":
        # In V4, a ratio of 1 means no compressed cache; in V4.1, one of full length.
        ratios = {ratio if ratio > 1 else 0 for ratio in ratios}
    return PrefillSizes(
        max_model_len=context.max_model_len,
        max_num_batched_tokens=context.max_num_batched_tokens,
        window_tokens=config.sliding_window,
        head_size=config.head_dim,
        index_topk=config.index_topk,
        image_tokens=getattr(config, "vision_max_n_token", 0) if has_images else 0,
        # Layers that only predict further tokens are not in the list and have only a window.
        ratios=tuple(sorted(ratios | {0})),
    )


def _compress_ratios(config: Any) -> set[int]:
    """Return the ratios of a model's layers; 0 for a layer with only a window.

    vLLM 0.32 reads the configuration of DeepSeek-V4 with a class of its own. 0.33 uses that of
    transformers, which has a rate per kind of layer (`vllm.transformers_utils.deepseek_v4_utils`).
    """
    listed = getattr(config, "compress_ratios", None)
    if listed is not None:
        return {int(ratio) for ratio in listed}
    rates = getattr(config, "compress_rates", None) or {}
    return {int(rates.get(kind, 0)) for kind in getattr(config, "layer_types", None) or ()}


def _gathers_in_workspace(vllm_config: Any, device: Device) -> bool:
    backend = getattr(vllm_config.attention_config.backend, "name", None)
    if backend in _FLASHINFER | _FLASHMLA:
        return backend in _FLASHMLA
    return device.capability_major != _FLASHINFER_CAPABILITY_MAJOR
