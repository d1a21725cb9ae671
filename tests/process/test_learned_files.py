"""What an earlier run left behind is never a reason to fail; a process around a stand-in engine."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path

import stand_in_engine
from holdfast.probe import ProbeJournal
from holdfast.workspace.learned_store import learned_path
from servers import Server, running
from stub_engine import FACTS

COMMAND = (sys.executable, str(Path(stand_in_engine.__file__)), "serve")


def serving(directory: Path, learned: Path) -> AbstractContextManager[Server]:
    """A server that keeps its learned state at `learned`."""
    arguments = ("model", "--probe=off", f"--learned-dir={learned}")
    return running(directory, *arguments, command=COMMAND)


def test_broken_files_are_set_aside(tmp_path: Path) -> None:
    """Learned reservations and the journal: READY, a warning for each, and both are kept aside."""
    learned = tmp_path / "learned"
    learned.mkdir()
    journal = ProbeJournal(learned, FACTS.fingerprint).path
    assert journal is not None
    reservations = learned_path(learned, stand_in_engine.StandInLauncher.fingerprint)
    for path in (journal, reservations):
        path.write_bytes(b"\0{]")
    with serving(tmp_path, learned) as server:
        server.until_ready()
        assert server.stop() == 0
        assert server.log.count(f"{journal} is damaged") == 1
        assert server.log.count(f"{reservations} is set aside") == 1
    assert not journal.exists()
    assert not reservations.exists()
    assert len(list(learned.glob("*.broken*"))) == 2


def test_a_file_in_the_place_of_the_directory_is_ignored(tmp_path: Path) -> None:
    """READY; nothing can be kept, and nothing is overwritten."""
    learned = tmp_path / "file"
    learned.write_text("mine")
    with serving(tmp_path, learned) as server:
        server.until_ready()
        assert server.stop() == 0
    assert learned.read_text() == "mine"
