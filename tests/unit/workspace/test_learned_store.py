"""What is learned is kept whole, and a bad file never fails a start."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import __version__
from holdfast.atomic_files import LOCK_FILE
from holdfast.workspace import learned_store
from holdfast.workspace.plan import MIB, Slot

FINGERPRINT = "a1b2c3"


def file_in(directory: Path) -> Path:
    return learned_store.learned_path(directory, FINGERPRINT)


def document(**changes: Any) -> dict[str, Any]:
    slots = [{"ubatch": 0, "lane": 0, "needed_bytes": 5}]
    return {"schema": 1, "fingerprint": FINGERPRINT, "slots": slots} | changes


def slot(**changes: Any) -> dict[str, Any]:
    return {"ubatch": 0, "lane": 0, "needed_bytes": 5} | changes


def too_large(**changes: Any) -> dict[str, Any]:
    entry = {"ubatch": 0, "lane": 0, "too_large_bytes": 5, "since_unix_seconds": 1, "failures": 2}
    return entry | changes


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Every slot comes back with its bytes, and only with its fingerprint."""
    needs = {(0, 0): 21 * MIB, (1, 1): 0}
    learned_store.write(tmp_path / "made", FINGERPRINT, needs)
    assert learned_store.read(tmp_path / "made", FINGERPRINT) == needs
    assert learned_store.read(tmp_path / "made", "another") == {}


def test_the_larger_need_stands(tmp_path: Path) -> None:
    """A run with the same fingerprint that needed less takes nothing back."""
    learned_store.write(tmp_path, FINGERPRINT, {(0, 0): 5, (0, 1): 7})
    learned_store.write(tmp_path, FINGERPRINT, {(0, 0): 9, (0, 1): 1})
    assert learned_store.read(tmp_path, FINGERPRINT) == {(0, 0): 9, (0, 1): 7}


def test_nothing_new_is_not_written(tmp_path: Path) -> None:
    """A run that learned nothing leaves the file as it is."""
    learned_store.write(tmp_path, FINGERPRINT, {(0, 0): 5})
    before = file_in(tmp_path).stat().st_ino
    learned_store.write(tmp_path, FINGERPRINT, {(0, 0): 4})
    learned_store.write(tmp_path, FINGERPRINT, {})
    assert file_in(tmp_path).stat().st_ino == before


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    """Its JSON has the schema, the version, the fingerprint, the time and readable sizes."""
    learned_store.write(tmp_path, FINGERPRINT, {(0, 1): 3 * MIB})
    record = json.loads(file_in(tmp_path).read_text())
    assert (record["schema"], record["holdfast"]) == (1, __version__)
    assert record["fingerprint"] == FINGERPRINT
    assert record["written"].endswith("+00:00")
    assert record["slots"] == [
        {"ubatch": 0, "lane": 1, "needed_bytes": 3 * MIB, "needed": "3.00 MiB"}
    ]


def give_up(slots: dict[Slot, int], sizes: dict[Slot, int], directory: Path) -> None:
    """Have two starts fail with sizes."""
    for _ in range(2):
        learned_store.write(directory, FINGERPRINT, slots, sizes)


def test_one_failed_start_is_no_reason_to_give_a_size_up(tmp_path: Path) -> None:
    """It may have failed for another reason, and the size may have served for long."""
    learned_store.write(tmp_path, FINGERPRINT, {(0, 0): 300})
    learned_store.write(tmp_path, FINGERPRINT, {(0, 0): 5}, {(0, 0): 300})
    assert learned_store.read(tmp_path, FINGERPRINT) == {(0, 0): 300}
    assert learned_store.read_too_large(tmp_path, FINGERPRINT) == {}


def test_a_need_is_not_kept_from_the_size_on_that_is_too_large(tmp_path: Path) -> None:
    """That of the engine that started without it is, and a smaller one of a later run."""
    learned_store.write(tmp_path, FINGERPRINT, {(0, 0): 300, (0, 1): 7})
    give_up({(0, 0): 5}, {(0, 0): 300}, tmp_path)
    assert learned_store.read(tmp_path, FINGERPRINT) == {(0, 0): 5, (0, 1): 7}
    assert learned_store.read_too_large(tmp_path, FINGERPRINT) == {(0, 0): 300}
    for need, known in ((301, 5), (300, 5), (299, 299)):
        learned_store.write(tmp_path, FINGERPRINT, {(0, 0): need})
        assert learned_store.read(tmp_path, FINGERPRINT) == {(0, 0): known, (0, 1): 7}
    assert learned_store.read_too_large(tmp_path, FINGERPRINT) == {(0, 0): 300}


