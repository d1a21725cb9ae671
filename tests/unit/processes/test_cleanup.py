"""What killed processes leave is removed, and nothing of a neighbour's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from holdfast.processes import cleanup
from holdfast.worker.ipc_names import SHARED_MEMORY, name_prefix
from sleepers import mapping

MAKES = """
import multiprocessing, os, sys
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from holdfast.worker.ipc_names import name_ipc_after

def die():
    # Its tracker first, which would tidy up after it.
    if tracker := resource_tracker._resource_tracker._pid:
        os.kill(tracker, 9)
    os.kill(os.getpid(), 9)

def makes(lock):
    ring = shared_memory.SharedMemory(create=True, size=4096)
    print(ring.name, flush=True)
    die()

if __name__ == "__main__":
    name_ipc_after(Path(sys.argv[1]))
    lock = multiprocessing.get_context("spawn").Lock()
    child = multiprocessing.get_context("fork").Process(target=makes, args=(lock,))
    child.start()
    child.join()
    die()
"""


def named_after(directory: Path) -> list[str]:
    """What lies in shared memory with the names of this generation."""
    return sorted(path.name for path in SHARED_MEMORY.glob(f"*{name_prefix(directory)}*"))


def test_what_a_killed_process_made_is_removed_by_its_name(generation: Path) -> None:
    """A ring of a child and a semaphore, after both processes have been killed."""
    subprocess.run(
        [sys.executable, "-c", MAKES, str(generation)],
        check=False,
        timeout=60,
        stdout=subprocess.DEVNULL,
    )
    neighbour = name_prefix(generation.parent / "2")
    (SHARED_MEMORY / neighbour).touch()
    try:
        assert any(name.startswith("hf") for name in named_after(generation))
        cleanup.remove(generation)
        assert named_after(generation) == []
        assert not generation.exists()
        assert (SHARED_MEMORY / neighbour).exists()
    finally:
        (SHARED_MEMORY / neighbour).unlink()


def test_the_shared_memory_of_ranks_that_met_is_removed(generation: Path) -> None:
    """The CPU backend names it after the file by which they met."""
    meeting = f"vllm_dist_{uuid4().hex}"
    (generation / meeting).touch()
    ours = SHARED_MEMORY / f"{meeting}-tp:0-[0-1]-cpushm_0"
    theirs = SHARED_MEMORY / f"vllm_dist_{uuid4().hex}-tp:0-[0-1]-cpushm_0"
    ours.touch()
    theirs.touch()
    try:
        cleanup.remove(generation)
        assert not ours.exists()
        assert theirs.exists()
    finally:
        theirs.unlink()


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("nccl-{}", True),
        ("torch_1_{}", True),
        ("vllm_dist_{}", True),
        ("hfabcdefg{}", True),
        ("vllm_offload_{}.mmap", True),
        ("vllm_ec_{}_dp0.mmap", True),
        ("psm_{}", False),
        ("cache-of-a-neighbour-{}", False),
    ],
)
def test_of_what_a_process_maps_only_its_own_is_found(name: str, *, is_ours: bool) -> None:
    """A neighbour's segment that vLLM has merely attached to keeps its name."""
    path = SHARED_MEMORY / name.format(uuid4().hex)
    with mapping(path) as process:
        assert cleanup.shared_memory([process]) == ({path} if is_ours else set())


def test_what_was_mapped_is_removed_after_its_process(generation: Path) -> None:
    """A list says what that was, each time that a look finds more, and is removed as well."""
    paths = [SHARED_MEMORY / f"vllm_offload_{uuid4().hex}.mmap" for _ in range(2)]
    with mapping(paths[0]) as first, mapping(paths[1]) as second:
        cleanup.record_shared_memory(generation, [first])
        cleanup.record_shared_memory(generation, [first, second])
        cleanup.record_shared_memory(generation, [second])
        cleanup.remove(generation)
        assert not any(path.exists() for path in paths)
        assert named_after(generation) == []


@pytest.mark.parametrize(
    "content", ['["./torch_{}"]', '["neighbour-{}"]', '[["torch_{}"]]', '"torch_{}"', "torch_{}"]
)
def test_a_list_that_is_not_ours_removes_nothing(generation: Path, content: str) -> None:
    """Every user can write one; only the list itself is removed, because of its name."""
    name = uuid4().hex
    listed = SHARED_MEMORY / f"{name_prefix(generation)}.mapped"
    listed.write_text(content.format(name))
    kept = [SHARED_MEMORY / f"{kind}{name}" for kind in ("neighbour-", "torch_")]
    try:
        for path in kept:
            path.touch()
        cleanup.remove(generation)
        assert all(path.exists() for path in kept)
        assert not listed.exists()
    finally:
        for path in kept:
            path.unlink(missing_ok=True)


def test_names_are_short_enough_for_multiprocessing(tmp_path: Path) -> None:
    """With the slash, and two random bytes in hexadecimal, 14 characters."""
    assert len("/" + name_prefix(tmp_path)) + 4 <= 14
    assert name_prefix(tmp_path) != name_prefix(tmp_path / "2")
