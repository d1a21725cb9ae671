"""Small files: what is kept between two starts, and outlives a crash, and what is looked for."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def ending_with(suffix: str, directory: Path) -> list[Path]:
    """The files of a directory with such a name, in no order; none where there is no directory.

    As `Path.glob`, at a tenth of its cost: some are looked for several times a second.
    """
    try:
        names = os.listdir(directory)  # noqa: PTH208 - a Path for each name is what it spares
    except FileNotFoundError:
        return []
    return [directory / name for name in names if name.endswith(suffix)]


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` so that after any crash the file holds the old content or the new.

    Its directory is made if it is missing, for this user alone.

    Raises:
        OSError: it could not be written; the old content is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
