"""Directories that a run writes to when it is over."""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile


def make_writable(path: Path) -> None:
    """Make the directory, and find out that it takes files: a run that is over may be hours old.

    Raises:
        OSError: it cannot be made, or takes none.
    """
    path.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path, prefix=".holdfast-verify."):
        pass
