"""What ended engines before is kept: bounded, for a day, by several servers, on any disk."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.atomic_files import MAX_RECORD_BYTES
from holdfast.engine.suspects.suspicion_files import (
    MAX_CHARGES,
    REMEMBERED_SECONDS,
    Findings,
    SuspicionFiles,
)
from holdfast.engine.suspects.suspicions import (
    CHARGED_SECONDS,
    POLL_SECONDS,
    REMEMBERED,
    Suspicions,
)
from stub_engine import FakeClock


def digest(text: object) -> str:
    """One digest for each text."""
    return hashlib.sha256(str(text).encode()).hexdigest()


def test_a_day_later_all_is_forgotten() -> None:
    """A machine may have been repaired, and a prompt does not stay suspect without end."""
    clock = FakeClock()
    known = Suspicions(clock=clock)
    known.quarantine(digest("a"), "")
    known.suspect(digest("b"), "")
    clock.now_seconds += REMEMBERED_SECONDS - 1
    assert known.is_quarantined(digest("a"))
    assert known.is_suspected(digest("b"), "")
    clock.now_seconds += 1
    assert not known.is_quarantined(digest("a"))
    assert not known.is_suspected(digest("b"), "")


def test_a_suspect_is_known_by_its_key() -> None:
    """Another client that asks the same has ended nothing."""
    known = Suspicions()
    known.suspect(digest("a"), "mine")
    assert known.is_suspected(digest("a"), "mine")
    assert not known.is_suspected(digest("a"), "yours")
    assert not known.is_quarantined(digest("a"))


LONGEST_NAME = "n" * 48
DEADLINE_SECONDS = 60.0


def shared(directory: Path, clock: Callable[[], float] | None = None) -> Suspicions:
    """What one of the servers with this directory knows."""
    files = SuspicionFiles(directory, "f")
    return Suspicions(files) if clock is None else Suspicions(files, clock)


def test_suspects_do_not_push_out_what_is_quarantined(tmp_path: Path) -> None:
    """Each kind has its own places, and the file stays as small as its reader asks for."""
    clock = FakeClock()
    clock.now_seconds = 1_764_000_000.1234567
    known = shared(tmp_path, clock)
    known.quarantine(digest("first"), LONGEST_NAME)
    for number in range(3 * REMEMBERED):
        clock.now_seconds += 0.0000011
        known.suspect(digest(number), LONGEST_NAME)
        known.charge(LONGEST_NAME, 2)
    assert known.is_quarantined(digest("first"))
    for number in range(REMEMBERED):
        clock.now_seconds += 0.0000011
        known.quarantine(digest(f"q{number}"), LONGEST_NAME)
    assert not known.is_quarantined(digest("first"))
    known.save()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < MAX_RECORD_BYTES
    assert shared(tmp_path, clock).charged(LONGEST_NAME) == MAX_CHARGES


def test_several_servers_keep_what_each_has_seen(tmp_path: Path) -> None:
    """None takes away what another one wrote, and a new one knows all of it."""
    first, second = shared(tmp_path), shared(tmp_path)
    first.quarantine(digest("a"), "")
    first.charge("k", 3)
    second.suspect(digest("a"), "")
    second.suspect(digest("b"), "")
    for _ in range(2):
        first.save()
        second.save()
    known = shared(tmp_path)
    assert known.is_quarantined(digest("a"))
    assert known.is_suspected(digest("b"), "")
    assert known.suspended_seconds("k") > 0
    assert known.charged("k") == 3


def test_a_second_death_quarantines_wherever_the_first_was(tmp_path: Path) -> None:
    """Also of two servers that did not know of each other; not of two keys."""
    clock = FakeClock()
    first, second = shared(tmp_path, clock), shared(tmp_path, clock)
    first.suspect(digest("a"), "mine")
    first.suspect(digest("b"), "mine")
    clock.now_seconds += 1
    second.suspect(digest("a"), "mine")
    second.suspect(digest("b"), "yours")
    first.save()
    assert not shared(tmp_path, clock).is_quarantined(digest("a"))
    shared(tmp_path, clock).save()
    assert not shared(tmp_path, clock).is_quarantined(digest("a"))
    second.save()
    known = shared(tmp_path, clock)
    assert known.is_quarantined(digest("a"))
    assert not known.is_quarantined(digest("b"))


def test_a_death_of_yesterday_is_not_the_first_of_two(tmp_path: Path) -> None:
    """What is forgotten counts no more."""
    clock = FakeClock()
    known = shared(tmp_path, clock)
    known.suspect(digest("a"), "")
    clock.now_seconds += REMEMBERED_SECONDS
    known.suspect(digest("a"), "")
    assert not known.is_quarantined(digest("a"))
    assert known.is_suspected(digest("a"), "")


def test_a_clock_that_was_put_back_keeps_nothing_for_ever(tmp_path: Path) -> None:
    """What was written in the future is not believed."""
    ahead = FakeClock()
    ahead.now_seconds = 10 * REMEMBERED_SECONDS
    writer = shared(tmp_path, ahead)
    writer.quarantine(digest("a"), "")
    writer.charge("k", 3)
    writer.save()
    now = FakeClock()
    now.now_seconds = 8 * REMEMBERED_SECONDS
    reader = shared(tmp_path, now)
    assert not reader.is_quarantined(digest("a"))
    assert reader.suspended_seconds("k") == 0


def test_a_disk_that_takes_nothing_costs_nothing_but_the_memory(tmp_path: Path) -> None:
    """The file stands where its directory should be."""
    (tmp_path / "state").write_text("")
    known = shared(tmp_path / "state")
    known.quarantine(digest("a"), "")
    known.save()
    assert known.is_quarantined(digest("a"))


QUARANTINES = """
import sys
from pathlib import Path
from holdfast.engine.suspects.suspicion_files import SuspicionFiles
from holdfast.engine.suspects.suspicions import Suspicions
known = Suspicions(SuspicionFiles(Path(sys.argv[1]), "f"))
known.quarantine(sys.argv[2], "alice")
known.save()
"""


def test_a_running_server_learns_what_another_process_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a request and without a death of its own; its log says so."""

    async def learn() -> None:
        known = shared(tmp_path)
        command = [sys.executable, "-c", QUARANTINES, str(tmp_path), digest("a")]
        with known.learning():
            assert not known.has_quarantined
            done = await asyncio.to_thread(
                subprocess.run, command, timeout=DEADLINE_SECONDS, check=True
            )
            assert done.returncode == 0
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not known.is_quarantined(digest("a")):  # noqa: ASYNC110 - a thread reads
                    await asyncio.sleep(0.01)
            assert known.has_quarantined

    with caplog.at_level(logging.WARNING):
        asyncio.run(learn())
    assert "another server has quarantined 1 requests" in caplog.text


