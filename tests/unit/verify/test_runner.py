"""The runner: what a check notes and how it ends decide its status, and no check ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from double_limits import EVERY, LimitedDouble
from holdfast.verify import runner
from holdfast.verify.answers import MalformedError
from holdfast.verify.baseline import Baseline, Score
from holdfast.verify.check import Check, deadline_seconds_of
from holdfast.verify.checks import ALL
from holdfast.verify.checks.oracle import comparing
from holdfast.verify.options import Options
from holdfast.verify.records import (
    CheckResult,
    CheckStatus,
    Request,
    Server,
    Verdict,
    at_most,
    equal_to,
)
from holdfast.verify.runner import judge
from holdfast.verify.survey import Reach
from holdfast.verify.target import PATIENT_SECONDS, NoAnswerError, Target
from holdfast.verify.tasks import Task
from holdfast.verify.trial import (
    CHAT,
    MODELS,
    InconclusiveError,
    SkippedError,
    Trial,
)
from openai_double import OpenAIDouble
from verified import Unseen, results

Body = Callable[[Trial], Awaitable[None]]


def outcome(body: Body, app: OpenAIDouble | None = None, **options: object) -> CheckResult:
    """What comes of one check."""
    check = Check("one", "wire", body, "Something.", **options)  # type: ignore[arg-type]  # a test's
    (made,) = results(app or OpenAIDouble(), [check]).values()
    return made


async def well(trial: Trial) -> None:
    await trial.ask(MODELS)
    trial.measure("spread", 0.1, "nat", at_most(0.5, "A/A"))


async def at_fault(trial: Trial) -> None:
    answer = await trial.chat("Hello!", max_tokens=4)
    trial.blame("it is rude", answer)
    trial.blame("it is late")


async def beyond(trial: Trial) -> None:
    trial.measure("errors", 3, limit=equal_to(0))


async def not_a_number(trial: Trial) -> None:
    trial.measure("mean", float("nan"), limit=at_most(1))


async def warns(trial: Trial) -> None:
    trial.warn("it is slow")


async def scores(trial: Trial) -> None:
    trial.score("sums", 90, 100)


async def skips(_trial: Trial) -> None:
    raise SkippedError("nothing to see", "look elsewhere")


async def cannot_tell(_trial: Trial) -> None:
    raise InconclusiveError("too noisy")


async def at_fault_and_unsure(trial: Trial) -> None:
    trial.blame("it is rude")
    raise InconclusiveError("too noisy")


async def reads_too_far(trial: Trial) -> None:
    (await trial.chat("Hello!", max_tokens=4)).content(3)


async def unforeseen(_trial: Trial) -> None:
    raise KeyError("choices")


async def asks_wrongly(trial: Trial) -> None:
    await trial.chat("Hello!", max_tokens=-1)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (well, CheckStatus.PASSED, ""),
        (at_fault, CheckStatus.FAILED, "it is rude (and 1 more)"),
        (beyond, CheckStatus.FAILED, "errors is 3, equal to 0"),
        (not_a_number, CheckStatus.FAILED, "mean is nan, at most 1"),
        (warns, CheckStatus.WARNED, "it is slow"),
        (skips, CheckStatus.SKIPPED, "nothing to see"),
        (cannot_tell, CheckStatus.INCONCLUSIVE, "too noisy"),
        (at_fault_and_unsure, CheckStatus.FAILED, "it is rude"),
        (reads_too_far, CheckStatus.INCONCLUSIVE, "choices[3] is missing"),
        (unforeseen, CheckStatus.INCONCLUSIVE, "unexpected KeyError: 'choices'"),
    ],
)
def test_a_check_gets_its_status(body: Body, status: CheckStatus, reason: str) -> None:
    """A fault or a number beyond its limit fails; what hinders the check does not."""
    made = outcome(body)
    assert (made.status, made.reason) == (status, reason)


def test_what_is_skipped_has_its_remedy() -> None:
    """The one that the check knows."""
    assert outcome(skips).remedy == "look elsewhere"


@pytest.mark.parametrize(
    ("recorded", "status", "source"),
    [
        (None, CheckStatus.PASSED, None),
        ({"sums": Score(96, 100)}, CheckStatus.PASSED, "baseline"),
        ({"sums": Score(99, 100)}, CheckStatus.FAILED, "baseline"),
        ({"sums (profile standard)": Score(99, 100)}, CheckStatus.FAILED, "baseline"),
        ({"sums (profile full)": Score(99, 100)}, CheckStatus.PASSED, None),
        ({"products": Score(99, 100)}, CheckStatus.PASSED, None),
    ],
)
def test_a_score_keeps_to_the_baseline(
    recorded: dict[str, Score] | None, status: CheckStatus, source: str | None
) -> None:
    """It may be two standard errors behind; without a baseline it is only reported."""
    baseline = Baseline(recorded) if recorded else None
    (made,) = results(
        OpenAIDouble(), [Check("one", "wire", scores, "x")], options=Options(baseline)
    ).values()
    assert made.status is status
    (number,) = made.numbers
    assert (number.value, number.of) == (90, 100)
    assert (number.limit and number.limit.source) == source


def test_what_a_flag_asks_for_is_not_skipped() -> None:
    """It is inconclusive, with the reason and the remedy that it had, so that no exit is 0."""
    made = outcome(skips, asked_for=lambda _: True)
    assert (made.status, made.reason, made.remedy) == (
        CheckStatus.INCONCLUSIVE,
        "nothing to see",
        "look elsewhere",
    )


def test_what_lacks_an_ability_and_is_asked_for_is_not_skipped() -> None:
    """It is inconclusive, though it was never begun."""
    app = OpenAIDouble("functions are 400")
    made = outcome(well, app, needs=("tools",), asked_for=lambda _: True)
    assert made.status is CheckStatus.INCONCLUSIVE
    assert "tool calls" in made.reason


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (Options(), set()),
        (Options(Baseline()), {f"oracle.{one.name}" for one in comparing.CHECKS}),
        (Options(records=True), {"oracle.record"}),
        (Options(tasks=(Task(1, "Pi?", "3.14"),)), {"skill.own_tasks"}),
        (Options(kill_command=("true",)), {"survive.death"}),
    ],
)
def test_a_flag_asks_for_its_checks(options: Options, names: set[str]) -> None:
    """All others may be skipped."""
    assert {check.full_name for check in ALL if check.asked_for(options)} == names


def test_a_shared_measurement_is_not_among_the_requests_of_a_check() -> None:
    """They would leave no room for those that repeat it."""

    async def measured(trial: Trial) -> None:
        for number in range(20):
            await trial.ask(f"/nowhere/{number}")

    async def asks(trial: Trial) -> None:
        await trial.once(measured)
        await trial.ask(MODELS)

    assert [one.path for one in outcome(asks).requests] == [MODELS]


def test_a_check_that_only_measures_shows_that() -> None:
    """It has no other requests."""

    async def measured(trial: Trial) -> None:
        await trial.ask(MODELS)

    async def asks(trial: Trial) -> None:
        await trial.once(measured)

    assert [one.path for one in outcome(asks).requests] == [MODELS]


def test_a_status_that_was_not_expected_fails() -> None:
    """The reason has what the server said, the fault has the request."""
    made = outcome(asks_wrongly)
    assert made.status is CheckStatus.FAILED
    assert "/v1/chat/completions answered 400" in made.reason
    assert made.faults[0].request == made.requests[0]


def test_a_check_ends_at_its_deadline() -> None:
    """Whatever the server does in that time."""

    async def waits(trial: Trial) -> None:
        await trial.chat("Hello!")

    made = outcome(waits, OpenAIDouble("chats that never come"), deadline_seconds=0.2)
    assert made.status is CheckStatus.FAILED
    assert "it took more than 0 s" in made.reason


def test_a_check_that_its_answers_delay_is_inconclusive() -> None:
    """The server is slow, and has answered each request in time."""

    async def asks(trial: Trial) -> None:
        while True:
            await trial.chat("Hello!")

    made = outcome(asks, deadline_seconds=2.0)
    assert made.status is CheckStatus.INCONCLUSIVE, made.reason
    assert made.reason == "it took more than 2 s, though the server answered"


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.full_name)
def test_no_check_ends_before_a_request_that_hangs_fails_it(check: Check) -> None:
    """Even if the last answer before it took as long as any may."""
    assert deadline_seconds_of(check, Options()) > 2 * PATIENT_SECONDS


def test_a_check_that_another_program_makes_is_inconclusive_at_its_deadline() -> None:
    """Nobody here sees whether that program is answered."""

    async def waits(_trial: Trial) -> None:
        await asyncio.sleep(60.0)

    made = outcome(waits, deadline_seconds=0.2, is_asked_elsewhere=True)
    assert made.status is CheckStatus.INCONCLUSIVE, made.reason
    assert made.reason.endswith("whether the server answered the other program is not known")


def test_these_checks_are_made_by_another_program() -> None:
    """And `skill.lm_eval`, which has a deadline of its own."""
    assert {check.full_name for check in ALL if check.is_asked_elsewhere} == {
        *("wire.provider_check", "tools.probe"),
        *("survive.guidellm", "survive.aiperf"),
    }


def test_a_server_that_answers_no_more_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last answer came too long ago."""
    monkeypatch.setattr(runner, "PATIENT_SECONDS", 0.2)

    async def asks(trial: Trial) -> None:
        await trial.chat("Hello!")
        await asyncio.sleep(60.0)

    made = outcome(asks, deadline_seconds=1.5)
    assert made.status is CheckStatus.FAILED, made.reason


