"""The path of a Unix socket: a dead server's is taken over, a living one's is not."""

from __future__ import annotations

import errno
import fcntl
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.listener.unix_socket import bound_unix_socket

DEADLINE_SECONDS = 60.0
KILLED = """
import os, signal, sys
from pathlib import Path
from holdfast.listener.unix_socket import bound_unix_socket
with bound_unix_socket(Path(sys.argv[1])) as sock:
    sock.listen()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def is_in_use(path: Path) -> bool:
    """Whether a server is told that another process has the path."""
    try:
        with bound_unix_socket(path):
            return False
    except OSError as error:
        return error.errno == errno.EADDRINUSE


def test_the_socket_of_a_killed_server_is_taken_over(tmp_path: Path) -> None:
    """The next one starts by itself, and leaves nothing."""
    path = tmp_path / "s"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], timeout=DEADLINE_SECONDS, check=False
    )
    assert killed.returncode == -9
    assert path.is_socket()
    with bound_unix_socket(path) as sock:
        sock.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("listens", [False, True])
def test_the_socket_of_a_living_server_is_in_use(tmp_path: Path, *, listens: bool) -> None:
    """Also before it listens, when a connection is refused as that of a dead one."""
    path = tmp_path / "s"
    with bound_unix_socket(path) as sock:
        if listens:
            sock.listen()
        assert is_in_use(path)
        assert path.is_socket()


@pytest.mark.parametrize("kind", ["listening", "file", "link"])
def test_what_somebody_else_has_at_the_path_stays(tmp_path: Path, kind: str) -> None:
    """A server that takes no such lock, a file, a link to a socket that is left."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        if kind == "file":
            path.touch()
        else:
            other.bind(str(tmp_path / "other" if kind == "link" else path))
        if kind == "listening":
            other.listen()
        elif kind == "link":
            path.symlink_to(tmp_path / "other")
        assert is_in_use(path)
    assert path.is_symlink() == (kind == "link")
    assert path in tmp_path.iterdir()


def test_without_locks_a_socket_is_bound_but_none_is_replaced(tmp_path: Path) -> None:
    """Nobody could tell whether its server lives."""
    path = tmp_path / "s"
    (tmp_path / "s.lock").mkdir()
    with bound_unix_socket(path):
        assert path.is_socket()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert is_in_use(path)
    assert path.is_socket()


def test_the_lock_that_a_killed_server_leaves_is_free(tmp_path: Path) -> None:
    """The file alone says nothing."""
    path = tmp_path / "s"
    (tmp_path / "s.lock").touch()
    assert not is_in_use(path)


def test_a_path_that_cannot_be_bound_leaves_no_lock(tmp_path: Path) -> None:
    """It is too long for the kernel."""
    with pytest.raises(OSError, match="too long"), bound_unix_socket(tmp_path / ("s" * 120)):
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_that_its_server_has_removed_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next server would lock a new file of that name, and replace the socket."""
    path, lock = tmp_path / "s", fcntl.flock
    removed: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        lock(descriptor, operation)
        if not removed:
            removed.append(descriptor)
            path.with_name("s.lock").unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with bound_unix_socket(path):
        assert removed
        assert is_in_use(path)
