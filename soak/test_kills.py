"""A thousand writers of stats, each killed at a random moment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stats_writers import killed_writers

KILLS = int(os.environ.get("SOAK_KILLS", "1000"))


@pytest.mark.timeout(3600)
def test_killed_writers_leave_no_torn_stats(tmp_path: Path) -> None:
    """SIGKILL at random moments: every read is whole and none goes back."""
    assert len(list(killed_writers(tmp_path, KILLS, seed=KILLS))) == KILLS
