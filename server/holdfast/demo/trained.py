"""Trained weights and their tokenizer, which the package has once `demo_training` exported them.

Without them, the demo model has random weights.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from holdfast.demo.tokenizer import TOKENIZER_FILES

WEIGHTS_FILE = "model.safetensors"
FILES = (WEIGHTS_FILE, *TOKENIZER_FILES)
RECORD = "training.json"
"""How the files were made; written last, so they are whole where it is."""
TRAINED_DIRECTORY = Path(__file__).with_name("trained_weights")


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a Llama is, by the names that its configuration uses."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


def is_trained(directory: Path = TRAINED_DIRECTORY) -> bool:
    """Whether there are trained weights in `directory`, which by default is the package's own."""
    return (directory / RECORD).is_file()


def trained_shape(directory: Path) -> Shape:
    """How large the model is whose weights are in `directory`."""
    return Shape(**json.loads((directory / RECORD).read_text())["shape"])


def copy_trained(directory: Path, target: Path) -> None:
    """Copy weights and tokenizer, byte for byte."""
    for name in FILES:
        shutil.copyfile(directory / name, target / name)
