"""Does the model call a function when one is needed, and only then?"""

from __future__ import annotations

import asyncio

from holdfast.verify.check import Check
from holdfast.verify.checks.tools.asking import ANSWER_TOKENS
from holdfast.verify.checks.tools.calls import whole_turn
from holdfast.verify.checks.tools.scenes import all_functions, triggers
from holdfast.verify.trial import Trial
from holdfast.verify.waiting import together

_AT_ONCE = 4


async def trigger(trial: Trial) -> None:
    """The F1 score of the decision to call: its precision and recall in one number.

    F1 is the share of right calls among right ones and half of the wrong decisions, so its
    standard error is that of a share of this many.
    """
    room = asyncio.Semaphore(_AT_ONCE)

    async def called(said: str) -> set[str]:
        async with room:
            answer = await trial.chat(said, tools=[*all_functions()], max_tokens=ANSWER_TOKENS)
        return {call.name for call in whole_turn(answer).calls}

    wanted = triggers()
    names = await together(*map(called, wanted))
    pairs = list(zip(wanted.values(), names, strict=True))
    right = sum(bool(want) and bool(made) for want, made in pairs)
    wrong = sum(bool(want) != bool(made) for want, made in pairs)
    trial.score("trigger F1", right, right + wrong / 2)
    trial.measure("calls of the right function", sum(made == {want} for want, made in pairs))


CHECKS = (
    Check(
        "trigger",
        "tools",
        trigger,
        "The model calls a function when a question needs one, and only then.",
        profiles=("full",),
        needs=("tools",),
        deadline_seconds=1800.0,
    ),
)
