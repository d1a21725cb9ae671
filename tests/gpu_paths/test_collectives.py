"""What the ranks of a world agree on at a start: alike for all, or an error within the deadline."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from gpu_paths.world import ABORTED, Moment, Scenario, answers
from holdfast.worker.crash_records import Cause

RANKS = (2, 4)
MOMENTS = get_args(Moment)
SHORT_SECONDS = 1.0


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_agree_also_with_one_that_comes_late(
    tmp_path: Path, ranks: int, moment: Moment
) -> None:
    """On the largest reservation that any of them asks for, and the smallest growth."""
    said = answers(Scenario(tmp_path, ranks, moment, "comes late"))
    assert said == [f"{ranks} MiB, 1 MiB more"] * ranks


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_end_when_one_has_raised(tmp_path: Path, ranks: int, moment: Moment) -> None:
    """At once, and not after the deadline: its process is gone."""
    *ours, astray = answers(Scenario(tmp_path, ranks, moment, "raises"))
    assert astray == "ValueError: a kernel of this rank cannot be compiled"
    for rank, said in enumerate(ours):
        assert said.startswith(
            f"EngineStartError: rank {rank} could not agree with the other ranks"
        )


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_end_when_one_takes_no_part(tmp_path: Path, ranks: int, moment: Moment) -> None:
    """One that another vLLM started, say, or that hangs: after the deadline."""
    *ours, _ = answers(Scenario(tmp_path, ranks, moment, "takes no part", SHORT_SECONDS))
    for rank, said in enumerate(ours):
        assert said.startswith(
            f"EngineStartError: rank {rank} could not agree with the other ranks"
        )
        assert "--cpu-distributed-timeout-seconds" in said


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_nothing_is_agreed_on_with_one_that_reduces_something_else(
    tmp_path: Path, ranks: int, moment: Moment
) -> None:
    """Its numbers would be taken for bytes."""
    *ours, _ = answers(Scenario(tmp_path, ranks, moment, "reduces something else", SHORT_SECONDS))
    for rank, said in enumerate(ours):
        assert said == ABORTED or said.startswith(f"EngineStartError: rank {rank} could not agree")


def test_a_deadline_that_the_user_gives_stands(tmp_path: Path) -> None:
    """Ours would be longer than this test."""
    scenario = Scenario(tmp_path, 2, fault="takes no part", given_seconds=SHORT_SECONDS)
    assert answers(scenario)[0].startswith("EngineStartError: rank 0 could not agree")


def test_what_others_could_not_agree_on_is_not_why_a_start_failed() -> None:
    """They say so beside the rank that did not come, or that raised."""
    error = "EngineStartError: rank 0 could not agree with the other ranks on the reservation: ..."
    assert Cause(1, 0.0, "WorkerProc failed", error).is_consequence
