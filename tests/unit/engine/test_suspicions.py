"""What ended engines before is kept: bounded, for a day, by several servers, on any disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from holdfast.atomic_files import MAX_RECORD_BYTES
from holdfast.engine.suspicions import (
    CHARGED_SECONDS,
    REMEMBERED,
    REMEMBERED_CHARGES,
    REMEMBERED_SECONDS,
    Suspicions,
)
from stub_engine import FakeClock


def digest(text: object) -> str:
    """One digest for each text."""
    return hashlib.sha256(str(text).encode()).hexdigest()


def test_a_day_later_all_is_forgotten() -> None:
    """A machine may have been mended, and a prompt is not evil for ever."""
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


def test_suspects_do_not_push_out_what_is_quarantined(tmp_path: Path) -> None:
    """Each kind has its own places, and the file stays as small as its reader asks for."""
    path = tmp_path / "suspicions.json"
    known = Suspicions(path)
    known.quarantine(digest("first"), "key-01234567")
    for number in range(3 * REMEMBERED):
        known.suspect(digest(number), "key-01234567")
        known.charge("key-01234567", 2)
    assert known.is_quarantined(digest("first"))
    for number in range(REMEMBERED):
        known.quarantine(digest(f"q{number}"), "key-01234567")
    assert not known.is_quarantined(digest("first"))
    known.save()
    assert path.stat().st_size < MAX_RECORD_BYTES
    assert Suspicions(path).charged("key-01234567") == REMEMBERED_CHARGES


def test_several_servers_keep_what_each_has_seen(tmp_path: Path) -> None:
    """The second to write does not take away what the first wrote, and learns of it."""
    path = tmp_path / "suspicions.json"
    first, second = Suspicions(path), Suspicions(path)
    first.quarantine(digest("a"), "")
    first.charge("k", 3)
    first.save()
    second.suspect(digest("a"), "")
    second.suspect(digest("b"), "")
    second.save()
    for known in (second, Suspicions(path)):
        assert known.is_quarantined(digest("a"))
        assert known.is_suspected(digest("b"), "")
        assert known.suspended_seconds("k") > 0
        assert known.charged("k") == 3


def test_a_clock_that_was_put_back_keeps_nothing_for_ever(tmp_path: Path) -> None:
    """What was written in the future is not believed."""
    path = tmp_path / "suspicions.json"
    ahead = FakeClock()
    ahead.now_seconds = 10 * REMEMBERED_SECONDS
    writer = Suspicions(path, ahead)
    writer.quarantine(digest("a"), "")
    writer.charge("k", 3)
    writer.save()
    now = FakeClock()
    now.now_seconds = 8 * REMEMBERED_SECONDS
    reader = Suspicions(path, now)
    assert not reader.is_quarantined(digest("a"))
    assert reader.suspended_seconds("k") == 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 100_000,
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
def test_a_broken_file_is_as_if_there_were_none(tmp_path: Path, content: str) -> None:
    """It is written anew with the next death."""
    path = tmp_path / "suspicions.json"
    path.write_text(content)
    known = Suspicions(path)
    known.quarantine(digest("a"), "")
    known.save()
    assert Suspicions(path).is_quarantined(digest("a"))


def test_a_disk_that_takes_nothing_costs_nothing_but_the_memory(tmp_path: Path) -> None:
    """The file stands where its directory should be."""
    (tmp_path / "state").write_text("")
    known = Suspicions(tmp_path / "state" / "suspicions.json")
    known.quarantine(digest("a"), "")
    known.save()
    assert known.is_quarantined(digest("a"))


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
