"""Binds a Unix socket, in the place of one that a killed server has left."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_SUFFIX = ".lock"
"""The suffix of the file beside a socket that its server locks."""


@contextmanager
def bound_unix_socket(path: Path) -> Iterator[socket.socket]:
    """Bind the socket, and remove its file on leaving.

    A socket on which nobody listens is replaced. One that another server has bound may not listen
    yet, so each server locks a file beside its socket, until it ends.

    Raises:
        OSError: it cannot be bound; EADDRINUSE if another process has the path.
    """
    lock_path = path.with_name(path.name + LOCK_SUFFIX)
    lock = _lock(lock_path)
    try:
        if lock is not None and _is_abandoned(path):
            path.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.bind(str(path))
            try:
                yield sock
            finally:
                path.unlink(missing_ok=True)
    finally:
        if lock is not None:
            lock_path.unlink(missing_ok=True)
            os.close(lock)


def _lock(path: Path) -> int | None:
    """Lock the file, and return its descriptor; None if it cannot be opened or locked.

    Raises:
        OSError: another process has locked it (EADDRINUSE).
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from error
        return None
    if not _is_at(path, descriptor):  # its server has ended meanwhile, and removed it
        os.close(descriptor)
        return _lock(path)
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _is_abandoned(path: Path) -> bool:
    """Whether the path is a socket on which no process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:  # also the answer of any file
            return stat.S_ISSOCK(path.lstat().st_mode)
        except OSError:
            return False
    return False
