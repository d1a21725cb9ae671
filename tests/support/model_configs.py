"""Configurations of models, written as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DEEPSEEK_V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "compress_ratios": [0, 0, 4, 128],
    "head_dim": 512,
    "hidden_size": 4096,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "sliding_window": 128,
    "vocab_size": 1000,
}


def written(directory: Path, configuration: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(configuration))
    return str(directory)
