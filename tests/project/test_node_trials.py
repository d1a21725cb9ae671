"""The soak of two nodes excuses only what no server could give, and bounds a hang."""

from __future__ import annotations

from dataclasses import replace

import pytest

from load_generator import Answer, Load, Question
from node_trials import ARRIVAL_SECONDS, NOTICED_SECONDS, Trial, newly_left

QUESTION = Question("completion", (20,), 8)
WHOLE = Answer(QUESTION, ("abc",), frozenset({"length"}))
BROKEN = replace(WHOLE, texts=(), finish_reasons=frozenset(), error="APIError: it broke")
ASKED, REACHED, STRUCK, BACK = 100.0, 110.0, 120.0, 150.0


def lost(started_seconds: float, ended_seconds: float) -> Answer:
    """An answer that a client did not get."""
    return replace(BROKEN, started_seconds=started_seconds, ended_seconds=ended_seconds)


def judged(*answers: Answer, **changes: object) -> list[str]:
    """What is wrong with a trial that is otherwise as it should be."""
    trial = Trial(
        "SIGKILL Worker of the head",
        "READY",
        asked_seconds=ASKED,
        reached_seconds=REACHED,
        struck_seconds=STRUCK,
        noticed_seconds=STRUCK + 1,
        back_seconds=BACK,
    )
    for name, value in changes.items():
        setattr(trial, name, value)
    trial.judge(Load({QUESTION: WHOLE}, list(answers)))
    return trial.problems


def test_a_fault_that_costs_nothing_is_no_problem() -> None:
    """Every answer came, and the loss was noticed."""
    assert judged(WHOLE) == []


def test_an_answer_that_is_lost_is_a_problem() -> None:
    """Also while a head is frozen, since its connections live on."""
    assert judged(lost(STRUCK - 1, STRUCK + 1), fault="SIGSTOP the head") == [
        "lost: APIError: it broke"
    ]


@pytest.mark.parametrize(
    ("started_seconds", "ended_seconds", "is_excused"),
    [
        (STRUCK - 1, STRUCK + 1, True),
        (STRUCK + 1, STRUCK + 2, True),
        (STRUCK - 2, STRUCK - 1, False),
        (BACK + 1, BACK + 2, False),
    ],
)
def test_a_killed_head_takes_what_it_had_and_answers_nobody_until_the_next_is_ready(
    started_seconds: float, ended_seconds: float, *, is_excused: bool
) -> None:
    """No client is told anything by a process that is gone."""
    problems = judged(lost(started_seconds, ended_seconds), killed_seconds=STRUCK)
    assert (problems == []) is is_excused


@pytest.mark.parametrize(
    ("started_seconds", "is_excused"),
    [(ASKED - 2 * ARRIVAL_SECONDS, False), (ASKED, True), (BACK + 1, False)],
)
def test_a_drain_refuses_what_comes_after_its_begin(
    started_seconds: float, *, is_excused: bool
) -> None:
    """What was asked before is answered first, whatever dies meanwhile."""
    problems = judged(lost(started_seconds, BACK + 9), refusing_seconds=ASKED)
    assert (problems == []) is is_excused


def test_a_stream_that_breaks_is_a_problem() -> None:
    """It goes on in the next engine."""
    broken = replace(
        lost(STRUCK - 1, STRUCK + 1),
        question=replace(QUESTION, kind="streamed completion"),
        texts=("a",),
        is_begun=True,
    )
    trial = Trial("SIGKILL Worker of the head", "READY", has_to_be_noticed=False)
    trial.struck_seconds = STRUCK
    trial.judge(Load({broken.question: replace(WHOLE, question=broken.question)}, [broken]))
    assert trial.problems == ["broken: APIError: it broke"]


@pytest.mark.parametrize(
    ("changes", "is_problem"),
    [({}, True), ({"refusing_seconds": ASKED}, False), ({"killed_seconds": STRUCK}, False)],
)
def test_a_head_that_was_ready_ends_only_if_it_is_told_to(
    changes: dict[str, float], *, is_problem: bool
) -> None:
    """Otherwise it starts the next generation."""
    trial = replace(Trial("SIGKILL Worker of the head", "RECOVERING"), **changes)  # type: ignore[arg-type]  # all are numbers
    trial.judge_end(5)
    assert bool(trial.problems) is is_problem


@pytest.mark.parametrize(
    ("noticed_seconds", "expected"),
    [
        (None, ["nobody noticed"]),
        (STRUCK + NOTICED_SECONDS + 1, ["noticed too late"]),
        (STRUCK + NOTICED_SECONDS, []),
    ],
)
def test_nothing_hangs_longer_than_the_heartbeat_allows(
    noticed_seconds: float | None, expected: list[str]
) -> None:
    """Where there is something that must end."""
    assert judged(noticed_seconds=noticed_seconds) == expected
    assert judged(noticed_seconds=noticed_seconds, has_to_be_noticed=False) == []


@pytest.mark.parametrize(
    ("state", "expected"), [("READY", ["not tried"]), ("PROBING", []), ("DRAINING", [])]
)
def test_only_short_states_may_be_over_before_the_fault(state: str, expected: list[str]) -> None:
    """Another attempt follows."""
    assert judged(state=state, struck_seconds=None, noticed_seconds=None) == expected


def test_what_is_left_in_shared_memory_is_a_problem() -> None:
    """By name; a running engine may have as many files of its own as the first one."""
    assert newly_left({"psm_1", "psm_2"}, {"psm_0"}) == {"psm_1", "psm_2"}
    assert newly_left({"psm_1"}, {"psm_0"}) == set()
    trial = Trial("SIGKILL the follower", "READY", has_to_be_noticed=False, struck_seconds=STRUCK)
    trial.judge(Load({}, []), left={"psm_1"})
    assert trial.problems == ["left in shared memory: psm_1"]