def test_a_fault_keeps_its_request_and_answer() -> None:
    """So that a reader sees it without another run."""
    made = outcome(at_fault)
    assert made.faults[0].request == made.requests[0]
    assert "How" in made.faults[0].answered


LONG = "x" * 5_000_000


async def blames_at_length(trial: Trial) -> None:
    trial.blame(LONG)
    trial.warn(LONG, await trial.chat(LONG, max_tokens=1))


async def skips_at_length(_trial: Trial) -> None:
    raise SkippedError(LONG)


async def cannot_tell_at_length(_trial: Trial) -> None:
    raise InconclusiveError(LONG)


async def reads_at_length(_trial: Trial) -> None:
    raise MalformedError(LONG)


async def gets_no_answer(_trial: Trial) -> None:
    raise NoAnswerError(Request("POST", CHAT, {"messages": [{"content": LONG}]}), LONG)


@pytest.mark.parametrize(
    "body",
    [
        *(blames_at_length, skips_at_length, cannot_tell_at_length),
        *(reads_at_length, gets_no_answer),
    ],
)
def test_what_a_server_says_at_length_is_not_repeated_at_length(body: Body) -> None:
    """Wherever it stands: in a reason, a fault, a warning or a request."""
    made = outcome(body)
    told = [made.reason, *(one.what for one in (*made.faults, *made.warnings))]
    assert all(len(one) < 2100 and "characters left out)" in one for one in told)
    asked = [*made.requests, *(one.request for one in (*made.faults, *made.warnings))]
    assert all(one is None or len(str(one.body)) < 2_001_000 for one in asked)


