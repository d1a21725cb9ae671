"""Random weights, for a package without trained ones: from a fixed seed, shaped so that it talks.

One channel of the residual stream is constant, and the output head reads a bias for each token from
it: printable text is likely, other bytes are not, and a reply ends by itself.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from holdfast.demo.tokenizer import IM_END_ID, VOCABULARY_SIZE
from holdfast.demo.trained import Shape

SEED = 20
HIDDEN_SIZE = 128
INTERMEDIATE_SIZE = 256
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = HIDDEN_SIZE // HEADS
SHAPE = Shape(HIDDEN_SIZE, INTERMEDIATE_SIZE, LAYERS, HEADS, KV_HEADS, HEAD_SIZE)

_ATTENTION_SHARPNESS = 1.8
_LOGIT_DEVIATION = 3.0
_CONSTANT_CHANNEL = 0
_CONSTANT = 2.0
_LIKELY = string.ascii_lowercase + ' ",.:}]0123456789'
_UNLIKELY_BIAS = -4.0
_END_BIAS = -3.0
_UNPRINTABLE_BIAS = -60.0


def make_weights() -> Mapping[str, Any]:
    """Every tensor of the checkpoint by the name that Llama checkpoints use, as float32 arrays."""
    import numpy as np  # noqa: PLC0415 - only the first use needs it

    random = np.random.default_rng(SEED)

    def normal(rows: int, columns: int, gain: float = 1.0) -> Any:
        deviation = gain / columns**0.5
        return (random.standard_normal((rows, columns)) * deviation).astype(np.float32)

    weights: dict[str, Any] = {}
    for layer in range(LAYERS):
        kv_size = KV_HEADS * HEAD_SIZE
        block = {
            "self_attn.q_proj": normal(HIDDEN_SIZE, HIDDEN_SIZE, _ATTENTION_SHARPNESS),
            "self_attn.k_proj": normal(kv_size, HIDDEN_SIZE, _ATTENTION_SHARPNESS),
            "self_attn.v_proj": normal(kv_size, HIDDEN_SIZE),
            "self_attn.o_proj": normal(HIDDEN_SIZE, HIDDEN_SIZE, 2.0),
            "mlp.gate_proj": normal(INTERMEDIATE_SIZE, HIDDEN_SIZE, 2.0),
            "mlp.up_proj": normal(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            "mlp.down_proj": normal(HIDDEN_SIZE, INTERMEDIATE_SIZE, 2.0),
            "input_layernorm": np.ones(HIDDEN_SIZE, np.float32),
            "post_attention_layernorm": np.ones(HIDDEN_SIZE, np.float32),
        }
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            block[name][_CONSTANT_CHANNEL] = 0
        weights |= {f"model.layers.{layer}.{name}.weight": w for name, w in block.items()}
    embedding = normal(VOCABULARY_SIZE, HIDDEN_SIZE, HIDDEN_SIZE**0.5)
    embedding[:, _CONSTANT_CHANNEL] = _CONSTANT
    head = normal(VOCABULARY_SIZE, HIDDEN_SIZE, _LOGIT_DEVIATION)
    head[:, _CONSTANT_CHANNEL] = [_bias(token) / _CONSTANT for token in range(VOCABULARY_SIZE)]
    return {
        "model.embed_tokens.weight": embedding,
        **weights,
        "model.norm.weight": np.ones(HIDDEN_SIZE, np.float32),
        "lm_head.weight": head,
    }


def _bias(token: int) -> float:
    if token == IM_END_ID:
        return _END_BIAS
    if chr(token) in _LIKELY:
        return 0.0
    return _UNLIKELY_BIAS if token < 127 and chr(token).isprintable() else _UNPRINTABLE_BIAS
