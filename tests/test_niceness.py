"""How nice EngineCore is."""

from __future__ import annotations

import pytest

from holdfast.workspace.niceness import CPU_NICENESS, engine_core_niceness


@pytest.mark.parametrize(
    ("given", "is_cpu", "expected"),
    [(None, True, CPU_NICENESS), (None, False, 0), (0, True, 0), (7, False, 7)],
)
def test_engine_core_gives_way_to_workers_that_compute_on_the_cpu(
    given: int | None,
    is_cpu: bool,
    expected: int,
) -> None:
    """Those of a GPU wait for what it plans, unless the user says otherwise."""
    assert engine_core_niceness(given, is_cpu=is_cpu) == expected
