"""Keeps one server's sockets and engine files, and removes what dead servers left.

Whether a server lives is told by a lock that the kernel takes off when its process ends, however
that is: process numbers would mean something else in another container that shares the directory.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.atomic_files import left_by_dead_process, written_while_alive
from holdfast.errors import UsageError
from holdfast.processes import cleanup
from holdfast.worker.ipc_names import SHARED_MEMORY

PREFIX = "holdfast-"
LONGEST_PATH = 60
"""Of a directory below which each engine has another: Linux takes sockets of 107 bytes, and vLLM
adds a slash and a UUID.
"""
_SHORT_BASES = (Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"))  # noqa: S108 - the shortest that there are
_OWNER = "owner"

logger = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class _Record:
    """What a server says of itself in the file that it keeps locked."""

    directory: str
    """The path that its engines use, and name their shared memory after."""
    alias: str
    """A link that gives the directory a short path; empty if it is short enough."""


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """A directory of this server's own, removed when left; what dead servers left is, too.

    A directory for temporary files whose path is too long for a socket is used by a short name.

    Raises:
        UsageError: no directory can be written.
    """
    with ExitStack() as kept:
        try:
            sweep()
            real = Path(tempfile.mkdtemp(prefix=PREFIX))
            kept.callback(shutil.rmtree, real, ignore_errors=True)
            directory = _short(real)
            kept.callback(_remove_alias, directory, real)
            kept.enter_context(_claimed(real / _OWNER, directory, real))
        except OSError as error:
            raise UsageError(
                f"cannot write to the directory for temporary files: {error}.",
                remedy="make room there, or name another directory in TMPDIR.",
            ) from error
        with suppress(OSError):  # it may be full, or not there
            kept.enter_context(_claimed(_shared_owner(real), directory, real))
        yield directory


def remove(directory: Path) -> None:
    """Remove the directory, and what is named after its engines, of a server that ends at once."""
    real = directory.resolve()
    _remove_engines(directory, real)
    _shared_owner(real).unlink(missing_ok=True)
    _remove_alias(directory, real)
    shutil.rmtree(real, ignore_errors=True)


def sweep() -> None:
    """Remove what servers of this user left that were killed; of one that lives nothing."""
    found = (
        *Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_OWNER}"),
        *SHARED_MEMORY.glob(f"{PREFIX}*.{_OWNER}"),
    )
    for owner in found:
        # It may be gone by now: another server starts and does the same.
        with suppress(OSError), _of_dead(owner) as record:
            if record is not None:
                logger.info("removing what a killed server left behind: %s", record.directory)
                _remove_left(owner, record)


def _remove_left(owner: Path, record: _Record) -> None:
    directory = Path(record.directory)
    if owner.parent == SHARED_MEMORY:
        _remove_engines(directory, directory)
        # It may have had another directory for temporary files than this one has.
        beside = directory.resolve() / _OWNER
        with suppress(OSError), _of_dead(beside) as said:
            if said is not None:
                _remove_left(beside, said)
        _remove_alias(directory, directory.resolve())
    else:
        _remove_engines(directory, owner.parent)
        if record.alias:
            _remove_alias(directory, owner.parent)
        shutil.rmtree(owner.parent, ignore_errors=True)
    owner.unlink(missing_ok=True)


def _remove_engines(directory: Path, real: Path) -> None:
    """Remove the shared memory of every engine, whose names follow from the directory's own."""
    cleanup.unlink(cleanup.named_after_engines(directory))
    for engine in real.glob("*/"):
        cleanup.unlink(cleanup.named_after_meetings(engine))


def _shared_owner(real: Path) -> Path:
    """The second locked file: shared memory may outlive the directory, or have other neighbours."""
    return SHARED_MEMORY / f"{real.name}.{_OWNER}"


@contextmanager
def _claimed(owner: Path, directory: Path, real: Path) -> Iterator[None]:
    alias = "" if directory == real else str(directory)
    with written_while_alive(owner, json.dumps(asdict(_Record(str(directory), alias)))):
        yield


@contextmanager
def _of_dead(owner: Path) -> Iterator[_Record | None]:
    """What a server says that has ended, and is locked meanwhile; None of any other file.

    Raises:
        OSError: it cannot be opened; of another user's that is so.
    """
    with left_by_dead_process(owner) as document:
        yield _record(document)


def _record(document: Any) -> _Record | None:
    try:
        return _Record(**document)
    except TypeError:
        return None


def _short(real: Path) -> Path:
    """The directory, or a link to it whose path leaves room for a socket, if one can be made."""
    if len(str(real)) <= LONGEST_PATH:
        return real
    for base in _SHORT_BASES:
        with suppress(OSError):
            place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            (place / "r").symlink_to(real)
            return place / "r"
    return real


def _remove_alias(directory: Path, real: Path) -> None:
    if directory != real and directory.is_symlink():
        with suppress(OSError):
            directory.unlink()
            directory.parent.rmdir()
