"""The files that a worker writes in each step are in memory, named after the generation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.processes import cleanup
from holdfast.records import Suspect
from holdfast.worker.ipc_names import SHARED_MEMORY, name_prefix, shared_path
from holdfast.worker.step_requests import StepRequests, read_suspects
from holdfast.workspace.stats import StatsWriter, mapped_files, read_all
from holdfast.workspace.stats.mapped_files import is_shared_memory_kept
from scheduled_steps import step


def in_memory(directory: Path) -> list[str]:
    """Return the files of a generation in shared memory."""
    return sorted(path.name for path in SHARED_MEMORY.glob(f"{name_prefix(directory)}*"))


def test_what_a_worker_writes_is_in_memory_and_read_by_its_path(generation: Path) -> None:
    """Nothing is written back to a disk while a step waits."""
    shared = shared_path(generation)
    with StatsWriter(generation, engine=0, rank=0, generation=7, shared=shared) as writer:
        writer.step_started()
        requests = StepRequests(
            generation, engine=0, rank=0, max_requests=4, max_steps=1, shared=shared
        )
        requests.began(step("guilty"))
        assert [path.parent for path in map(Path.resolve, generation.iterdir())] == [
            SHARED_MEMORY,
            SHARED_MEMORY,
        ]
    assert [(rank.generation, rank.pid) for rank in read_all(generation)] == [(7, os.getpid())]
    assert read_suspects(generation) == {0: (Suspect("guilty", 11, is_prefill=False),)}
    assert len(in_memory(generation)) == 2


def test_it_goes_with_its_generation(generation: Path) -> None:
    """The process that wrote it may be long dead."""
    StatsWriter(generation, engine=0, rank=0, generation=1, shared=shared_path(generation)).close()
    assert in_memory(generation)
    cleanup.remove(generation)
    assert not in_memory(generation)


def test_no_other_user_can_read_it(generation: Path) -> None:
    """It contains names of requests, and shared memory is open to every user."""
    StatsWriter(generation, engine=0, rank=0, generation=1, shared=shared_path(generation)).close()
    (name,) = in_memory(generation)
    assert (SHARED_MEMORY / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("place", ["missing", "file"])
def test_where_nothing_can_be_made_in_memory_it_is_at_its_path(tmp_path: Path, place: str) -> None:
    """A container may not be allowed to write there."""
    (tmp_path / "file").touch()
    shared = tmp_path / place / "hf"
    with StatsWriter(tmp_path, engine=0, rank=0, generation=1, shared=shared) as writer:
        assert not writer.path.is_symlink()
        assert [rank.rank for rank in read_all(tmp_path)] == [0]


def test_a_reader_of_an_earlier_worker_s_file_keeps_it(generation: Path) -> None:
    """The next worker of the rank creates another file."""
    shared = shared_path(generation)
    with StatsWriter(generation, engine=0, rank=0, generation=1, shared=shared) as first:
        earlier = first.path.resolve()
        StatsWriter(generation, engine=0, rank=0, generation=2, shared=shared).close()
        assert first.path.resolve() != earlier
        assert earlier.exists()
    assert [rank.generation for rank in read_all(generation)] == [2]


@pytest.mark.parametrize(
    ("uid", "has_systemd", "expected"),
    [(0, True, True), (999, True, True), (1000, True, False), (10001, False, True)],
)
def test_a_user_who_logs_out_does_not_lose_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    uid: int,
    has_systemd: bool,
    expected: bool,
) -> None:
    """At logout, logind removes files of users that are not system users."""
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(mapped_files, "_SYSTEMD", tmp_path if has_systemd else tmp_path / "missing")
    assert is_shared_memory_kept() == expected
