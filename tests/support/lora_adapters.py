"""LoRA adapters for the tiny models, made by hand."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 4
_SEED = 11


def make_lora(directory: Path, model: Path, *, scale: float = 4.0) -> Path:
    """An adapter of the attention's projections of a model made by `tiny_models`."""
    import torch
    from safetensors.torch import save_file

    shape = json.loads((model / "config.json").read_text())
    hidden, head = shape["hidden_size"], shape["head_dim"]
    widths = {
        "q_proj": shape["num_attention_heads"] * head,
        "v_proj": shape["num_key_value_heads"] * head,
    }
    random = torch.Generator().manual_seed(_SEED)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, width in widths.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(RANK, hidden, generator=random)
            up = torch.randn(width, RANK, generator=random)
            tensors[f"{place}.lora_A.weight"] = down
            tensors[f"{place}.lora_B.weight"] = up * scale
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory
