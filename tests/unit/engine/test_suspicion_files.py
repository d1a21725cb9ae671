"""Servers read each other's files: whole ones, once, and nothing that is not theirs."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.atomic_files import MAX_RECORD_BYTES
from holdfast.engine.suspects.suspicion_files import (
    CLEAN_SECONDS,
    MAX_CHARGES,
    MAX_FILES,
    MAX_SUSPICIONS,
    REMEMBERED_SECONDS,
    Charge,
    Findings,
    Suspicion,
    SuspicionFiles,
    merged_charges,
)
from stub_engine import FakeClock

A = Suspicion(hashlib.sha256(b"a").hexdigest(), "alice", 1000.25, is_quarantined=True)
B = Suspicion(hashlib.sha256(b"b").hexdigest(), "", 2000.5, is_quarantined=False)
FOUND = Findings((A, B), (Charge("alice", 1000.25), Charge("alice", 1000.25)))
FOREIGN = "suspicions-f-foreign.json"
LONGEST_NAME = "n" * 48


class Counted(Charge):
    """A charge that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return super().__eq__(other)

    def __hash__(self) -> int:
        return super().__hash__()


def test_what_one_server_writes_the_others_read(tmp_path: Path) -> None:
    """Once, until it has changed; and not what it wrote itself."""
    first, second = SuspicionFiles(tmp_path, "f"), SuspicionFiles(tmp_path, "f")
    first.write(FOUND)
    assert first.read_changed() == Findings()
    assert second.read_changed() == FOUND
    assert second.read_changed() == Findings()
    first.write(Findings((B,)))
    assert second.read_changed() == Findings((B,))


def test_a_death_that_two_servers_have_written_is_charged_once(tmp_path: Path) -> None:
    """The second one had learned of it from the first, and had a death of its own."""
    first, second, third = (SuspicionFiles(tmp_path, "f") for _ in range(3))
    one, two = Charge("alice", 1000.25), Charge("alice", 1001.5)
    first.write(Findings(charges=(one,)))
    second.write(Findings(charges=(one, two)))
    assert third.read_changed().charges == (one, two)


def test_files_of_equal_size_and_time_are_told_apart(tmp_path: Path) -> None:
    """A disk may keep whole seconds only."""
    first, second = SuspicionFiles(tmp_path, "f"), SuspicionFiles(tmp_path, "f")
    now_ns = time.time_ns()
    for found in (Findings((A,)), Findings((Suspicion(B.digest, *_rest(A)),))):
        first.write(found)
        os.utime(first.path, ns=(now_ns, now_ns))
        assert second.read_changed() == found


def _rest(one: Suspicion) -> tuple[str, float, bool]:
    return one.key, one.at_unix_seconds, one.is_quarantined


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    """A reader that has opened the old one reads all of it."""
    files = SuspicionFiles(tmp_path, "f")
    files.write(FOUND)
    with files.path.open() as old:
        files.write(Findings())
        assert len(json.load(old)["suspicions"]) == 2


def test_another_kind_of_engine_has_its_own_files(tmp_path: Path) -> None:
    """Also one whose fingerprint begins in the same way."""
    SuspicionFiles(tmp_path, "fa").write(FOUND)
    assert SuspicionFiles(tmp_path, "f").read_changed() == Findings()


