"""What the ranks of a world agree on at a start: alike for all, or an error within the deadline."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from gpu_paths.world import ABORTED, END_SECONDS, Fault, Moment, Scenario, answers
from holdfast.worker.crash_records import Cause
from holdfast.workspace.plan import MIB

RANKS = (2, 4)
MOMENTS = get_args(Moment)
SHORT_SECONDS = 1.0


def said_in(
    directory: Path, ranks: int, moment: Moment, fault: Fault, timeout_seconds: float = END_SECONDS
) -> list[str]:
    """What each rank said in the end; they fit a length only where they agree on one."""
    available_bytes = tuple((24 + 12 * rank) * MIB for rank in range(ranks))
    fitted_bytes = available_bytes if moment == "length" else ()
    return answers(
        Scenario(directory, ranks, moment, fault, timeout_seconds, available_bytes=fitted_bytes)
    )


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_agree_also_with_one_that_comes_late(
    tmp_path: Path, ranks: int, moment: Moment
) -> None:
    """On the largest reservation that any asks for, the shortest context and the least growth."""
    said = said_in(tmp_path, ranks, moment, "comes late")
    reserved_mib = 12 if moment == "length" else ranks
    assert said == [f"{reserved_mib} MiB, 1 MiB more"] * ranks


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_end_when_one_has_raised(tmp_path: Path, ranks: int, moment: Moment) -> None:
    """At once, and not after the deadline: its process is gone."""
    *ours, astray = said_in(tmp_path, ranks, moment, "raises")
    assert astray == "ValueError: a kernel of this rank cannot be compiled"
    for rank, said in enumerate(ours):
        assert said.startswith(
            f"EngineStartError: rank {rank} could not agree with the other ranks"
        )


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_end_when_one_takes_no_part(tmp_path: Path, ranks: int, moment: Moment) -> None:
    """One that another vLLM started, say, or that hangs: after the deadline."""
    *ours, _ = said_in(tmp_path, ranks, moment, "takes no part", SHORT_SECONDS)
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
    *ours, _ = said_in(tmp_path, ranks, moment, "reduces something else", SHORT_SECONDS)
    for rank, said in enumerate(ours):
        assert said == ABORTED or said.startswith(f"EngineStartError: rank {rank} could not agree")


@pytest.mark.parametrize("astray_rank", range(3))
def test_no_length_is_agreed_on_with_one_that_was_given_another(
    tmp_path: Path, astray_rank: int
) -> None:
    """Whichever rank it is: it takes the largest reservation where the others take the shortest."""
    available_bytes = (24 * MIB,) * 3
    said = answers(
        Scenario(
            tmp_path,
            3,
            fault="fits no length",
            astray_rank=astray_rank,
            available_bytes=available_bytes,
        )
    )
    for rank, words in enumerate(said):
        subject = "reservation" if rank == astray_rank else "context length"
        assert words.startswith(
            f"EngineStartError: rank {rank} could not agree with the other ranks on the {subject}: "
            "another rank was agreeing on something else"
        )


def test_a_deadline_that_the_user_gives_stands(tmp_path: Path) -> None:
    """Ours would be longer than this test."""
    scenario = Scenario(tmp_path, 2, fault="takes no part", given_seconds=SHORT_SECONDS)
    assert answers(scenario)[0].startswith("EngineStartError: rank 0 could not agree")


def test_what_others_could_not_agree_on_is_not_why_a_start_failed() -> None:
    """They say so beside the rank that did not come, or that raised."""
    error = "EngineStartError: rank 0 could not agree with the other ranks on the reservation: ..."
    assert Cause(1, 0.0, "WorkerProc failed", error).is_consequence
