"""Which rows count as bad, and when an engine has no sound one any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.worker.nan_rows import LOST_ROWS, NanLogitsError, NanRows
from holdfast.workspace.stats import StatsWriter, read_stats


@pytest.fixture
def stats(tmp_path: Path) -> Iterator[StatsWriter]:
    """The file of one rank."""
    with StatsWriter(tmp_path, engine=0, rank=0, generation=1) as writer:
        yield writer


def output(*counts: int) -> Any:
    """A step's output: the NaNs in the row of each request."""
    return SimpleNamespace(num_nans_in_logits={str(at): n for at, n in enumerate(counts)})


def counted(stats: StatsWriter) -> int:
    """What a reader of the file sees."""
    found = read_stats(stats.path)
    assert found is not None
    return found.nan_rows


def test_a_row_with_a_nan_counts_once(stats: StatsWriter) -> None:
    """However many of its numbers are none."""
    rows = NanRows(stats)
    rows.check(output(0, 512, 1, 0))
    rows.check(output(0, 0))
    rows.check(output(3, 0))
    assert counted(stats) == 3


@pytest.mark.parametrize(
    "nothing", [None, "tokens", output(), SimpleNamespace(num_nans_in_logits=None)]
)
def test_an_output_that_tells_nothing_counts_nothing(stats: StatsWriter, nothing: Any) -> None:
    """That of a rank without logits, of a pooling model, or where vLLM was told not to count."""
    NanRows(stats).check(nothing)
    assert counted(stats) == 0


def test_a_whole_step_that_is_lost_ends_the_engine(stats: StatsWriter) -> None:
    """Its rows are counted before, so that they outlive the process."""
    with pytest.raises(NanLogitsError, match=f"none of the last {LOST_ROWS} rows"):
        NanRows(stats).check(output(*[1] * LOST_ROWS))
    assert counted(stats) == LOST_ROWS


def test_one_sound_row_keeps_the_engine(stats: StatsWriter) -> None:
    """The fault is that of the other requests."""
    rows = NanRows(stats)
    for _ in range(5):
        rows.check(output(*[1] * LOST_ROWS, 0))
    assert counted(stats) == 5 * LOST_ROWS


def test_small_steps_are_lost_together(stats: StatsWriter) -> None:
    """One request alone needs several tokens, and a sound one between them resets the count."""
    rows = NanRows(stats)
    for _ in range(LOST_ROWS - 1):
        rows.check(output(9))
    rows.check(output(0))
    for _ in range(LOST_ROWS - 1):
        rows.check(output(9))
    with pytest.raises(NanLogitsError):
        rows.check(output(9))
