"""Small files: what is kept between two starts, and outlives a crash, and what is looked for."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


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
    _put(path, text).close()


@contextmanager
def written_while_alive(path: Path, text: str) -> Iterator[None]:
    """While entered, `path` holds `text` and is locked; only of a process that dies it stays.

    Raises:
        OSError: it could not be written.
    """
    with _put(path, text, is_locked=True):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def is_writer_alive(path: Path) -> bool:
    """Whether who made the file by `written_while_alive` still runs, on whatever host.

    Raises:
        OSError: it cannot be opened.
    """
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no locks here: its writer had none either
            return False
    return False


def _put(path: Path, text: str, *, is_locked: bool = False) -> IO[str]:
    """The file, open, and on disk in its place."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    file = os.fdopen(descriptor, "w", encoding="utf-8")
    try:
        if is_locked:
            # Before it is in its place: nobody is to find it without the lock.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    except BaseException:
        file.close()
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return file


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
