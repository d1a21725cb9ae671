"""The report on an adversary names each broken promise, and subtracts outages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from hostile import crashes
from hostile_report import Attacks, Bounds, HostileReport, Memory
from hostile_run import HOSTILE_KEYS
from load_generator import Answer, Load, Question
from server_watch import Look, Outage, Watch

QUESTION = Question("streamed chat", (20,), 8)
WHOLE = Answer(QUESTION, ("abc",), frozenset({"length"}), started_seconds=10, ended_seconds=11)
START_SECONDS = 10.0
BOUNDS = Bounds(
    times_as_late=10, livez_seconds=1, times_the_memory=1.5, starts_per_outage=3, starts_in_all=6
)
BROKEN = "APIError: The engine died while it worked on this request."


def look(at_seconds: float, state: str = "READY", *, status: int = 200, stalls: int = 0) -> Look:
    """A look that took a tenth of a second."""
    return Look(at_seconds, 0.1, status, state, {"engine_deaths stall": stalls} if stalls else {})


def seen(
    *answers: Answer, looks: tuple[Look, ...] = (), memory: Memory | None = None
) -> HostileReport:
    """A report on these answers to a question with a baseline of one second."""
    load = Load({QUESTION: WHOLE}, list(answers))
    watch = Watch(list(looks))
    return HostileReport(
        load,
        {QUESTION: 1.0},
        20.0,
        Attacks(),
        watch,
        memory or Memory({"python": 100}),
        (),
        start_seconds=START_SECONDS,
    )


def out(start_seconds: float, end_seconds: float) -> tuple[Look, ...]:
    """The looks of one outage."""
    return (
        look(start_seconds),
        look(start_seconds + 1, "RECOVERING"),
        look(end_seconds),
    )


def test_what_holds_breaks_no_promise() -> None:
    """A whole answer in time, and a stream that broke after a right beginning."""
    broken = replace(WHOLE, texts=("ab",), error=BROKEN, is_begun=True)
    assert not list(seen(WHOLE, broken, looks=(look(1),)).broken_promises(BOUNDS))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (replace(WHOLE, texts=("abd",)), "wrong"),
        (replace(WHOLE, texts=("ab",)), "wrong"),
        (replace(WHOLE, texts=("x",), error=BROKEN, is_begun=True), "wrong"),
        (replace(WHOLE, texts=("a",), error="APIError: x", is_begun=True), "a stream ended with"),
        (replace(WHOLE, texts=(), error=BROKEN), "lost"),
        (replace(WHOLE, ended_seconds=21), "11.0 times the baseline"),
    ],
)
def test_an_answer_that_is_not_right_is_told(answer: Answer, said: str) -> None:
    """Wrong, cut short, lost or late."""
    (told,) = seen(answer).broken_promises(BOUNDS)
    assert told.startswith(said)


@pytest.mark.parametrize(
    "bad", [look(1, status=0), look(1, "FAILED", status=503), replace(look(1), livez_seconds=2)]
)
def test_a_bad_look_is_told(bad: Look) -> None:
    """No answer, FAILED, or late."""
    (told,) = seen(looks=(look(0), bad)).broken_promises(BOUNDS)
    assert told.startswith("/livez")


def test_memory_and_what_is_left_are_told() -> None:
    """Each in words."""
    report = seen(memory=Memory({"python": 100}, 151))
    report.left.append("a file")
    assert list(report.broken_promises(BOUNDS)) == ["1.51 times the memory of READY", "a file"]


def test_an_outage_is_from_the_last_ready_to_the_next() -> None:
    """A look without an answer neither begins nor ends one."""
    states = (look(1), look(2, "RECOVERING"), look(3, "", status=0), look(4, "PROBING"), look(5))
    (outage,) = seen(looks=states).outages()
    assert outage == Outage(1, 5.1)
    assert outage.overlap_seconds(0, 2) == 1
    assert outage.overlap_seconds(6, 9) == 0


def test_an_outage_by_a_stall_begins_with_the_stall() -> None:
    """A stall is seen `stall_seconds` after it began; the next outage is another one."""
    states = (look(50), look(51, "RECOVERING"), look(60, stalls=1))
    more = (look(61, "RECOVERING", stalls=1), look(70, stalls=1))
    first, second = seen(looks=states + more).outages()
    assert first == Outage(30, 60.1)
    assert second == Outage(60.1, 70.1)


@pytest.mark.parametrize(
    ("last_answer_seconds", "start_seconds"), [(29.2, 29.2), (30.5, 30), (28.4, 30)]
)
def test_a_stall_began_with_the_last_answer_before_it(
    last_answer_seconds: float, start_seconds: float
) -> None:
    """It is noticed with the first look after its time; no answer from long before tells of it."""
    states = (look(50), look(51, "RECOVERING"), look(60, stalls=1))
    last = replace(WHOLE, ended_seconds=last_answer_seconds)
    (outage,) = seen(last, looks=states).outages()
    assert outage == Outage(start_seconds, 60.1)


def test_an_outage_makes_no_answer_late() -> None:
    """What an answer took beside it counts."""
    states = (look(10), look(11, "RECOVERING"), look(40))
    late = replace(WHOLE, ended_seconds=45)
    ((ratio, _),) = seen(late, looks=states).latest()
    assert ratio == pytest.approx(4.9)


def test_a_machine_that_stands_still_makes_no_answer_late() -> None:
    """Another process was woken late then; within an outage it is subtracted only once."""
    late = replace(WHOLE, ended_seconds=24)
    still = replace(look(22), late_seconds=4)
    ((ratio, _),) = seen(late, looks=(look(10), still)).latest()
    assert ratio == pytest.approx(10)
    report = seen(late, looks=(look(12), look(13, "RECOVERING"), still))
    assert report.outages() == [Outage(12, 22.1)]


def test_a_long_standstill_is_told() -> None:
    """What was subtracted for it says nothing of the server."""
    looks = (look(10), replace(look(22), late_seconds=6), replace(look(30), late_seconds=0.4))
    (told,) = seen(looks=looks).broken_promises(BOUNDS)
    assert told == "the machine stood still for 6.0 s: run it again"


def test_a_long_outage_is_told() -> None:
    """No answer is late beside it, however long it takes."""
    late = replace(WHOLE, ended_seconds=70)
    (told,) = seen(late, looks=out(10, 61)).broken_promises(BOUNDS)
    assert told == "an outage of 51 s"


def test_many_short_outages_are_told() -> None:
    """Together they may take no longer than some starts."""
    looks = tuple(one for start in (10, 40, 70) for one in out(start, start + 21))
    (told,) = seen(looks=looks).broken_promises(BOUNDS)
    assert told == "outages of 63 s in all, a start took 10 s"


@pytest.mark.parametrize(("outcome", "says"), [("422", []), ("429", ["a met no engine"])])
def test_a_killer_that_meets_no_engine_is_told(outcome: str, says: list[str]) -> None:
    """A run of refusals proves nothing."""
    report = seen()
    report.killers = ("a",)
    report.attacks.outcomes["a"] = Counter([outcome])
    assert list(report.broken_promises(BOUNDS)) == says


@pytest.mark.parametrize("seed", range(5))
def test_some_seeds_in_a_row_send_every_killer(seed: int) -> None:
    """Each run has keys for its own."""
    sent = [crashes.of_seed(seed + more) for more in range(crashes.SHARES)]
    assert {name for names in sent for name in names} == set(crashes.ATTACKS)
    assert max(map(len, sent)) < len(HOSTILE_KEYS)