def test_the_checks_after_the_end_of_a_server_are_skipped() -> None:
    """Each names the check after which it no longer answered."""
    app = OpenAIDouble()

    async def kills(trial: Trial) -> None:
        app.defect = "every chat is 500"
        await trial.chat("Hello!")

    checks = [Check(name, "wire", body, "Something.") for name, body in (("a", kills), ("b", well))]
    made = results(app, checks)
    assert made["wire.a"].status is CheckStatus.FAILED
    assert made["wire.b"].status is CheckStatus.SKIPPED
    assert made["wire.b"].reason == "the server stopped answering after wire.a"


def test_the_end_of_a_server_is_not_the_fault_of_a_check_that_was_not_made() -> None:
    """A flag asked for the check, which was not made."""
    app = OpenAIDouble().without("/v1/completions")

    async def breaks(_trial: Trial) -> None:
        app.defect = "every chat is 500"

    wants = {"needs": ("completions",), "asked_for": lambda _: True}
    checks = [
        Check("a", "wire", breaks, "Something."),
        Check("b", "wire", well, "Something.", **wants),  # type: ignore[arg-type]  # a test's
        Check("c", "wire", well, "Something."),
    ]
    made = results(app, checks)
    assert made["wire.b"].status is CheckStatus.INCONCLUSIVE
    assert made["wire.c"].reason == "the server stopped answering after wire.b"


