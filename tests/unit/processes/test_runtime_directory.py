"""What a server that was killed left is removed by the next one, and nothing of one that lives."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.processes import cleanup, runtime_directory
from holdfast.worker.ipc_names import name_prefix
from sleepers import mapping

SERVES = """
import sys
from pathlib import Path
from holdfast.worker import ipc_names
ipc_names.SHARED_MEMORY = Path(sys.argv[1])
from holdfast.processes.runtime_directory import runtime_directory

with runtime_directory() as directory:
    engine = directory / "3"
    engine.mkdir()
    ring = Path(sys.argv[1]) / (ipc_names.name_prefix(engine) + "ab")
    ring.touch()
    print(directory.resolve(), directory, ring, flush=True)
    sys.stdin.read()
"""
LONG = "d" * 60


@pytest.fixture(autouse=True)
def shared_memory(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Stands for /dev/shm, in which every server that starts here sweeps what dead ones left."""
    directory = tmp_path_factory.mktemp("shm")
    for module in (cleanup, runtime_directory):
        monkeypatch.setattr(module, "SHARED_MEMORY", directory)
    return directory


@contextmanager
def server(temporary: Path, shared_memory: Path) -> Iterator[tuple[Path, Path, Path]]:
    """One that is killed in the end: its directory, its engine's path to that, and their memory."""
    temporary.mkdir(exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", SERVES, str(shared_memory)],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        real, known, ring = map(Path, process.stdout.readline().split())
        try:
            yield real, known, ring
        finally:
            process.kill()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files lie."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["", LONG])
def test_what_a_killed_server_left_is_swept(
    temporary: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its directory, the short name of that, and the shared memory of its engines."""
    place = temporary / name
    with server(place, shared_memory) as (real, known, ring):
        assert real.parent == place
    assert all(path.exists() for path in (real, known, ring))
    monkeypatch.setattr("tempfile.tempdir", str(place))
    runtime_directory.sweep()
    assert not any(os.path.lexists(path) for path in (real, known, ring))
    assert known == real or not known.parent.exists()
    assert not list(shared_memory.iterdir())


def test_what_an_engine_had_mapped_is_swept(temporary: Path, shared_memory: Path) -> None:
    """Its name says nothing of the engine, but a list does, also if the directory has gone."""
    cache = shared_memory / "vllm_offload_1.mmap"
    with mapping(cache) as process:
        with server(temporary, shared_memory) as (real, known, _):
            cleanup.record_shared_memory(known / "3", [process])
            runtime_directory.sweep()
            assert cache.exists()
        shutil.rmtree(real)
        runtime_directory.sweep()
        assert not cache.exists()
        assert not list(shared_memory.iterdir())


def test_shared_memory_outlives_the_directory_and_is_swept(
    temporary: Path, shared_memory: Path
) -> None:
    """A container that restarts has lost its own files, and shares the memory of the host."""
    elsewhere = temporary / "of another container"
    with server(temporary / "one", shared_memory) as (_, _, ring):
        pass
    elsewhere.mkdir()
    assert ring.exists()
    runtime_directory.sweep()
    assert not ring.exists()


@pytest.mark.parametrize("name", ["", LONG])
def test_a_server_with_another_directory_is_swept(
    temporary: Path, shared_memory: Path, name: str
) -> None:
    """Its file in shared memory says where the rest is."""
    with server(temporary / f"other{name}", shared_memory) as (real, known, ring):
        pass
    runtime_directory.sweep()
    assert not any(os.path.lexists(path) for path in (real, known, ring))
    assert not list(shared_memory.iterdir())


def test_what_a_living_server_has_is_left_alone(temporary: Path, shared_memory: Path) -> None:
    """Another server starts beside it."""
    with server(temporary, shared_memory) as (real, known, ring):
        runtime_directory.sweep()
        assert all(path.exists() for path in (real, known, ring))
        assert (real / "owner").exists()
    runtime_directory.sweep()


def test_what_says_nothing_of_its_owner_is_left_alone(temporary: Path) -> None:
    """A directory of that name may belong to any program, and so may a file that we cannot read."""
    (temporary / "holdfast-notes").mkdir()
    broken = temporary / "holdfast-broken"
    broken.mkdir()
    (broken / "owner").write_text("[" * 100_000)
    linked = temporary / "holdfast-linked"
    linked.mkdir()
    (linked / "owner").symlink_to(broken / "owner")
    piped = temporary / "holdfast-piped"
    piped.mkdir()
    os.mkfifo(piped / "owner")
    before = sorted(temporary.iterdir())
    runtime_directory.sweep()
    assert sorted(temporary.iterdir()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_what_another_user_left_is_left_alone(temporary: Path, shared_memory: Path) -> None:
    """Root could remove it, and does not know it."""
    with server(temporary, shared_memory) as (real, _, ring):
        pass
    for owner in (real / "owner", shared_memory / f"{real.name}.owner"):
        os.chown(owner, 12345, 12345)
    runtime_directory.sweep()
    assert real.exists()
    for owner in (real / "owner", shared_memory / f"{real.name}.owner"):
        os.chown(owner, 0, 0)
    runtime_directory.sweep()
    assert not ring.exists()


@pytest.mark.parametrize("name", ["", LONG])
def test_a_path_has_room_for_a_socket(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """However long that of the directory for temporary files is; nothing stays behind."""
    place = temporary / name
    place.mkdir(exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    with runtime_directory.runtime_directory() as directory:
        assert len(str(directory)) <= runtime_directory.MAX_PATH_LENGTH
        assert directory.resolve().parent == place
        assert (directory.resolve().stat().st_mode & 0o777) == 0o700
    assert not os.path.lexists(directory)
    assert not list(place.glob("holdfast-*"))
    assert directory.parent == place or not directory.parent.exists()


def test_a_cleaner_of_old_files_leaves_the_directory_alone(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cleans only what it can lock. The directory of a short link to this one is kept, too."""
    place = temporary / LONG
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    with runtime_directory.runtime_directory() as directory:
        for kept in (directory.resolve(), directory.parent):
            descriptor = os.open(kept, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)


def test_a_server_that_ends_at_once_removes_it_all(temporary: Path, shared_memory: Path) -> None:
    """At a second signal no context manager has the time."""
    with runtime_directory.runtime_directory() as directory:
        (directory / "1").mkdir()
        ring = shared_memory / (name_prefix(directory / "1") + "ab")
        ring.touch()
        runtime_directory.remove(directory)
        assert not directory.exists()
        assert not ring.exists()
    assert not list(temporary.iterdir())


FULL = """
import resource
from holdfast.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
main(["serve", "--demo", "--port=0", "--host=127.0.0.1"])
"""


def test_a_directory_that_cannot_be_written_is_bad_usage(tmp_path: Path) -> None:
    """As a disk that is full: the line names what to change."""
    done = subprocess.run(
        [sys.executable, "-c", FULL],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "TMPDIR" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("holdfast-*"))


TRACKED = """
import asyncio, os, signal, sys
from multiprocessing import resource_tracker
from pathlib import Path
from holdfast.processes import tree

def pid():
    return resource_tracker._resource_tracker._pid

async def main():
    tree.TRACKER_LOOK_SECONDS = 0.01
    first = pid()
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(50), tree.resource_tracker_kept():
        while pid() == first:
            await asyncio.sleep(0.01)
    resource_tracker.register("/hf-none-of-that-name", "shared_memory")
    print(Path(f"/proc/{first}").exists())

if __name__ == "__main__":
    with tree.owned(Path(sys.argv[1]), {}):
        asyncio.run(main())
"""


def test_a_killed_resource_tracker_is_replaced_in_silence(tmp_path: Path) -> None:
    """No zombie stays, and the next one complains of nothing that was removed before it."""
    program = tmp_path / "program.py"
    program.write_text(TRACKED)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("False", "")


CHILDREN = """
import multiprocessing, sys, time
from pathlib import Path
import psutil
from holdfast.processes import exits, tree

if __name__ == "__main__":
    with tree.owned(Path(sys.argv[1]), {}):
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        child.start()
        known = psutil.Process(child.pid)
        print(known in tree.children())
    print(exits.is_alive(known))
"""


@pytest.mark.parametrize("warnings", ["", "ignore::UserWarning:multiprocessing.resource_tracker"])
def test_a_spawned_process_is_not_taken_for_a_resource_tracker(
    tmp_path: Path, warnings: str
) -> None:
    """Which outlives engines: whatever warnings it is to ignore, it ends with its server."""
    program = tmp_path / "program.py"
    program.write_text(CHILDREN)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        env={**os.environ, "PYTHONWARNINGS": warnings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["True", "False"], done.stderr
