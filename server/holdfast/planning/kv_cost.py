"""What does a token cost in the KV cache of one rank, by the model's configuration?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

_ELEMENT_BYTES = {
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "float": 4,
    "float32": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
_STATE_SPACE = (
    "layers_block_type",
    "hybrid_override_pattern",
    "ssm_cfg",
    "linear_attn_config",
    "sconv_kernel_size",  # Inkling, also without `use_sconv`
)
_DRAFTS_WITHOUT_LAYERS = {"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"}
"""Methods of speculation whose drafts have no KV cache."""
_LOOPING = "IQuestLoopCoderForCausalLM"
"""It runs its layers several times, each time with a KV cache of their own."""


@dataclass(frozen=True, slots=True)
class KvCost:
    """The bytes of one token in one layer of one rank; None if layers or tokens differ."""

    bytes_per_token_and_layer: int | None
    meaning: str

    def bytes_per_token(self, layers: int) -> int | None:
        """Return the bytes of a token on a rank with this many layers."""
        if self.bytes_per_token_and_layer is None or not layers:
            return None
        return self.bytes_per_token_and_layer * layers

    def tokens(self, size_bytes: int, layers: int) -> int | None:
        """Return by how many tokens `size_bytes` shrink the KV cache of a rank."""
        token_bytes = self.bytes_per_token(layers)
        return None if token_bytes is None else -(-size_bytes // token_bytes)


def kv_cost(model: Any, parallel: Any, cache_dtype: str, model_dtype: str) -> KvCost:
    """Return the cost in a uniform KV cache, or the reason why it is unknown."""
    text, architecture = model.hf_text_config, model.architecture
    if reason := _irregularity(model, parallel):
        return KvCost(None, f"unknown: {reason}")
    cache_dtype = _cache_dtype(model, cache_dtype)
    element_bytes = _element_bytes(text, cache_dtype, model_dtype)
    if element_bytes is None:
        return KvCost(
            None, f"unknown: the size of the format {cache_dtype} is measured at the first start"
        )
    if architecture.is_deepseek_mla and not envs.VLLM_MLA_DISABLE:
        return KvCost(
            architecture.head_size * element_bytes,
            f"MLA: one latent of {architecture.head_size} x {element_bytes} bytes per token and "
            "layer, the same on every tensor-parallel rank",
        )
    heads, size = model.get_num_kv_heads(parallel), model.get_head_size()
    return KvCost(
        2 * heads * size * element_bytes,
        f"keys and values of {heads} heads x {size} x {element_bytes} bytes per token and layer",
    )


def _irregularity(model: Any, parallel: Any) -> str:
    text, architecture = model.hf_text_config, model.architecture
    layers = architecture.total_num_hidden_layers
    kinds = set(getattr(text, "layer_types", None) or ())
    checks = {
        "it may be an encoder, which has no KV cache": model.may_be_encoder,
        "its layers have several attentions": getattr(text, "num_hidden_layers", layers) != layers
        or _LOOPING in (model.hf_config.architectures or ()),
        "its compressed layers keep fewer entries than tokens": hasattr(text, "compress_ratios"),
        "its indexer has its own cache": getattr(text, "index_topk", None) is not None
        or bool(getattr(text, "sparse_attention_config", None)),  # MiniMax-M3
        "its layers are of several kinds": bool(kinds - {"full_attention"})
        or architecture.per_layer_overrides is not None,
        "its sliding window limits what a request keeps": not kinds
        and getattr(text, "sliding_window", None) is not None,
        "some layers have a state instead of a KV cache": any(
            getattr(text, name, None) is not None for name in _STATE_SPACE
        )
        or (getattr(text, "layer_group_size", None) or 1) > 1,  # Ling 2.5, Ring 2.5 and later
        "some layers share the KV cache of others": bool(getattr(text, "num_kv_shared_layers", 0)),
        "its layers have different attention, or none": bool(getattr(text, "block_configs", None)),
        "the layers of its drafts have a KV cache too": _has_draft_layers(parallel),
        "--kv-cache-dtype-skip-layers may give its layers different formats": bool(
            parallel.kv_cache_dtype_skip_layers
        ),
        "an encoder has its own cache": bool(getattr(text, "is_encoder_decoder", False)),
        "context parallelism splits the cache of a request": parallel.decode_context_parallel_size
        > 1,
        "it has no attention": not architecture.head_size or not architecture.total_num_kv_heads,
    }
    return next((reason for reason, holds in checks.items() if holds), "")


def _has_draft_layers(arguments: Any) -> bool:
    speculation = arguments.speculative_config or {}
    method = arguments.spec_method or speculation.get("method")
    is_on = bool(speculation or method or arguments.spec_model)
    return is_on and method not in _DRAFTS_WITHOUT_LAYERS


def _cache_dtype(model: Any, given: str) -> str:
    """Return the format of the KV cache: as given, or as the checkpoint says."""
    quantization = model.architecture.quantization_config or {}
    if given == "auto" and quantization.get("quant_method") == "compressed-tensors":
        # vLLM supports no other scheme than FP8, and chooses it only when it makes the layers.
        return "fp8" if quantization.get("kv_cache_scheme") else given
    return str(resolve_kv_cache_dtype_string(given, model))


def _element_bytes(text: Any, cache_dtype: str, model_dtype: str) -> int | None:
    if cache_dtype != "auto":
        return _ELEMENT_BYTES.get(cache_dtype)
    if model_dtype != "auto":
        return _ELEMENT_BYTES.get(model_dtype)
    stored = str(getattr(text, "dtype", None) or "").removeprefix("torch.")
    # With `auto`, vLLM narrows 32-bit weights to 16 bits, and assumes 16 if no type is given.
    return 2 if stored in {"", "float32", "float16", "bfloat16"} else None