def test_the_file_that_servers_once_shared_is_read(tmp_path: Path) -> None:
    """What is quarantined stays so over an update."""
    other = SuspicionFiles(tmp_path, "f")
    other.write(FOUND)
    other.path.rename(tmp_path / "suspicions-f.json")
    assert SuspicionFiles(tmp_path, "f").read_changed() == FOUND


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 50_000,
        "null",
        "[]",
        json.dumps({"schema": 2, "suspicions": [], "charges": []}),
        json.dumps({"schema": 1, "suspicions": 3, "charges": []}),
        json.dumps({"schema": 1, "suspicions": [{}], "charges": []}),
        json.dumps({"schema": 1, "suspicions": [], "charges": [{"key": 1, "at_unix_seconds": 1}]}),
        json.dumps(
            {"schema": 1, "suspicions": [], "charges": [{"key": "a\n", "at_unix_seconds": 1}]}
        ),
        '{"schema": 1, "suspicions": [], "charges": [{"key": "a", "at_unix_seconds": 1e999}]}',
        "x" * (MAX_RECORD_BYTES + 1),
    ],
)
def test_a_corrupt_file_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    """What the others have written is read, and the file too when it is whole again."""
    foreign = tmp_path / FOREIGN
    foreign.write_text(content)
    reader, writer = SuspicionFiles(tmp_path, "f"), SuspicionFiles(tmp_path, "f")
    assert reader.read_changed() == Findings()
    writer.write(FOUND)
    assert reader.read_changed() == FOUND
    assert reader.read_changed() == Findings()
    (record,) = caplog.records
    assert str(foreign) in record.getMessage()
    writer.path.replace(foreign)
    assert reader.read_changed() == FOUND


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nothing")])
def test_what_is_not_a_file_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, put: Callable[[Path], None]
) -> None:
    """It neither blocks nor ends anything."""
    put(tmp_path / FOREIGN)
    reader = SuspicionFiles(tmp_path, "f")
    for _ in range(2):
        assert reader.read_changed() == Findings()
    assert len(caplog.records) == 1
    SuspicionFiles(tmp_path, "f").write(FOUND)
    assert reader.read_changed() == FOUND


def test_old_files_are_removed(tmp_path: Path) -> None:
    """Servers that have ended leave no more than a day of them, though no engine dies any more."""
    clock = FakeClock()
    clock.now_seconds = time.time()
    reader = SuspicionFiles(tmp_path, "f", clock)
    ended, alive = SuspicionFiles(tmp_path, "f"), SuspicionFiles(tmp_path, "f")
    other = SuspicionFiles(tmp_path, "another")
    for files in (ended, alive, other):
        files.write(FOUND)
    assert reader.read_changed().suspicions
    for files in (ended, other):
        old = files.path.stat().st_mtime - REMEMBERED_SECONDS - 1
        os.utime(files.path, (old, old))
    clock.now_seconds += CLEAN_SECONDS
    reader.read_changed()
    assert set(tmp_path.iterdir()) == {alive.path, other.path}


def test_a_bounded_number_of_files_is_read(tmp_path: Path) -> None:
    """The newest, however many there are."""
    now = time.time()
    for number in range(MAX_FILES + 1):
        path = tmp_path / f"suspicions-f-{number:04}.json"
        charges = [{"key": "a", "at_unix_seconds": number}]
        path.write_text(json.dumps({"schema": 1, "suspicions": [], "charges": charges}))
        os.utime(path, (now - 1000 + number, now - 1000 + number))
    found = SuspicionFiles(tmp_path, "f").read_changed().charges
    assert [one.at_unix_seconds for one in found] == [*range(1, MAX_FILES + 1)]


def test_what_a_server_writes_at_most_is_read(tmp_path: Path) -> None:
    """With the longest names; a larger file was not written by a server."""
    digests = (hashlib.sha256(b"%d" % number).hexdigest() for number in range(MAX_SUSPICIONS))
    many = tuple(
        Suspicion(one, LONGEST_NAME, 2.0**31 + 0.1, is_quarantined=False) for one in digests
    )
    charges = (Charge(LONGEST_NAME, 2.0**31 + 0.1),) * MAX_CHARGES
    for found, is_read in (
        (Findings(many, charges), True),
        (Findings((*many, A), charges), False),
        (Findings(many, (*charges, charges[0])), False),
    ):
        writer, reader = SuspicionFiles(tmp_path, "f"), SuspicionFiles(tmp_path, "f")
        writer.write(found)
        assert reader.read_changed() == (found if is_read else Findings())
        writer.path.unlink()


def test_many_charges_are_merged_in_little_work() -> None:
    """Each is counted once a side, not once for each other one."""
    sides = [[Counted("a", float(number)) for number in range(MAX_CHARGES)] for _ in range(4)]
    Counted.compared = 0
    assert len(merged_charges(*sides)) == MAX_CHARGES
    assert Counted.compared <= 8 * MAX_CHARGES


def test_a_directory_that_comes_later_is_found(tmp_path: Path) -> None:
    """Before the first death there is none."""
    directory = tmp_path / "state" / "holdfast"
    reader, writer = SuspicionFiles(directory, "f"), SuspicionFiles(directory, "f")
    assert reader.read_changed() == Findings()
    writer.write(FOUND)
    assert reader.read_changed() == FOUND
