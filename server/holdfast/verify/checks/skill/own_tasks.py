"""Does the model answer the user's own tasks? Neither they nor the answers are in the report."""

from __future__ import annotations

import asyncio
from functools import partial

from holdfast.verify.answers import MalformedError, has_words
from holdfast.verify.baseline import OWN_TASKS
from holdfast.verify.check import Check
from holdfast.verify.target import NoAnswerError
from holdfast.verify.tasks import Task
from holdfast.verify.trial import CHAT, InconclusiveError, SkippedError, Trial
from holdfast.verify.waiting import AT_ONCE, QUEUED_SECONDS, together

_ANSWER_TOKENS = 512
_OK = 200
_REFUSED = range(400, 500)


async def own_tasks(trial: Trial) -> None:
    """The share of the tasks of `--tasks` whose answer has the expected text in it."""
    tasks = trial.options.tasks
    if not tasks:
        raise SkippedError("--tasks was not given", "give your own tasks with --tasks FILE")
    room = asyncio.Semaphore(AT_ONCE)

    async def solved(task: Task) -> bool | None:
        async with room:
            return await _solves(trial, task)

    outcomes = await together(*map(solved, tasks))
    if all(one is None for one in outcomes):
        first, *_ = (*trial.faults, *trial.warnings)
        raise InconclusiveError(f"no task was answered: {first.what}")
    trial.score(OWN_TASKS, sum(map(bool, outcomes)), len(outcomes))


async def _solves(trial: Trial, task: Task) -> bool | None:
    """Return whether the answer has the expected text in it; None if there is no answer.

    It asks without a record of the request, which would put the user's text into the report.
    """
    body = trial.chat_body(task.prompt, max_tokens=_ANSWER_TOKENS)
    ask = partial(trial.target.ask, trial.request(CHAT, body))
    try:
        answer = await trial.admitted(ask, QUEUED_SECONDS)
        if answer.status == _OK:
            return has_words(answer.content(), task.expected)
        # A task may be longer than the context, which is not the server's fault.
        note = trial.warn if answer.status in _REFUSED else trial.blame
        note(f"the task in line {task.line} got {answer.status}")
    except NoAnswerError:
        trial.blame(f"the task in line {task.line} got no answer")
    except MalformedError:
        trial.warn(f"the task in line {task.line} got an answer that cannot be read")
    return None


CHECKS = (
    Check(
        "own_tasks",
        "skill",
        own_tasks,
        "The model solves your own tasks as often as it did when it was recorded.",
        needs=("chat",),
        deadline_seconds=7200.0,
        asked_for=lambda options: bool(options.tasks),
    ),
)