def test_an_afterthought_may_find_the_server_lost() -> None:
    """It asked nothing, and is not blamed for it."""
    app = OpenAIDouble()

    async def judges(_trial: Trial) -> None:
        app.defect = "every chat is 500"
        raise InconclusiveError("too few samples")

    made = results(
        app,
        [
            Check("a", "wire", judges, "Something.", is_afterthought=True),
            Check("b", "wire", well, "Something."),
        ],
    )
    assert (made["wire.a"].status, made["wire.a"].reason) == (
        CheckStatus.INCONCLUSIVE,
        "too few samples",
    )
    assert made["wire.b"].reason == "the server stopped answering after wire.a"


def test_a_check_that_meets_the_end_of_a_server_has_no_remedy() -> None:
    """What it lacked before is not what is wrong."""
    app = OpenAIDouble()

    async def kills(_trial: Trial) -> None:
        app.defect = "every chat is 500"
        raise SkippedError("nothing to see", "look elsewhere")

    made = outcome(kills, app, asked_for=lambda _: True)
    assert (made.status, made.remedy) == (CheckStatus.FAILED, "")


@pytest.mark.parametrize(("body", "is_shown"), [(at_fault, True), (cannot_tell, False)])
def test_a_result_that_stands_does_not_wait_for_a_lost_server(
    body: Body, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes minutes to tell; only what has no verdict yet depends on it."""
    shown: list[CheckResult] = []
    shown_before: list[int] = []

    async def counted(_target: Target, _server: Server) -> Reach:
        shown_before.append(len(shown))
        return Reach.ANSWERED

    monkeypatch.setattr(Unseen, "ended", lambda _self, result: shown.append(result))
    monkeypatch.setattr(runner, "reach_of", counted)
    made = outcome(body)
    assert shown_before == [is_shown]
    assert shown == [made]


def test_a_server_that_hangs_does_not_delay_an_interruption() -> None:
    """Not even while it is asked whether it still answers, which it may take a minute to do."""
    app = OpenAIDouble()

    async def silences(_trial: Trial) -> None:
        app.defect = "no chat that ever comes"
        raise InconclusiveError("too noisy")

    checks = [
        Check(name, "wire", body, "Something.") for name, body in (("a", silences), ("b", well))
    ]
    made = results(app, checks, interrupted=app.is_hanging)
    assert made["wire.b"].status is CheckStatus.SKIPPED
    assert made["wire.b"].reason == "the run was interrupted"


def test_a_check_is_cancelled_when_it_ends_early() -> None:
    """What it had begun does not run on."""
    ended = []

    async def works(_trial: Trial) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    assert outcome(works, deadline_seconds=0.05).status is CheckStatus.FAILED
    assert ended


def some(*statuses: CheckStatus) -> list[CheckResult]:
    return [CheckResult(f"c{i}", "wire", "Something.", one) for i, one in enumerate(statuses)]


@pytest.mark.parametrize(
    ("statuses", "is_interrupted", "verdict"),
    [
        ((CheckStatus.PASSED, CheckStatus.WARNED, CheckStatus.SKIPPED), False, Verdict.PASSED),
        ((CheckStatus.PASSED, CheckStatus.INCONCLUSIVE), False, Verdict.INCONCLUSIVE),
        ((CheckStatus.FAILED, CheckStatus.INCONCLUSIVE), True, Verdict.FAILED),
        ((CheckStatus.PASSED,), True, Verdict.INCONCLUSIVE),
        ((CheckStatus.SKIPPED,), False, Verdict.INCONCLUSIVE),
    ],
)
def test_the_verdict_is_that_of_the_worst(
    statuses: tuple[CheckStatus, ...], is_interrupted: bool, verdict: Verdict
) -> None:
    """A failure outweighs an interruption; a run in which nothing was made proves nothing."""
    assert judge(some(*statuses), is_interrupted=is_interrupted)[0] is verdict


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ((CheckStatus.PASSED, CheckStatus.SKIPPED), "every check that ran passed"),
        ((CheckStatus.PASSED, CheckStatus.WARNED), "no check failed; warned: wire.c1"),
    ],
)
def test_a_run_that_passes_names_what_it_warned_of(
    statuses: tuple[CheckStatus, ...], said: str
) -> None:
    """A reader of the first line must not take a warning for a pass."""
    assert judge(some(*statuses), is_interrupted=False)[1] == said


def test_a_limit_of_requests_is_waited_for() -> None:
    """A right request gets its answer then, at once and as a stream."""
    app = LimitedDouble()

    async def asks(trial: Trial) -> None:
        app.refused = 2
        await trial.chat("Hello!")
        app.refused = 1
        await trial.stream(CHAT, trial.chat_body("Hello!"))

    assert outcome(asks, app).status is CheckStatus.PASSED
    assert app.refused == 0


def test_a_server_that_was_away_is_warned_of() -> None:
    """Its answers came in the end, so nothing else shows that it keeps going away."""
    app = LimitedDouble(status=503)

    async def asks(trial: Trial) -> None:
        app.refused = 2
        await trial.chat("Hello!")
        app.refused = 1
        await trial.stream(CHAT, trial.chat_body("Hello!"))

    made = outcome(asks, app)
    assert made.status is CheckStatus.WARNED
    assert made.reason.endswith("with 503 and Retry-After: 3")


@pytest.mark.parametrize("refused_later", [0, 3])
def test_a_limit_of_requests_is_not_blamed(refused_later: int) -> None:
    """The run goes on once a request is let in."""
    app = LimitedDouble("0")

    async def asks(trial: Trial) -> None:
        app.refused = EVERY
        try:
            await trial.chat("Hello!", deadline_seconds=0.3)
        finally:
            app.refused = refused_later

    made = results(
        app, [Check("a", "wire", asks, "Something."), Check("b", "wire", well, "Something.")]
    )
    assert made["wire.a"].status is CheckStatus.INCONCLUSIVE
    assert "a key without limits" in made["wire.a"].reason
    assert made["wire.b"].status is CheckStatus.PASSED


def refused_from_now_on(app: LimitedDouble) -> dict[str, CheckResult]:
    """What comes of two checks, `wire.a` and `wire.b`; the first begins the refusals."""

    async def asks(trial: Trial) -> None:
        app.refused = EVERY
        await trial.chat("Hello!", deadline_seconds=0.3)

    checks = [Check(name, "wire", body, "Something.") for name, body in (("a", asks), ("b", well))]
    return results(app, checks)


@pytest.mark.parametrize(("retry_after", "patient_seconds"), [("3600", 30.0), ("0", 2.0)])
def test_a_run_ends_at_a_limit_that_lasts(
    retry_after: str, patient_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is blamed: it may be a quota, or what a gateway says of a server that is dead."""
    monkeypatch.setattr("holdfast.verify.survey.PATIENT_SECONDS", patient_seconds)
    made = refused_from_now_on(LimitedDouble(retry_after))
    assert made["wire.a"].status is CheckStatus.INCONCLUSIVE
    assert made["wire.b"].status is CheckStatus.SKIPPED
    assert "(429), after wire.a; a gateway may say so for a server that" in made["wire.b"].reason
    assert judge(tuple(made.values()), is_interrupted=False)[0] is Verdict.INCONCLUSIVE


def test_a_run_ends_with_a_server_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway answers for it with 503, for hours; no other key would help."""
    monkeypatch.setattr("holdfast.verify.survey.PATIENT_SECONDS", 0.3)
    made = refused_from_now_on(LimitedDouble(status=503))
    assert made["wire.a"].status is CheckStatus.FAILED
    lost = (
        "the server stopped answering; before that, the server refuses requests for now (503 with"
    )
    assert made["wire.a"].reason.startswith(lost)
    assert made["wire.b"].reason == "the server stopped answering after wire.a"


@pytest.mark.parametrize(
    ("status", "said"),
    [(429, "the server limits its requests (429)"), (503, "the server refuses requests for now")],
)
def test_a_check_that_limits_delay_is_inconclusive(status: int, said: str) -> None:
    """It did not fail because the server is slow, which lets requests in again afterwards."""
    app = LimitedDouble(status=status)

    async def asks(trial: Trial) -> None:
        app.refused = EVERY
        try:
            await trial.chat("Hello!")
        finally:
            app.refused = 0

    made = outcome(asks, app, deadline_seconds=0.3)
    assert made.status is CheckStatus.INCONCLUSIVE
    assert made.reason.startswith(f"it took more than 0 s: {said}")
