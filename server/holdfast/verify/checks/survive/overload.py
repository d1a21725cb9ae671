"""Does an overloaded server refuse requests cleanly?"""

from __future__ import annotations

import time
from collections import Counter

from holdfast.verify.check import FROM_STANDARD, Check
from holdfast.verify.checks.asking import either
from holdfast.verify.checks.survive.asking import require_consent, require_life
from holdfast.verify.records import at_least, equal_to
from holdfast.verify.target import PATIENT_SECONDS, Answer, NoAnswerError
from holdfast.verify.trial import Trial
from holdfast.verify.waiting import TOO_MANY, is_away, is_too_many, together, wait_seconds

_CLIENTS = 256
_ANSWER_TOKENS = 8
_BUSY_SECONDS = 60.0
"""How long a server that told clients of the crowd to come back may tell the next one so."""
_OK, _UNAVAILABLE = 200, 503


async def overload(trial: Trial) -> None:
    """Many clients at once: each is answered or refused, and some are answered."""
    require_consent(trial)

    async def status(number: int) -> int:
        path, body = either(trial, f"Client {number} says:", max_tokens=_ANSWER_TOKENS)
        try:
            answer = await trial.ask(path, body, deadline_seconds=PATIENT_SECONDS)
        except NoAnswerError as error:
            trial.blame(str(error))
            return 0
        is_in_order = answer.status in (_OK, TOO_MANY, _UNAVAILABLE)
        trial.require(is_in_order, f"a client got {answer.status}", answer)
        return answer.status

    statuses = Counter(await together(*map(status, range(_CLIENTS))))
    trial.measure("clients", _CLIENTS)
    trial.measure("answered", statuses[_OK], limit=at_least(1))
    trial.measure("refused with 429 or 503", statuses[TOO_MANY] + statuses[_UNAVAILABLE])
    trial.measure("lost", statuses[0], limit=equal_to(0))
    is_busy = statuses[_UNAVAILABLE] > 0
    ends_seconds = time.monotonic() + _BUSY_SECONDS

    def is_refused(answer: Answer) -> bool:
        if not (is_busy and is_away(answer)):
            return is_too_many(answer)
        return time.monotonic() + wait_seconds(answer) < ends_seconds

    await require_life(trial, is_refused)


CHECKS = (
    Check(
        "overload",
        "survive",
        overload,
        "Of 256 clients at once, each is answered or told to try again, and the server goes on.",
        profiles=FROM_STANDARD,
        deadline_seconds=1800.0,
    ),
)
