"""What keys have used outlives the process, whatever is on the disk."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.api import usage_files
from holdfast.api.usage_files import KEPT_FILES, LOCK_FILE, usage_file, usage_kept
from holdfast.atomic_files import open_lock
from holdfast.errors import UsageError
from holdfast.telemetry.key_usage import DAY_SECONDS, KeyUsage, Used
from stub_engine import FakeClock

DEADLINE_SECONDS = 60.0
DAY = 20_780
"""The 23rd of November 2026."""


@pytest.fixture
def clock() -> FakeClock:
    """A time on one day."""
    clock = FakeClock()
    clock.now_seconds = DAY * DAY_SECONDS + 100.0
    return clock


def records(directory: Path, day: int = DAY) -> list[dict[str, object]]:
    """The lines of one day."""
    return [json.loads(line) for line in usage_file(directory, day).read_text().splitlines()]


def until(path: Path, text: str) -> None:
    """Return when the file has this text."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def breakable(parent: Path) -> tuple[Path, Path, Path]:
    """Make a link to a directory, and a file; with the link on the file, nothing can be written."""
    link, whole, broken = (parent / name for name in ("usage", "whole", "broken"))
    whole.mkdir()
    broken.touch()
    link.symlink_to(whole)
    return link, whole, broken


def point(link: Path, target: Path) -> None:
    """Have a link point elsewhere, at once."""
    new = link.with_name("new")
    new.symlink_to(target)
    new.replace(link)


def test_a_day_has_a_line_for_each_key(tmp_path: Path, clock: FakeClock) -> None:
    """In a file with the date in its name, in a directory that is made."""
    usage = KeyUsage(lambda: ("idle",), clock)
    directory = tmp_path / "state" / "usage"
    with usage_kept(usage, directory):
        usage.count("bob", requests=1, prompt_tokens=2, output_tokens=3)
        usage.count("alice", requests=4)
    assert usage_file(directory, DAY).name == "usage-2026-11-23.jsonl"
    day = "2026-11-23"
    assert records(directory) == [
        {"day": day, "key": "alice", "requests": 4, "prompt_tokens": 0, "output_tokens": 0},
        {"day": day, "key": "bob", "requests": 1, "prompt_tokens": 2, "output_tokens": 3},
    ]
    assert directory.stat().st_mode & 0o077 == 0


def test_what_was_used_today_is_read_back(tmp_path: Path, clock: FakeClock) -> None:
    """The next process counts on, and what keys used on another day is left alone."""
    for day, tokens in ((DAY, 5), (DAY, 10), (DAY + 1, 5)):
        clock.now_seconds = day * DAY_SECONDS
        usage = KeyUsage(clock=clock)
        with usage_kept(usage, tmp_path):
            usage.count("alice", requests=1, output_tokens=5)
            assert usage.tokens_today("alice") == tokens
    assert [record["requests"] for record in records(tmp_path)] == [2]
    assert [record["requests"] for record in records(tmp_path, DAY + 1)] == [1]


