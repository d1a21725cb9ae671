"""The journal outlives its process, and is never a reason to fail."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from holdfast.errors import ProbeFailedError, ProbeTooSlowError
from holdfast.probe import ProbeJournal, ProbeJournals
from killed_probe import kill_during_last


def test_attempt_cut_off_by_a_kill_is_forbidden(tmp_path: Path) -> None:
    """If a process is killed in its second attempt, only the second size is forbidden."""
    kill_during_last(tmp_path / "new", "f", 128, 256)
    assert ProbeJournal(tmp_path / "new", "f").forbidden_tokens == 256


def test_an_image_that_took_the_machine_down_forbids_no_context(tmp_path: Path) -> None:
    """It may be small, and says nothing about long prompts; nor do these about images."""
    kill_during_last(tmp_path, "f", 3072, attempt="image_attempt")
    journal = ProbeJournal(tmp_path, "f")
    assert journal.forbidden_tokens is None
    assert journal.forbidden_image is not None
    pixels, evidence = journal.forbidden_image
    assert pixels == 3072
    assert evidence is not None
    evidence.unlink()
    kill_during_last(tmp_path, "f", 512)
    journal = ProbeJournal(tmp_path, "f")
    assert (journal.forbidden_tokens, journal.forbidden_image) == (512, None)


def test_an_image_is_forbidden_once_its_attempt_has_failed(tmp_path: Path) -> None:
    """By this process at once, and by later ones on this host; not if it was served, or slow."""
    journals = ProbeJournals(tmp_path)
    journal = journals.opened("f")
    with journal.image_attempt(768):
        pass
    assert journals.forbid_unproven_image() == 0
    with pytest.raises(ProbeTooSlowError), journal.image_attempt(1536):
        raise ProbeTooSlowError("late")
    assert journals.forbid_unproven_image() == 0
    with pytest.raises(ProbeFailedError), journal.image_attempt(3072):
        raise ProbeFailedError("no")
    assert ProbeJournal(tmp_path, "f").forbidden_image is None
    assert journals.forbid_unproven_image() == 3072
    assert journals.forbid_unproven_image() == 0
    forbidden = ProbeJournal(tmp_path, "f").forbidden_image
    assert forbidden is not None
    assert forbidden[0] == 3072
    assert forbidden == journals.opened("f").forbidden_image
    shutil.rmtree(tmp_path)
    assert journals.opened("f").forbidden_image == (3072, None)


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


def test_a_directory_that_cannot_be_read_forbids_nothing(tmp_path: Path) -> None:
    """A disk that fails does not end the server."""
    assert ProbeJournal(tmp_path / ("x" * 300), "f").forbidden_tokens is None


def test_a_disk_that_fails_during_an_attempt_fails_nothing_else(tmp_path: Path) -> None:
    """Here something else takes the place of the directory meanwhile."""
    directory = tmp_path / "state"
    with ProbeJournal(directory, "f").attempt(128):
        shutil.rmtree(directory)
        directory.touch()
    assert ProbeJournal(directory, "f").forbidden_tokens is None


def test_a_size_that_took_the_hosts_memory_is_forbidden(tmp_path: Path) -> None:
    """To this process and to those after it, though the process lives; the file can be deleted."""
    ProbeJournal(tmp_path, "f").forbid(512)
    journal = ProbeJournal(tmp_path, "f")
    assert journal.forbidden_tokens == 512
    assert journal.evidence is not None
    journal.evidence.unlink()
    assert ProbeJournal(tmp_path, "f").forbidden_tokens is None


def test_what_this_process_has_forbidden_needs_no_file(tmp_path: Path) -> None:
    """The smallest size counts, and there may be nothing to delete."""
    journal = ProbeJournal(None, "f", known_forbidden_tokens=512)
    assert (journal.forbidden_tokens, journal.evidence) == (512, None)
    kill_during_last(tmp_path, "f", 256)
    assert ProbeJournal(tmp_path, "f", known_forbidden_tokens=512).forbidden_tokens == 256


def test_a_size_is_forbidden_although_it_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That is a warning: the engine has died already, and the next one is to start."""
    blocked = tmp_path / "file"
    blocked.touch()
    with caplog.at_level(logging.WARNING):
        ProbeJournal(blocked / "below", "f").forbid(128)
    assert "cannot write" in caplog.text


@pytest.mark.parametrize("has_directory", [True, False])
def test_what_this_process_forbids_is_in_every_later_journal(
    tmp_path: Path, *, has_directory: bool
) -> None:
    """The smallest size counts, with a directory or without one."""
    journals = ProbeJournals(tmp_path if has_directory else None)
    assert journals.opened("f").forbidden_tokens is None
    journals.forbid(512)
    journals.forbid(1024)
    assert journals.opened("f").forbidden_tokens == 512


def test_what_this_process_forbids_is_forbidden_to_the_next(tmp_path: Path) -> None:
    """For the same fingerprint, by a file."""
    journals = ProbeJournals(tmp_path)
    journals.opened("f")
    journals.forbid(512)
    assert ProbeJournals(tmp_path).opened("f").forbidden_tokens == 512
    assert ProbeJournals(tmp_path).opened("another").forbidden_tokens is None


def test_no_directory_keeps_nothing(tmp_path: Path) -> None:
    """Without a directory nothing is written and nothing forbidden."""
    journal = ProbeJournal(None, "f")
    with journal.attempt(128):
        assert journal.path is None
    assert journal.forbidden_tokens is None
    assert not list(tmp_path.iterdir())


def test_the_memory_of_one_host_forbids_nothing_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas share the directory, not the memory."""
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    ProbeJournal(tmp_path, "f").forbid(512)
    assert ProbeJournal(tmp_path, "f").forbidden_tokens == 512
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    journal = ProbeJournal(tmp_path, "f")
    assert (journal.forbidden_tokens, journal.evidence) == (None, None)
