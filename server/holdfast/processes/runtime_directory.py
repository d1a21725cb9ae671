"""Keeps one server's sockets and engine files, and removes those of dead servers.

A server lives as long as its file is locked: the kernel releases the lock when the process ends, in
whatever way. A pid would mean something else in another container that shares the directory.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
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
MAX_PATH_LENGTH = 60
"""The longest path of a directory with a directory per engine. Linux accepts socket paths of 107
bytes, and vLLM appends a slash and a UUID.
"""
_SHORT_BASES = (Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"))  # noqa: S108 - the shortest ones
_OWNER = "owner"

logger = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class _Record:
    """The content of the file that a server keeps locked."""

    directory: str
    """The path that its engines use and name their shared memory after."""
    alias: str
    """A link that shortens the directory's path; empty if the path is short enough."""


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """Clean up after dead servers, and make a directory of our own that is removed on leaving.

    If its path would be too long for a socket, the path of a short link to it is yielded.

    Raises:
        UsageError: the temporary directory cannot be written.
    """
    with ExitStack() as kept:
        try:
            sweep()
            real = Path(tempfile.mkdtemp(prefix=PREFIX))
            kept.callback(shutil.rmtree, real, ignore_errors=True)
            directory = _short(real)
            kept.callback(_remove_alias, directory, real)
            for place in {real, directory.parent} - {real.parent}:
                kept.enter_context(_kept_from_cleaners(place))
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
    """Remove a server's directory and its engines' shared memory, when it ends at once."""
    real = directory.resolve()
    _remove_engines(directory, real)
    _shared_owner(real).unlink(missing_ok=True)
    _remove_alias(directory, real)
    shutil.rmtree(real, ignore_errors=True)


def sweep() -> None:
    """Remove what killed servers of this user left, and nothing of living ones."""
    found = (
        *Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_OWNER}"),
        *SHARED_MEMORY.glob(f"{PREFIX}*.{_OWNER}"),
    )
    for owner in found:
        # Another server that starts may have removed it by now.
        with suppress(OSError), _of_dead(owner) as record:
            if record is not None:
                logger.info("removing what a killed server left behind: %s", record.directory)
                _remove_left(owner, record)


def _remove_left(owner: Path, record: _Record) -> None:
    directory = Path(record.directory)
    if owner.parent == SHARED_MEMORY:
        _remove_engines(directory, directory)
        # That server may have had another temporary directory.
        beside = directory.resolve() / _OWNER
        with suppress(OSError), _of_dead(beside) as other:
            if other is not None:
                _remove_left(beside, other)
        _remove_alias(directory, directory.resolve())
    else:
        _remove_engines(directory, owner.parent)
        if record.alias:
            _remove_alias(directory, owner.parent)
        shutil.rmtree(owner.parent, ignore_errors=True)
    owner.unlink(missing_ok=True)


def _remove_engines(directory: Path, real: Path) -> None:
    """Remove the shared memory of every engine, as its name, its list and its directory tell."""
    cleanup.unlink(cleanup.named_after_engines(directory))
    for engine in real.glob("*/"):
        cleanup.unlink(cleanup.met_in(engine))


def _shared_owner(real: Path) -> Path:
    """Return the second locked file: shared memory may outlive the directory, or be shared more."""
    return SHARED_MEMORY / f"{real.name}.{_OWNER}"


@contextmanager
def _claimed(owner: Path, directory: Path, real: Path) -> Iterator[None]:
    alias = "" if directory == real else str(directory)
    with written_while_alive(owner, json.dumps(asdict(_Record(str(directory), alias)))):
        yield


@contextmanager
def _kept_from_cleaners(place: Path) -> Iterator[None]:
    """Lock a directory, in which systemd-tmpfiles removes nothing old then, see tmpfiles.d(5)."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # the file system may have no locks
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _of_dead(owner: Path) -> Iterator[_Record | None]:
    """Lock the file of a dead server while entered, and yield its record; None for other files.

    Raises:
        OSError: the file cannot be opened, for example because it is another user's.
    """
    with left_by_dead_process(owner) as document:
        yield _record(document)


def _record(document: Any) -> _Record | None:
    try:
        return _Record(**document)
    except TypeError:
        return None


def _short(real: Path) -> Path:
    """Return the directory; if its path is too long for a socket, a short link if possible."""
    if len(str(real)) <= MAX_PATH_LENGTH:
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