def test_a_file_system_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """Neither the loop nor the end of the server waits for it."""
    entered, released = threading.Event(), threading.Event()

    class Hanging(SuspicionFiles):
        def read_changed(self) -> Findings:
            if threading.current_thread() is not threading.main_thread():
                entered.set()
                released.wait(DEADLINE_SECONDS)
            return super().read_changed()

    async def serve() -> None:
        known = Suspicions(Hanging(tmp_path, "f"))
        with known.learning():
            assert await asyncio.to_thread(entered.wait, DEADLINE_SECONDS)
            known.quarantine(digest("a"), "")

    asyncio.run(serve())
    released.set()


def test_what_the_disk_refuses_is_written_once_it_has_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for it, and the log says once why it is not there yet."""
    files = SuspicionFiles(tmp_path / "state", "f")
    tries = threading.Semaphore(0)

    class Counting(Suspicions):
        def save(self) -> bool:
            is_saved = super().save()
            tries.release()
            return is_saved

    def until_tried(times: int) -> bool:
        return all(tries.acquire(timeout=DEADLINE_SECONDS) for _ in range(times))

    async def serve() -> None:
        known = Counting(files)
        with known.learning():
            (tmp_path / "state").write_text("")  # where its directory should be
            known.quarantine(digest("a"), "")
            known.save_soon()
            assert await asyncio.to_thread(until_tried, 3)
            (tmp_path / "state").unlink()

    with caplog.at_level(logging.WARNING):
        asyncio.run(serve())
    assert caplog.text.count("Cannot record") == 1
    assert shared(tmp_path / "state").is_quarantined(digest("a"))


def test_charges_are_counted_within_the_hour() -> None:
    """Three deaths suspend a key until the oldest of them is an hour old."""
    clock = FakeClock()
    known = Suspicions(clock=clock)
    known.charge("k", 2)
    assert known.suspended_seconds("k") == 0
    clock.now_seconds += 100
    known.charge("k", 2)
    assert known.suspended_seconds("k") == CHARGED_SECONDS - 100
    assert known.suspended_seconds("") == 0


def test_what_one_server_writes_the_others_know_with_their_next_look(tmp_path: Path) -> None:
    """They look at least twice a second, so that it is known within one."""
    assert POLL_SECONDS <= 0.5
    writer, reader = shared(tmp_path), SuspicionFiles(tmp_path, "f")
    reader.read_changed()
    writer.quarantine(digest("a"), "")
    writer.save()
    assert [one.digest for one in reader.read_changed().suspicions] == [digest("a")]
