"""Small files that survive restarts and crashes: written atomically, read safely, and locked."""

from __future__ import annotations

import fcntl
import json
import math
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

MAX_RECORD_BYTES = 64 * 1024
LOCK_SECONDS = 5.0
"""A process that hangs while it writes delays another by at most this."""
LOCK_FILE = ".lock"
"""The file in a directory that its processes lock."""
_LOCK_POLL_SECONDS = 0.02
_MAX_DIGITS = 32
"""The limit of digits of a number in a record: ours have fewer, and a float cannot hold 400."""

FileVersion = tuple[int, int, int]
"""What changes when a file is replaced: its modification time in ns, its size, and its inode."""


def files_with_suffix(suffix: str, directory: Path) -> list[Path]:
    """Return the files of a directory with a name that ends in `suffix`; none if it cannot be read.

    There may be no directory yet, or this process may have too many open files at the moment:
    callers poll. It does the same as `Path.glob` at a tenth of the cost, since some files are
    looked up several times a second.
    """
    try:
        names = os.listdir(directory)  # noqa: PTH208 - a Path for each name would be slow
    except OSError:
        return []
    return [directory / name for name in names if name.endswith(suffix)]


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` so that after any crash the file has the old content or the new.

    A missing directory is created for this user only.

    Raises:
        OSError: it could not be written; the old content is unchanged.
    """
    _put(path, content).close()


@contextmanager
def written_while_alive(
    path: Path, text: str, on_left: Callable[[OSError], None] = lambda _: None
) -> Iterator[None]:
    """Have `path` contain `text`, locked, while entered; it remains only if the process dies.

    If the disk has failed since, so that it remains, `on_left` is called.

    Raises:
        OSError: it could not be written.
    """
    with _put(path, text, is_locked=True):
        try:
            yield
        finally:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                on_left(error)


def read_record(path: Path) -> Any:
    """Return the JSON document of a small file. It never blocks, whatever `path` is.

    Every number in the document is finite.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a file, or not such a document; the text says why.
    """
    with _opened(path) as file:
        return _document(file)


def read_changed_record(path: Path, known: FileVersion | None) -> tuple[FileVersion, Any]:
    """Return the version of a file, and its document as `read_record` does unless it is `known`.

    The file is opened first, because NFS tells nobody else of a change at once.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a file, or not such a document; the text says why.
    """
    with _opened(path) as file:
        found = os.fstat(file.fileno())
        version = (found.st_mtime_ns, found.st_size, found.st_ino)
        return version, None if version == known else _document(file)


def is_writer_alive(path: Path) -> bool:
    """Return whether the process that made the file by `written_while_alive` runs, on any host.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a file.
    """
    with _opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # the file system has no locks, so its writer had none either
            return False
    return False


@contextmanager
def left_by_dead_process(path: Path) -> Iterator[Any]:
    """While entered, lock the file that a dead process left, and yield its document.

    It must be a file of this user, made by `written_while_alive`; otherwise, or without locks, it
    yields None: the writer is not known to be dead then.

    Raises:
        OSError: it cannot be opened, for example because it belongs to another user.
    """
    # NFS grants an exclusive lock only on a file that is open for writing.
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
    """Admit one process at a time, as far as the file system and the deadline allow.

    Raises:
        OSError: the directory cannot be opened.
    """
    descriptor = open_lock(directory)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def open_lock(directory: Path, name: str = LOCK_FILE) -> int:
    """Open what the processes that share a directory lock, and return its descriptor.

    It is the file `name` in the directory, or the directory itself if there can be none.

    Raises:
        OSError: the directory cannot be opened.
    """
    # NFS grants an exclusive lock only on what is open for writing, which no directory is.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):
        return os.open(directory / name, flags, 0o600)
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError:  # the file system has no locks
            return
        else:
            return


def _opened(path: Path) -> IO[bytes]:
    # A FIFO or a device would block a reader, and some cannot be opened at all.
    if path.is_symlink() and not path.exists():
        raise ValueError("it is a broken link")
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a file")
    # Something else may have taken the path by now.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is not a file")
    return file


def _document(file: IO[bytes]) -> Any:
    content = file.read(MAX_RECORD_BYTES + 1)
    if len(content) > MAX_RECORD_BYTES:
        raise ValueError("it is too large")
    try:
        return json.loads(
            content, parse_int=_integer, parse_float=_finite, parse_constant=refuse_constant
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("it contains a number that is too large")
    return int(digits)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("it contains a number that is not finite")
    return number


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and the infinities, which Python's parser of JSON accepts."""
    raise ValueError(f"it contains {name}, which is not a JSON number")


def _put(path: Path, content: str | bytes, *, is_locked: bool = False) -> IO[bytes]:
    """Write the file, and return it, still open, when it is on disk under its final name."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    file = os.fdopen(descriptor, "wb")
    try:
        if is_locked:
            # Locked before it has its final name: no process may find it without the lock.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content.encode() if isinstance(content, str) else content)
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
