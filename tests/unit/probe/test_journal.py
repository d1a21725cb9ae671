"""The journal outlives its process, and is never a reason to fail."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast.errors import ProbeFailedError
from holdfast.probe import ProbeJournal
from killed_probe import kill_during_last


def test_attempt_cut_off_by_a_kill_is_forbidden(tmp_path: Path) -> None:
    """If a process is killed in its second attempt, only the second size is forbidden."""
    kill_during_last(tmp_path / "new", "f", 128, 256)
    assert ProbeJournal(tmp_path / "new", "f").forbidden_tokens == 256


def test_ended_attempts_are_allowed(tmp_path: Path) -> None:
    """An attempt that ended, well or with an exception, leaves nothing."""
    journal = ProbeJournal(tmp_path, "f")
    with journal.attempt(128):
        pass
    with pytest.raises(ProbeFailedError), journal.attempt(256):
        raise ProbeFailedError("no")
    assert ProbeJournal(tmp_path, "f").forbidden_tokens is None


def test_forbidden_size_survives_later_attempts(tmp_path: Path) -> None:
    """A size that took the machine down stays forbidden while smaller sizes are tried."""
    kill_during_last(tmp_path, "f", 512)
    journal = ProbeJournal(tmp_path, "f")
    with journal.attempt(128):
        pass
    assert ProbeJournal(tmp_path, "f").forbidden_tokens == 512


def test_an_attempt_under_way_forbids_nothing(tmp_path: Path) -> None:
    """A server that shares the directory does not take the attempt of another for lost."""
    with ProbeJournal(tmp_path, "f").attempt(512):
        beside = ProbeJournal(tmp_path, "f")
        assert beside.forbidden_tokens is None
        with beside.attempt(512):
            pass
    assert ProbeJournal(tmp_path, "f").forbidden_tokens is None


def test_the_smallest_of_several_is_forbidden(tmp_path: Path) -> None:
    """Of two servers that went down, and one that runs, the smaller lost size counts."""
    kill_during_last(tmp_path, "f", 512)
    kill_during_last(tmp_path, "f", 256)
    with ProbeJournal(tmp_path, "f").attempt(128):
        journal = ProbeJournal(tmp_path, "f")
    assert journal.forbidden_tokens == 256
    assert journal.evidence is not None
    journal.evidence.unlink()
    assert ProbeJournal(tmp_path, "f").forbidden_tokens == 512


def test_fingerprints_do_not_meet(tmp_path: Path) -> None:
    """Another configuration has another journal."""
    kill_during_last(tmp_path, "f", 512)
    assert ProbeJournal(tmp_path, "another").forbidden_tokens is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"layout": 99}', '{"layout": 1, "fingerprint": "x"}', "\x00\x00"],
)
def test_broken_journal_is_set_aside(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is set aside with a warning, and everything is allowed."""
    path = ProbeJournal(tmp_path, "f").path
    assert path is not None
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert ProbeJournal(tmp_path, "f").forbidden_tokens is None
    assert "is damaged" in caplog.text
    assert not path.exists()
    assert [kept.read_text() for kept in tmp_path.iterdir()] == [content]


def test_directory_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The attempt is made without a journal, and a warning says so."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with ProbeJournal(blocked / "below", "f").attempt(128):
        pass
    assert "cannot write" in caplog.text


def test_no_directory_keeps_nothing(tmp_path: Path) -> None:
    """Without a directory nothing is written and nothing forbidden."""
    journal = ProbeJournal(None, "f")
    with journal.attempt(128):
        assert journal.path is None
    assert journal.forbidden_tokens is None
    assert not list(tmp_path.iterdir())