def test_usage_is_written_while_the_server_runs(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is killed has lost only the last few seconds; a new day has its own file."""
    monkeypatch.setattr(usage_files, "WRITE_SECONDS", 0.01)
    usage = KeyUsage(clock=clock)
    with usage_kept(usage, tmp_path):
        usage.count("alice", requests=1)
        until(usage_file(tmp_path, DAY), '"requests": 1')
        usage.count("alice", requests=1)
        clock.now_seconds += DAY_SECONDS
        usage.count("alice", requests=7)
        until(usage_file(tmp_path, DAY + 1), '"requests": 7')
        until(usage_file(tmp_path, DAY), '"requests": 2')


def test_a_day_that_the_clock_comes_to_goes_on_as_its_file_says(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose clock was wrong at its start overwrites nothing, and keeps to the limit."""
    with usage_kept(earlier := KeyUsage(clock=clock), tmp_path):
        earlier.count("alice", requests=1, output_tokens=5)
        earlier.count("bob", requests=1)
    monkeypatch.setattr(usage_files, "WRITE_SECONDS", 0.01)
    clock.now_seconds -= 300 * DAY_SECONDS
    usage = KeyUsage(clock=clock)
    with usage_kept(usage, tmp_path):
        usage.count("alice", requests=2)
        clock.now_seconds += 300 * DAY_SECONDS
        usage.count("alice", requests=7, output_tokens=1)
        until(usage_file(tmp_path, DAY), '"requests": 8')
        assert usage.tokens_today("alice") == 6
    assert [record["requests"] for record in records(tmp_path)] == [8, 1]
    assert [record["requests"] for record in records(tmp_path, DAY - 300)] == [2]


def test_a_day_that_the_clock_comes_to_is_known_before_anything_is_counted(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that has used up its day would have no limit until the next write."""
    with usage_kept(earlier := KeyUsage(clock=clock), tmp_path):
        earlier.count("alice", requests=1, output_tokens=5)
    monkeypatch.setattr(usage_files, "WRITE_SECONDS", 0.01)
    clock.now_seconds -= DAY_SECONDS
    usage = KeyUsage(clock=clock)
    with usage_kept(usage, tmp_path):
        clock.now_seconds += DAY_SECONDS
        deadline = time.monotonic() + DEADLINE_SECONDS
        while usage.tokens_today("alice") != 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_days_that_could_not_be_written_are_kept(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many midnights pass until there is room."""
    monkeypatch.setattr(usage_files, "WRITE_SECONDS", 0.01)
    directory, whole, broken = breakable(tmp_path)
    usage = KeyUsage(clock=clock)
    with usage_kept(usage, directory):
        point(directory, broken)
        for _ in range(4):
            usage.count("alice", requests=3)
            clock.now_seconds += DAY_SECONDS
        point(directory, whole)
        for day in range(DAY, DAY + 4):
            until(usage_file(whole, day), '"requests": 3')
        deadline = time.monotonic() + DEADLINE_SECONDS
        while usage.days().keys() - {usage.day}:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_damaged_file_is_set_aside_before_it_is_replaced(
    tmp_path: Path, clock: FakeClock
) -> None:
    """A person can then read what this server could not."""
    path = usage_file(tmp_path, DAY)
    path.write_text(damaged := '{"key": "bob", "requests": 7\n')
    usage = KeyUsage(clock=clock)
    with usage_kept(usage, tmp_path):
        usage.count("alice", requests=1)
    assert path.with_suffix(".broken").read_text() == damaged
    assert [record["key"] for record in records(tmp_path)] == ["alice"]


def test_old_files_are_removed(tmp_path: Path, clock: FakeClock) -> None:
    """The rest of the directory is nobody's but the operator's."""
    for day in range(DAY - KEPT_FILES - 5, DAY):
        usage_file(tmp_path, day).touch()
    (tmp_path / "notes.txt").touch()
    usage = KeyUsage(clock=clock)
    with usage_kept(usage, tmp_path):
        usage.count("alice", requests=1)
    left = {path.name for path in tmp_path.iterdir()} - {LOCK_FILE}
    assert len(left) == KEPT_FILES + 1
    assert "notes.txt" in left
    assert usage_file(tmp_path, DAY - KEPT_FILES + 1).name in left


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[" * 100_000,
        "null",
        "[]",
        '{"key": "bob"}',
        '{"key": 5, "requests": 1, "prompt_tokens": 1, "output_tokens": 1}',
        '{"key": "bob", "requests": -1, "prompt_tokens": 1, "output_tokens": 1}',
        '{"key": "bob", "requests": 1.5, "prompt_tokens": 1, "output_tokens": 1}',
        '{"key": "bob", "requests": 1, "prompt_tokens": 1e999, "output_tokens": 1}',
        '{"key": "bob", "requests": 1, "prompt_tokens": 1, "output_tokens": ' + "9" * 300 + "}",
    ],
)
def test_a_broken_line_is_dropped(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    """The log says so, and the lines beside it count."""
    good = '{"key": "alice", "requests": 1, "prompt_tokens": 2, "output_tokens": 3}'
    usage_file(tmp_path, DAY).write_text(f"{line}\n{good}\n")
    usage = KeyUsage(clock=clock)
    with usage_kept(usage, tmp_path):
        assert usage.days() == {DAY: {"alice": Used(1, 2, 3)}}
    assert "1 lines are not usage" in caplog.text


def test_two_servers_do_not_write_to_one_directory(tmp_path: Path) -> None:
    """Each would overwrite what the other one counted; when one has ended, the next may."""
    with (
        usage_kept(KeyUsage(), tmp_path),
        pytest.raises(UsageError, match="another server writes to it"),
        usage_kept(KeyUsage(), tmp_path),
    ):
        pass
    with usage_kept(KeyUsage(), tmp_path):
        pass


def test_a_directory_can_be_that_of_what_was_learned_too(tmp_path: Path) -> None:
    """What is learned is written under a lock, for which it would wait here."""
    with usage_kept(KeyUsage(), tmp_path):
        lock = open_lock(tmp_path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(lock)


KILLED = """
import os, signal, sys
from pathlib import Path
from holdfast.api.usage_files import usage_kept
from holdfast.telemetry.key_usage import KeyUsage
with usage_kept(KeyUsage(), Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_that_was_killed_leaves_its_directory_free(tmp_path: Path) -> None:
    """The next one starts at once."""
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], timeout=DEADLINE_SECONDS, check=False
    )
    assert killed.returncode == -9
    with usage_kept(KeyUsage(), tmp_path):
        pass


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path, clock: FakeClock) -> None:
    """At the start, with its name; and a directory in the place of a file."""
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with (
            pytest.raises(UsageError, match=f"--usage-dir: {directory}"),
            usage_kept(KeyUsage(), directory),
        ):
            pass
    usage_file(tmp_path, DAY).mkdir()
    with (
        pytest.raises(UsageError, match="is not a usage file"),
        usage_kept(KeyUsage(clock=clock), tmp_path),
    ):
        pass


def test_a_disk_that_fails_is_reported_once_and_written_to_again(
    tmp_path: Path,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was used meanwhile is not lost."""
    monkeypatch.setattr(usage_files, "WRITE_SECONDS", 0.01)
    directory, whole, broken = breakable(tmp_path)
    usage = KeyUsage(clock=clock)
    with caplog.at_level(logging.WARNING), usage_kept(usage, directory):
        point(directory, broken)
        usage.count("alice", requests=1)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while "not on disk" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        usage.count("alice", requests=1)
        point(directory, whole)
        until(usage_file(whole, DAY), '"requests": 2')
    assert caplog.text.count("not on disk") == 1


def test_without_a_directory_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting goes on."""
    monkeypatch.chdir(tmp_path)
    usage = KeyUsage()
    with usage_kept(usage, None):
        usage.count("alice", requests=1)
    assert list(tmp_path.iterdir()) == []
