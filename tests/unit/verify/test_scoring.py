"""Log-probs of sequences: what a server reports is read strictly, and names its request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from double_limits import SLOW_SECONDS
from holdfast.verify.check import Check
from holdfast.verify.checks.self_agreement.judging import malformed_blamed
from holdfast.verify.records import CheckResult, CheckStatus
from holdfast.verify.scoring import decoded, scored, token_ids_of, written
from holdfast.verify.trial import Trial
from scoring_double import ScoringDouble
from verified import hurry, results

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


class Slow(ScoringDouble):
    """Takes its time."""

    async def _completion(self, request: Request) -> Response:
        if "cache_salt" in await request.json():
            await asyncio.sleep(SLOW_SECONDS)
        return await super()._completion(request)


@pytest.mark.parametrize("body", [decodes, writes, scores])
def test_a_slow_prefill_is_waited_for(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest prompt may take minutes, and the check says how long it may take."""
    hurry(monkeypatch)
    (made,) = results(Slow(), [Check("one", "self", body, "Something.")]).values()
    assert made.status is CheckStatus.PASSED, made.reason


class Choosy(ScoringDouble):
    """Refuses each completion that has an option."""

    def __init__(self, refused: str, status: int = 400) -> None:
        super().__init__()
        self.refused = refused
        self._status = status

    async def _completion(self, request: Request) -> Response:
        if (await request.json()).get(self.refused) is not None:
            return JSONResponse({"error": {"message": "what is that?"}}, self._status)
        return await super()._completion(request)


async def cuts(trial: Trial) -> None:
    await token_ids_of(trial, "Hello!")


@pytest.mark.parametrize(
    ("body", "refused", "status"),
    [
        (cuts, "return_token_ids", 400),
        (decodes, "return_token_ids", 422),
        (decodes, "logprobs", 400),
        (scores, "prompt_logprobs", 400),
    ],
)
def test_a_server_that_refuses_options_of_vllm_is_skipped(
    body: Body, refused: str, status: int
) -> None:
    """It is another server, and the remedy says so."""
    check = Check("one", "self", body, "Something.")
    (made,) = results(Choosy(refused, status), [check]).values()
    assert made.status is CheckStatus.SKIPPED
    assert "--max-logprobs 8" in made.remedy


def test_a_server_without_the_log_probs_of_prompts_is_skipped() -> None:
    """Also where it has told those of an answer."""

    async def body(trial: Trial) -> None:
        await decodes(trial)
        await scores(trial)

    (made,) = results(Choosy("prompt_logprobs"), [Check("one", "self", body, "x")]).values()
    assert made.status is CheckStatus.SKIPPED


@pytest.mark.parametrize("width", [8, 1])
def test_a_server_that_begins_to_refuse_is_blamed(width: int) -> None:
    """It has taken the same options, or more, before."""
    app = Choosy("nothing")

    async def body(trial: Trial) -> None:
        await decodes(trial)
        app.refused = "logprobs"
        await decoded(trial, PROMPT, COUNT, width=width)

    (made,) = results(app, [Check("one", "self", body, "Something.")]).values()
    assert made.status is CheckStatus.FAILED
    assert "answered 400" in made.reason
