"""Log-probs of sequences: what a server reports is read strictly, and names its request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.verify.check import Check
from holdfast.verify.checks.self_agreement.judging import malformed_blamed
from holdfast.verify.records import CheckResult, CheckStatus
from holdfast.verify.scoring import decoded, scored, written
from holdfast.verify.trial import Trial
from scoring_double import ScoringDouble
from verified import results

PROMPT = list(range(2, 20))
COUNT = 8
Body = Callable[[Trial], Awaitable[None]]


class Miscounting(ScoringDouble):
    """Generates more tokens than were asked for, or fewer."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self._more = more

    async def _completed(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        asked = body["max_tokens"]
        return await super()._completed({**body, "max_tokens": asked + self._more}, ids)


async def decodes(trial: Trial) -> None:
    await decoded(trial, PROMPT, COUNT)


async def writes(trial: Trial) -> None:
    await written(trial, PROMPT, COUNT)


async def scores(trial: Trial) -> None:
    await scored(trial, PROMPT)


async def follows_a_grammar(trial: Trial) -> None:
    await decoded(trial, PROMPT, COUNT, structured_outputs={"regex": "[0-9]{2}"})


def outcome(body: Body, more: int) -> CheckResult:
    """What comes of one request to a server that miscounts."""
    (made,) = results(Miscounting(more), [Check("one", "self", body, "Something.")]).values()
    return made


@pytest.mark.parametrize(
    ("body", "more", "said"),
    [
        (decodes, 1, "the answer has 9 tokens, and 8 were asked for"),
        (decodes, -1, "the answer has 7 tokens, and 8 were asked for"),
        (writes, 1, "the answer has 9 tokens, and 8 were asked for"),
        (writes, -1, "the answer has 7 tokens, and 8 were asked for"),
        (scores, 1, "the answer has 2 tokens, and 1 were asked for"),
        (follows_a_grammar, 1, "the answer has 9 tokens, and 8 were asked for"),
    ],
)
def test_an_answer_has_as_many_tokens_as_were_asked_for(body: Body, more: int, said: str) -> None:
    """The end of a text does not end it."""
    made = outcome(body, more)
    assert (made.status, made.reason) == (CheckStatus.INCONCLUSIVE, said)


def test_a_grammar_may_end_an_answer() -> None:
    """It may allow nothing more."""
    assert outcome(follows_a_grammar, -1).status is CheckStatus.PASSED


def test_a_fault_of_a_code_path_names_its_request() -> None:
    """A reader repeats it."""

    async def body(trial: Trial) -> None:
        with malformed_blamed(trial):
            await decoded(trial, PROMPT, COUNT)

    (fault,) = outcome(body, 1).faults
    assert fault.request is not None
    assert fault.request.body is not None
    assert fault.request.body["prompt"] == PROMPT
