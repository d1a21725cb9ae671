"""Nothing in the learned directory stops a start, and no race or full disk loses a good record."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import atomic_files
from holdfast.atomic_files import read_record
from holdfast.workspace import learned_store
from holdfast.workspace.plan import MIB

FINGERPRINT = "a1b2c3"
PROCESSES = 6
DEADLINE_SECONDS = 60.0
GOOD = {(0, 0): 21 * MIB}

RACER = """
import sys
from pathlib import Path
from holdfast import atomic_files
from holdfast.workspace import learned_store

atomic_files.LOCK_SECONDS = 60.0  # on a slow disk its turn may come late
directory, lane, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for need in range(1, rounds + 1):
    known = learned_store.read(directory, "a1b2c3")
    assert known.get((0, lane), 0) == need - 1, (lane, need, known)
    learned_store.write(directory, "a1b2c3", {(0, lane): need, (1, 0): need})
"""

FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from holdfast.workspace import learned_store

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
learned_store.write(Path(sys.argv[1]), "a1b2c3", {(0, 0): 99 * 1024 * 1024})
print(sorted(learned_store.read(Path(sys.argv[1]), "a1b2c3").items()))
"""

READER = """
import sys
from pathlib import Path
from holdfast.workspace import learned_store

print(len(learned_store.read(Path(sys.argv[1]), "a1b2c3")))
"""


def file_in(directory: Path) -> Path:
    return learned_store.learned_path(directory, FINGERPRINT)


def run(script: str, *arguments: object) -> str:
    """Return what another process prints; raise if it fails or hangs."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(
        command, check=True, timeout=DEADLINE_SECONDS, capture_output=True, text=True
    ).stdout.strip()


def race(directory: Path, rounds: int) -> list[int]:
    """Return the exit codes of processes that learn different lanes at the same time."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(directory), str(lane), str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for lane in range(PROCESSES)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == b"ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write(b"\n")
            racer.stdin.flush()
        return [racer.wait(timeout=DEADLINE_SECONDS) for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate(timeout=DEADLINE_SECONDS)


def test_processes_that_start_at_once_lose_nothing_of_each_other(tmp_path: Path) -> None:
    """Each keeps what it learned, although others write meanwhile, and no partial file remains."""
    directory = tmp_path / "made"
    assert race(directory, rounds=15) == [0] * PROCESSES
    expected = {(0, lane): 15 for lane in range(PROCESSES)} | {(1, 0): 15}
    assert learned_store.read(directory, FINGERPRINT) == expected
    assert not list(directory.glob("*.broken"))
    assert not list(directory.glob(".*.json.*"))


@pytest.mark.parametrize("room_bytes", [0, 1, 100])
def test_a_full_disk_keeps_the_record(room_bytes: int, tmp_path: Path) -> None:
    """What does not fit is not written. What was known stays whole, and nothing else remains."""
    learned_store.write(tmp_path, FINGERPRINT, GOOD)
    before = file_in(tmp_path).read_bytes()
    assert run(FULL_DISK, tmp_path, room_bytes) == str(sorted(GOOD.items()))
    assert file_in(tmp_path).read_bytes() == before
    assert not list(tmp_path.glob(f".{file_in(tmp_path).name}.*"))


def test_a_directory_that_nobody_can_write_is_no_obstacle() -> None:
    """Not even root can create files there. The start continues and learns nothing."""
    directory = Path("/proc/self")
    learned_store.write(directory, FINGERPRINT, GOOD)
    assert learned_store.read(directory, FINGERPRINT) == {}


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(path))


def _link_to_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _link_to_a_foreign_file(path: Path) -> None:
    other = path.parent / "precious.txt"
    other.write_text("precious")
    path.symlink_to(other)


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def _directory_that_is_not_empty(path: Path) -> None:
    (path / "below").mkdir(parents=True)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _deep(path: Path) -> None:
    path.write_text('{"schema": 1, "slots": ' + "[" * 60_000)


def _nan(path: Path) -> None:
    slots = [{"ubatch": 0, "lane": 0, "needed_bytes": float("nan")}]
    path.write_text(json.dumps({"schema": 1, "fingerprint": FINGERPRINT, "slots": slots}))


def _long_number(path: Path) -> None:
    path.write_text('{"schema": ' + "9" * 10_000 + "}")


def _truncated(path: Path) -> None:
    learned_store.write(path.parent, FINGERPRINT, GOOD)
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    "put",
    [
        _fifo,
        _socket,
        _link_to_endless_device,
        _link_to_a_foreign_file,
        _link_to_itself,
        _directory_that_is_not_empty,
        _huge,
        _deep,
        _nan,
        _long_number,
        _truncated,
    ],
)
def test_whatever_is_in_its_place_is_set_aside(
    put: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither hangs nor ends the start. It is set aside, and the next run learns."""
    monkeypatch.chdir(tmp_path)
    put(file_in(tmp_path))
    assert run(READER, tmp_path) == "0"
    assert not os.path.lexists(file_in(tmp_path))
    learned_store.write(tmp_path, FINGERPRINT, GOOD)
    assert learned_store.read(tmp_path, FINGERPRINT) == GOOD
    precious = tmp_path / "precious.txt"
    assert not precious.exists() or precious.read_text() == "precious"


def test_a_directory_set_aside_before_is_no_obstacle(tmp_path: Path) -> None:
    """A bad file is set aside even if the name for broken files is taken."""
    for _ in range(3):
        (file_in(tmp_path) / "below").mkdir(parents=True)
        assert learned_store.read(tmp_path, FINGERPRINT) == {}
        learned_store.write(tmp_path, FINGERPRINT, GOOD)
        assert learned_store.read(tmp_path, FINGERPRINT) == GOOD
        file_in(tmp_path).unlink()


def test_a_good_record_is_not_set_aside_for_a_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that read a bad file does not set aside the good one that has replaced it."""
    file_in(tmp_path).write_text("bad")

    def overtaken(path: Path) -> object:
        monkeypatch.setattr(learned_store, "read_record", read_record)
        learned_store.write(tmp_path, FINGERPRINT, GOOD)
        raise ValueError(f"{path} was bad a moment ago")

    monkeypatch.setattr(learned_store, "read_record", overtaken)
    assert learned_store.read(tmp_path, FINGERPRINT) == GOOD
    assert learned_store.read(tmp_path, FINGERPRINT) == GOOD


def test_a_lock_that_is_held_delays_but_does_not_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that hangs while it writes delays the others for a bounded time."""
    monkeypatch.setattr(atomic_files, "LOCK_SECONDS", 0.2)
    with atomic_files.directory_lock(tmp_path):
        learned_store.write(tmp_path, FINGERPRINT, GOOD)
    assert learned_store.read(tmp_path, FINGERPRINT) == GOOD


def test_a_lock_works_as_nfs_makes_it(tmp_path: Path) -> None:
    """There it is a lock of POSIX, which a file has to be open for writing for."""
    descriptor = atomic_files.open_lock(tmp_path)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def test_a_directory_in_which_no_file_can_be_made_is_locked_itself(tmp_path: Path) -> None:
    """Which is all that can be had there."""
    (tmp_path / atomic_files.LOCK_FILE).mkdir()
    with atomic_files.directory_lock(tmp_path):
        other = os.open(tmp_path, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(other)