@pytest.mark.parametrize("later_seconds", [learned_store.TOO_LARGE_SECONDS, -60])
def test_what_is_too_large_is_forgotten(later_seconds: float, tmp_path: Path) -> None:
    """After a week, or if the clock was wrong, it may be tried again."""
    give_up({}, {(0, 0): 300}, tmp_path)
    record = json.loads(file_in(tmp_path).read_text())
    record["too_large"][0]["since_unix_seconds"] -= later_seconds
    file_in(tmp_path).write_text(json.dumps(record))
    assert learned_store.read_too_large(tmp_path, FINGERPRINT) == {}
    learned_store.write(tmp_path, FINGERPRINT, {(0, 0): 300})
    assert learned_store.read(tmp_path, FINGERPRINT) == {(0, 0): 300}
    assert "too_large" not in json.loads(file_in(tmp_path).read_text())


def test_writing_leaves_no_other_file(tmp_path: Path) -> None:
    """The file appears at once, and no partial file remains; writers lock another one."""
    learned_store.write(tmp_path, FINGERPRINT, {(0, 0): 5})
    assert {*tmp_path.iterdir()} == {file_in(tmp_path), tmp_path / LOCK_FILE}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 50_000,
        "\x00\xff",
        " " * 100_000,
        json.dumps(document(schema=2)),
        json.dumps(document(schema=None)),
        json.dumps(document(fingerprint="another")),
        json.dumps(document(slots=None)),
        json.dumps(document(slots=[5])),
        json.dumps(document(slots=[slot(), slot()])),
        json.dumps(document(slots=[slot(lane=8)])),
        json.dumps(document(slots=[slot(ubatch=-1)])),
        json.dumps(document(slots=[slot(ubatch="0")])),
        json.dumps(document(slots=[slot(lane=True)])),
        json.dumps(document(slots=[slot(needed_bytes=-1)])),
        json.dumps(document(slots=[slot(needed_bytes=1 << 40)])),
        json.dumps(document(slots=[slot(needed_bytes=1.5)])),
        json.dumps(document(slots=[slot(needed_bytes=True)])),
        json.dumps(document(slots=[slot(needed_bytes=None)])),
        json.dumps(document(too_large=None)),
        json.dumps(document(too_large=[5])),
        json.dumps(document(too_large=[too_large(), too_large()])),
        json.dumps(document(too_large=[too_large(lane=8)])),
        json.dumps(document(too_large=[too_large(too_large_bytes=-1)])),
        json.dumps(document(too_large=[too_large(since_unix_seconds="now")])),
        json.dumps(document(too_large=[too_large(since_unix_seconds=True)])),
        json.dumps(document(too_large=[too_large(failures=None)])),
    ],
)
def test_a_bad_file_is_set_aside(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is renamed with a warning, nothing is learned from it, and the next write succeeds."""
    path = file_in(tmp_path)
    path.write_bytes(content.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert learned_store.read(tmp_path, FINGERPRINT) == {}
    assert path.with_suffix(".broken").read_bytes() == content.encode("latin-1")
    assert not path.exists()
    assert "set aside" in caplog.text
    learned_store.write(tmp_path, FINGERPRINT, {(0, 0): 5})
    assert learned_store.read(tmp_path, FINGERPRINT) == {(0, 0): 5}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300))
def test_no_content_is_fatal(content: bytes, tmp_path: Path) -> None:
    """Reading returns whatever the file contains."""
    file_in(tmp_path).write_bytes(content)
    assert learned_store.read(tmp_path, FINGERPRINT) == {}


def test_what_cannot_be_opened_is_set_aside(tmp_path: Path) -> None:
    """A directory in place of the file is set aside like a broken file."""
    file_in(tmp_path).mkdir()
    assert learned_store.read(tmp_path, FINGERPRINT) == {}
    assert file_in(tmp_path).with_suffix(".broken").is_dir()


def test_a_directory_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run continues without learning."""
    blocked = tmp_path / "file"
    blocked.touch()
    with caplog.at_level(logging.WARNING):
        learned_store.write(blocked / "below", FINGERPRINT, {(0, 0): 5})
    assert "cannot save" in caplog.text
    assert learned_store.read(blocked / "below", FINGERPRINT) == {}


@pytest.mark.parametrize("needs", [{(0, 0): -1}, {(9, 0): 1}, {(0, 0): 1 << 40}])
def test_nonsense_is_not_written(needs: dict[tuple[int, int], int], tmp_path: Path) -> None:
    """What could not be read back is an error of the caller."""
    with pytest.raises(ValueError, match="slot"):
        learned_store.write(tmp_path, FINGERPRINT, needs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fingerprint", ["", "../x", "a/b", "a" * 129, "a.b"])
def test_a_fingerprint_cannot_leave_the_directory(fingerprint: str, tmp_path: Path) -> None:
    """Only letters, digits, - and _ may be in a name."""
    with pytest.raises(ValueError, match="fingerprint"):
        learned_store.read(tmp_path, fingerprint)


def test_the_default_directory_is_the_users_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On Linux it follows XDG_STATE_HOME."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert learned_store.default_directory() == tmp_path / "holdfast"
