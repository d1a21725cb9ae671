"""Tiny models made with `transformers`, of architectures that Holdfast's code does not know.

Random weights from a fixed seed and the byte-level tokenizer. vLLM serves each on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCABULARY_SIZE, write_tokenizer

MAX_MODEL_TOKENS = 2048
_SEED = 7
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_MODEL_TOKENS,
    "initializer_range": 0.2,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "dtype": "float32",
}


def make_qwen(directory: Path) -> Path:
    """A Qwen3 with two layers, in `directory`; the same files if they are there already."""

    def make() -> Any:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        configuration = Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=32)
        return Qwen3ForCausalLM(configuration)

    return _make_once(directory, make)


def make_mixtral(directory: Path) -> Path:
    """A Mixtral with two layers of four experts, two of them active."""

    def make() -> Any:
        from transformers import MixtralConfig, MixtralForCausalLM

        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return MixtralForCausalLM(MixtralConfig(**_SHAPE, num_key_value_heads=2, **experts))

    return _make_once(directory, make)


def make_embedding(directory: Path) -> Path:
    """A BERT with two layers, which vLLM serves as a pooling model."""

    def make() -> Any:
        from transformers import BertConfig, BertModel

        return BertModel(BertConfig(**_SHAPE))

    return _make_once(directory, make)


def _make_once(directory: Path, make: Callable[[], Any]) -> Path:
    import torch

    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent) as staging, torch.random.fork_rng():
        torch.manual_seed(_SEED)
        made = Path(staging) / "model"
        make().save_pretrained(made)
        write_tokenizer(made, MAX_MODEL_TOKENS)
        made.rename(directory)
    return directory
