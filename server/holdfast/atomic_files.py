"""Small files: what is kept between two starts, and outlives a crash, and what is looked for."""

from __future__ import annotations

import fcntl
import json
import math
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

LARGEST_RECORD_BYTES = 64 * 1024
LOCK_SECONDS = 5.0
"""A process that hangs while it writes holds up another no longer than this."""
_LOCK_POLL_SECONDS = 0.02
_LONGEST_NUMBER = 32
"""Digits of a number in a record. None of ours has so many, and one of 400 is not a float."""


def files_with_suffix(suffix: str, directory: Path) -> list[Path]:
    """The files of a directory with such a name, in no order; none where it cannot be read.

    There may be no directory yet, or this process may have too many files open at the moment: who
    looks, looks again. As `Path.glob`, at a tenth of its cost: some are looked for several times a
    second.
    """
    try:
        names = os.listdir(directory)  # noqa: PTH208 - a Path for each name is what it spares
    except OSError:
        return []
    return [directory / name for name in names if name.endswith(suffix)]


def write_atomically(path: Path, text: str) -> None:
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


def read_record(path: Path) -> Any:
    """The JSON document of a small file. Never waits, whatever stands there.

    Every number in it is finite.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a file, or not such a document; the text says why.
    """
    with _opened(path) as file:
        return _document(file)


def is_writer_alive(path: Path) -> bool:
    """Whether who made the file by `written_while_alive` still runs, on whatever host.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a file.
    """
    with _opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no locks here: its writer had none either
            return False
    return False


@contextmanager
def left_by_dead_process(path: Path) -> Iterator[Any]:
    """While entered, a file is locked whose writer has ended; yields its document.

    That of a file of this user's by `written_while_alive`; None of any other, or where there are no
    locks: nobody is known to be dead then.

    Raises:
        OSError: it cannot be opened, as that of another user.
    """
    # Over NFS only a file that may be written can be locked alone.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags), "r+b") as file:
        found = os.fstat(file.fileno())
        document = None
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            with suppress(OSError, ValueError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                document = _document(file)
        yield document


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Entered by one process at a time, as far as the file system and the deadline allow.

    Raises:
        OSError: the directory cannot be opened.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError:  # some network file systems lock no directory
            return
        else:
            return


def _opened(path: Path) -> IO[bytes]:
    # A FIFO or a device would keep a reader waiting, and some cannot be opened at all.
    if path.is_symlink() and not path.exists():
        raise ValueError("it is a broken link")
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a file")
    # Another thing may stand there by now.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is not a file")
    return file


def _document(file: IO[bytes]) -> Any:
    content = file.read(LARGEST_RECORD_BYTES + 1)
    if len(content) > LARGEST_RECORD_BYTES:
        raise ValueError("it is too large")
    try:
        return json.loads(
            content, parse_int=_integer, parse_float=_finite, parse_constant=_no_number
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError("it contains a number that is too large")
    return int(digits)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("it contains a number that is not finite")
    return number


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"it contains {name}, which is not a JSON number")


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
