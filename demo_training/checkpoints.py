"""A training that was interrupted, as a file: to go on from, and to export."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from demo_training.course import Course
from holdfast.demo import tokenizer
from holdfast.errors import UsageError

_CHECKPOINT = "checkpoint.pt"
_PACKAGE = Path(__file__).parent
_WITHOUT_EFFECT = frozenset(
    _PACKAGE / f"{name}.py" for name in ("__init__", "__main__", "checkpoints", "exam", "export")
)
"""What may change during a training, because no weight depends on it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a course stands."""

    course: Course
    steps_done: int
    network: dict[str, torch.Tensor]
    optimizers: list[dict[str, Any]]
    before: dict[str, torch.Tensor] | None = None
    """The network with which the present part began; None in the first part."""


def write_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint in `directory`, at once and whole."""
    record = {
        "recipe": recipe_sha256(),
        "course": asdict(checkpoint.course),
        "steps_done": checkpoint.steps_done,
        "network": checkpoint.network,
        "optimizers": checkpoint.optimizers,
        "before": checkpoint.before,
    }
    staged = directory / f".{_CHECKPOINT}"
    torch.save(record, staged)
    staged.replace(directory / _CHECKPOINT)


def read_checkpoint(directory: Path) -> Checkpoint | None:
    """The checkpoint in `directory`, None if it has none.

    Raises:
        UsageError: other code made the checkpoint, so its weights could not be made again.
    """
    path = directory / _CHECKPOINT
    if not path.exists():
        return None
    record = torch.load(path, weights_only=True)
    if record["recipe"] != recipe_sha256():
        raise UsageError(
            f"{path} was made by other code of demo_training.",
            remedy="Train in another directory, or check out the code that made it.",
        )
    return Checkpoint(
        Course(**record["course"]),
        record["steps_done"],
        record["network"],
        record["optimizers"],
        record["before"],
    )


def recipe_sha256() -> str:
    """The hash of the code that the weights depend on, the tokenizer included."""
    digest = hashlib.sha256()
    modules = set(_PACKAGE.rglob("*.py")) - _WITHOUT_EFFECT
    for path in [*sorted(modules), Path(tokenizer.__file__)]:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
