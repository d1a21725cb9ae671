"""The fake machines, started once for all tests that one process runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_paths.fake_machine import FakeMachines


@pytest.fixture(scope="session")
def machines() -> Iterator[FakeMachines]:
    """One with each board of `fake_boards.BOARDS`, made when it is asked for first."""
    running = FakeMachines()
    yield running
    running.close()
