"""Puts trained weights where the demo model finds them, with a record of how they were made."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo_training.checkpoints import read_checkpoint, recipe_sha256
from demo_training.exam import scores
from demo_training.network import Network
from demo_training.shape import SHAPE
from demo_training.training import final_weights
from holdfast.demo.files import MAX_MODEL_TOKENS
from holdfast.demo.tokenizer import write_tokenizer
from holdfast.demo.trained import FILES, RECORD, WEIGHTS_FILE
from holdfast.errors import UsageError

MAX_BYTES = 10_000_000
"""What the package may carry of weights."""
LICENSE = "Apache-2.0"
_ORIGIN = "trained from random weights, on text that the code of demo_training generates"


def export(directory: Path, target: Path, *, questions: int) -> dict[str, float]:
    """Write the weights of a finished training to `target`, and return their scores.

    They are float16, beside the tokenizer with its chat template. The record names seed, steps,
    code, hashes and licence. The same checkpoint gives the same bytes. Each skill is examined with
    this many `questions`.

    Raises:
        UsageError: `directory` has no checkpoint, or one in the middle of its course.
    """
    checkpoint = read_checkpoint(directory)
    if checkpoint is None or checkpoint.steps_done < checkpoint.course.total_steps:
        raise UsageError(
            f"{directory} has no finished training.", remedy="Run demo_training train to its end."
        )
    target.mkdir(parents=True, exist_ok=True)
    (target / RECORD).unlink(missing_ok=True)
    weights = {name: weight.half() for name, weight in final_weights(checkpoint).items()}
    save_file(weights, target / WEIGHTS_FILE, metadata={"format": "pt"})
    (target / WEIGHTS_FILE).chmod(0o644)  # safetensors lets nobody else read it
    write_tokenizer(target, MAX_MODEL_TOKENS)
    found = scores(read_network(target / WEIGHTS_FILE), questions)
    record = {
        "license": LICENSE,
        "origin": _ORIGIN,
        "course": asdict(checkpoint.course),
        "recipe_sha256": recipe_sha256(),
        "torch": torch.__version__,
        "arithmetic": torch.backends.cpu.get_cpu_capability(),
        "shape": asdict(SHAPE),
        "scores": found,
        "files_sha256": {name: _sha256(target / name) for name in FILES},
    }
    (target / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return found


def read_network(weights_file: Path) -> Network:
    """The network with weights that were exported, as the server computes with them: in float32.

    Raises:
        UsageError: there is no such file.
    """
    if not weights_file.is_file():
        raise UsageError(f"{weights_file} is not there.", remedy="Run make demo-weights.")
    network = Network()
    stored = load_file(weights_file)
    network.load_state_dict({name: weight.float() for name, weight in stored.items()})
    return network


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
