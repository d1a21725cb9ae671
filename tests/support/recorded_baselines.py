"""A baseline of a small server, as `holdfast verify --record` writes it."""

from __future__ import annotations

from pathlib import Path

from holdfast.verify.baseline import write_baseline
from servers import SMALL, running
from verified import recorded_at

FLAGS = (
    *SMALL,
    "--dtype=float32",
    "--probe=quick",
    "--max-model-len=512",
    "--max-num-batched-tokens=64",
)
"""The longer sequences are computed in chunks."""


def record_baseline(model: Path, directory: Path) -> Path:
    """Record what a model says that is served with these flags; return the file."""
    path = directory / "baseline.gz"
    with running(directory, str(model), *FLAGS) as server:
        server.until_ready()
        write_baseline(recorded_at(server.url), path)
    return path
