"""The group `oracle`: what all paths share is found by the check that is meant for it."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from datetime import UTC, date, datetime
from functools import cache
from typing import get_args

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from holdfast.verify.agreement import TopLogProbs
from holdfast.verify.baseline import Baseline, RecordedContext, RecordedSequence, RecordedText
from holdfast.verify.checks import ALL, oracle
from holdfast.verify.checks.oracle import comparing, recording
from holdfast.verify.checks.oracle.dates import without_days
from holdfast.verify.checks.oracle.permutation import mean_shift, p_value
from holdfast.verify.checks.self_agreement import contexts
from holdfast.verify.options import Options
from holdfast.verify.records import CheckResult, CheckStatus, Source
from openai_double import OpenAIDouble
from scoring_double import ScoringDouble
from scoring_faults import Peculiarity, SharedFault
from toy_scorer import LONG_TOKENS
from verified import not_passed, recorded, results

FOUND_BY: dict[SharedFault, str] = {
    "a weight scaled by 1.01": "scores",
    "two rows of the head swapped": "scores",
    "a quantized head": "scores",
    "positions off by one": "scores",
    "a template changed by a space": "prompts",
    "a sampler that strays": "answers",
    "biased first tokens of short prompts": "first_tokens",
}
SCORES = [check for check in comparing.CHECKS if check.name == "scores"]
PROMPTS = [check for check in comparing.CHECKS if check.name == "prompts"]
BEHIND = {"behind long contexts"}
FOLLOWS_FROM = {"scores": {"answers", "first_tokens"}}
"""A model with other scores may well say something else."""


@cache
def baseline_of(peculiarity: Peculiarity = "") -> Baseline:
    """What a server is recorded as."""
    return recorded(ScoringDouble(peculiarity))


def compared(peculiarity: Peculiarity, baseline: Baseline) -> dict[str, CheckResult]:
    """What comes of a server against a baseline."""
    return results(ScoringDouble(peculiarity), comparing.CHECKS, options=Options(baseline))


@pytest.mark.parametrize("trait", ["", "noise of 0.003 nat"])
def test_a_server_meets_its_own_baseline(trait: Peculiarity) -> None:
    """Also one that never gives the same log-prob twice."""
    made = compared(trait, baseline_of(trait))
    assert {name: (one.status, one.reason) for name, one in made.items() if one.reason} == {}


@pytest.mark.parametrize(("share", "source"), [(3, "baseline"), (1 / 3, "A/A"), (0.01, "baseline")])
def test_a_limit_names_the_noise_that_it_comes_from(share: float, source: Source) -> None:
    """The server's own counts where it is greater, and only up to ten times the recorded one."""
    whole = baseline_of("noise of 0.003 nat")
    then = whole.noise
    least = replace(
        then,
        median=share * then.median,
        p999=share * then.p999,
        divergence=share * then.divergence,
    )
    made = compared("noise of 0.003 nat", replace(whole, noise=least))
    judged = [*made["oracle.scores"].numbers, *made["oracle.answers"].numbers]
    limited = {
        one.name: one.limit.source
        for one in judged
        if one.limit and one.unit == "nat" and "long contexts" not in one.name
    }
    assert len(limited) >= 3
    assert limited == dict.fromkeys(limited, source)


def test_every_shared_fault_is_planted() -> None:
    """And no check is without one."""
    assert FOUND_BY.keys() == set(get_args(SharedFault))
    assert set(FOUND_BY.values()) == {check.name for check in comparing.CHECKS}


@pytest.mark.parametrize("fault", FOUND_BY)
def test_a_shared_fault_is_found(fault: SharedFault) -> None:
    """No other check fails, unless it follows."""
    made = not_passed(compared(fault, baseline_of()))
    names = {name.removeprefix("oracle.") for name in made}
    assert set(made.values()) == {CheckStatus.FAILED}
    assert FOUND_BY[fault] in names
    assert names - {FOUND_BY[fault]} <= FOLLOWS_FROM.get(FOUND_BY[fault], set())


def test_a_fault_behind_a_long_context_is_found() -> None:
    """No sequence reaches it, and a server without it meets the baseline."""
    baseline = recorded(ScoringDouble(max_tokens=LONG_TOKENS))
    faults: dict[Peculiarity, set[str]] = {"": set(), "positions off by one after 4,096": BEHIND}
    for fault, found in faults.items():
        app = ScoringDouble(fault, max_tokens=LONG_TOKENS)
        (made,) = results(app, SCORES, "quick", Options(baseline)).values()
        beyond = {number.name.partition(":")[0] for number in made.numbers if not number.is_within}
        assert beyond == found, made.reason


def test_long_contexts_are_recorded_in_any_profile() -> None:
    """Of 8,190 tokens, or as long as the server promises."""
    app, options = ScoringDouble(max_tokens=LONG_TOKENS), Options(records=True)
    (made,) = results(app, recording.CHECKS, "quick", options).values()
    numbers = {number.name: number.value for number in made.numbers}
    assert numbers["longest context"] == LONG_TOKENS - 1


def test_contexts_that_the_server_does_not_promise_are_left_out() -> None:
    """One with a shorter context is not blamed."""
    whole = baseline_of()
    long = RecordedContext(tuple(range(10)) * 100, ((1, -0.5),))
    (made,) = results(
        ScoringDouble(), SCORES, options=Options(replace(whole, contexts=(long,)))
    ).values()
    assert made.status is CheckStatus.PASSED


class Counting(ScoringDouble):
    """Counts how many requests for first tokens are under way together."""

    def __init__(self) -> None:
        super().__init__()
        self.most_at_a_time = 0
        self._at_a_time = 0

    async def _completion(self, request: Request) -> Response:
        is_counted = len((await request.json())["prompt"]) == 4
        self._at_a_time += is_counted
        self.most_at_a_time = max(self.most_at_a_time, self._at_a_time)
        try:
            await asyncio.sleep(0)  # for another to come
            return await super()._completion(request)
        finally:
            self._at_a_time -= is_counted


def test_first_tokens_are_recorded_alone() -> None:
    """The canary of a server is, whose answers are compared with them."""
    app = Counting()
    assert len(recorded(app).first_tokens) == 8
    assert app.most_at_a_time == 1


def test_without_a_prefix_cache_no_long_context_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing shows what its noise may be."""
    monkeypatch.setattr(contexts, "_HITS_SECONDS", 0.2)
    assert baseline_of("a cache that is off").contexts == ()


def test_a_fork_between_near_tokens_is_named() -> None:
    """It has the lead that the baseline's token had there, which noise can turn round."""
    whole = baseline_of()
    first = whole.sequences[0]
    at = len(first.prompt_ids) + 4
    top = dict(first.tops[at - 1])
    best, second = sorted(top, key=lambda token: -top[token])[:2]
    near = ((second, top[best] + 1e-9), *((t, v) for t, v in top.items() if t != second))
    answer_ids = (*first.answer_ids[:4], second, *first.answer_ids[5:])
    tops = (*first.tops[: at - 1], near, *first.tops[at:])
    changed = replace(first, answer_ids=answer_ids, tops=tops)
    only = [check for check in comparing.CHECKS if check.name == "answers"]
    baseline = replace(whole, sequences=(changed, *whole.sequences[1:]))
    (made,) = results(ScoringDouble(), only, options=Options(baseline)).values()
    assert made.status is CheckStatus.PASSED
    assert "answer 0 forks at token 4, where the lead was" in {n.name for n in made.numbers}


def test_a_baseline_of_longer_contexts_cannot_be_compared() -> None:
    """A server with a shorter one is not blamed."""
    long = RecordedSequence(tuple(range(10)) * 100, (1,), ())
    made = compared("", replace(baseline_of(), sequences=(long,)))
    assert not_passed(made) == dict.fromkeys(
        ("oracle.scores", "oracle.answers"), CheckStatus.INCONCLUSIVE
    )


def test_what_was_asked_for_and_cannot_be_recorded_is_not_skipped() -> None:
    """So that no script goes on without its baseline."""
    (made,) = results(OpenAIDouble(), recording.CHECKS, options=Options(records=True)).values()
    assert made.status is CheckStatus.INCONCLUSIVE
    assert "does not report token ids" in made.reason


def test_what_was_asked_for_and_cannot_be_compared_is_not_skipped() -> None:
    """A server without log-probs does not pass as one that meets the baseline."""
    made = results(OpenAIDouble(), comparing.CHECKS, options=Options(baseline_of()))
    assert set(not_passed(made).values()) == {CheckStatus.INCONCLUSIVE}
    assert not_passed(made).keys() == made.keys()


def test_a_fork_to_an_unlikely_token_is_found() -> None:
    """Two others that are about equally likely do not excuse it."""
    whole = baseline_of()
    first = whole.sequences[0]
    at = len(first.prompt_ids) + 4
    top = dict(first.tops[at - 1])
    best, second, third = sorted(top, key=lambda token: -top[token])[:3]
    top |= {second: top[best], third: top[best] + 1e-9}
    top[best] -= 5
    answer_ids = (*first.answer_ids[:4], second, *first.answer_ids[5:])
    tops = (*first.tops[: at - 1], tuple(top.items()), *first.tops[at:])
    changed = replace(first, answer_ids=answer_ids, tops=tops)
    only = [check for check in comparing.CHECKS if check.name == "answers"]
    baseline = replace(whole, sequences=(changed, *whole.sequences[1:]))
    (made,) = results(ScoringDouble(), only, options=Options(baseline)).values()
    assert made.status is CheckStatus.FAILED
    assert "answer 0 forks at token 4" in made.reason


@pytest.mark.parametrize(
    ("fault", "is_beyond"), [("", False), ("biased first tokens of short prompts", True)]
)
def test_how_far_the_means_have_moved_is_told(fault: Peculiarity, is_beyond: bool) -> None:
    """Beside the shift up to which nothing is tested: what p alone does not show."""
    only = [check for check in comparing.CHECKS if check.name == "first_tokens"]
    (made,) = results(ScoringDouble(fault), only, options=Options(baseline_of())).values()
    numbers = {one.name: one.value for one in made.numbers}
    shift, untested = numbers["shift of the means"], numbers["shift up to which p is 1"]
    assert (shift > untested) is is_beyond
    assert (numbers["p of the same log-probs"] < 1) is is_beyond


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (Options(), set()),
        (Options(records=True), {"record"}),
        (Options(Baseline()), {"prompts", "scores", "answers", "first_tokens"}),
    ],
)
def test_the_checks_are_made_with_their_flag(options: Options, names: set[str]) -> None:
    """All other groups need none."""
    asked = [check for check in ALL if oracle.is_asked_for(check, options)]
    assert {check.name for check in asked if check.group == "oracle"} == names
    assert len(asked) == len(ALL) - len(oracle.CHECKS) + len(names)


def rounds(drawn: random.Random, *, shift: float, noise: float) -> list[list[TopLogProbs]]:
    """Twelve rounds of one prompt with five tokens."""
    values = {token: -0.5 * token - shift for token in range(1, 6)}
    return [[{t: v + drawn.gauss(0, noise) for t, v in values.items()}] for _ in range(12)]


@pytest.mark.parametrize(
    ("shift", "noise", "is_same"),
    [
        (0.0, 0.0, True),
        (1e-6, 0.0, True),
        (1e-3, 0.0, False),
        (0.0, 0.01, True),
        (0.05, 0.01, False),
    ],
)
def test_a_shift_beyond_the_noise_is_significant(shift: float, noise: float, is_same: bool) -> None:
    """Of servers that are exact, and of noisy ones."""
    drawn = random.Random(5)
    then, now = rounds(drawn, shift=0, noise=noise), rounds(drawn, shift=shift, noise=noise)
    assert (p_value(then, now, within=1e-5) > 0.001) is is_same
    assert mean_shift(then, now) == pytest.approx(shift, abs=noise + 1e-9)


def test_a_token_that_is_not_told_any_more_is_unlikely() -> None:
    """It counts with the least log-prob that is told."""
    then: list[list[TopLogProbs]] = [[{1: -0.1, 2: -3.0}]] * 12
    now: list[list[TopLogProbs]] = [[{3: -0.1, 2: -3.0}]] * 12
    assert p_value(then, now, within=1e-5) <= 0.001


def test_what_cannot_generate_text_cannot_be_recorded() -> None:
    """The reason says so, and not that a request failed."""
    app = ScoringDouble()
    routes = app.router.routes
    app.router.routes = [one for one in routes if getattr(one, "path", "") != "/v1/completions"]
    (made,) = results(app, recording.CHECKS, options=Options(records=True)).values()
    assert made.status is CheckStatus.INCONCLUSIVE
    assert made.reason == "the server does not answer completions"


RECORDED_ON = date(2024, 2, 3)


def dated(day: date, form: str, greeting: str = "Be kind.") -> str:
    """The prompt of a template that inserts a day."""
    return f"Today is {day.strftime(form)}. {greeting}"


class Dated(ScoringDouble):
    """Has a template that inserts today's day; a token is a character."""

    def __init__(self, form: str, *, greeting: str = "Be kind.", detokenizes: bool = True) -> None:
        super().__init__()
        self._form, self._greeting = form, greeting
        if detokenizes:
            self.router.routes.append(Route("/detokenize", self._detokenize, methods=["POST"]))

    async def _chat(self, request: Request) -> Response:
        told = json.loads(bytes((await super()._chat(request)).body))
        prompt = dated(datetime.now(UTC).date(), self._form, self._greeting)
        return JSONResponse({**told, "prompt_token_ids": [*map(ord, prompt)]})

    async def _detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": "".join(map(chr, (await request.json())["tokens"]))})


def met(app: Dated, form: str) -> CheckStatus:
    """What comes of its prompts, against those that it had on another day."""
    ids = tuple(map(ord, dated(RECORDED_ON, form)))
    texts = (RecordedText("Hello!", is_chat=True, token_ids=ids),)
    baseline = Baseline(recorded_at="2024-02-03T23:11:00+00:00", texts=texts)
    (made,) = results(app, PROMPTS, options=Options(baseline)).values()
    return made.status


@pytest.mark.parametrize("form", ["%d %b %Y", "%d %B %Y", "%Y-%m-%d"])
def test_a_template_with_the_day_of_today_is_warned_of(form: str) -> None:
    """As those of Llama 3.2, SmolLM3 and gpt-oss, whose prompts change each night."""
    assert met(Dated(form), form) is CheckStatus.WARNED


def test_a_day_excuses_no_other_change() -> None:
    """Nor does anything show that there is no other, if the server does not detokenize."""
    assert met(Dated("%Y-%m-%d", greeting="Be brief."), "%Y-%m-%d") is CheckStatus.FAILED
    assert met(Dated("%Y-%m-%d", detokenizes=False), "%Y-%m-%d") is CheckStatus.FAILED


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("on 3 Feb 2024.", "on <day>."),
        ("on Saturday, February 03, 2024", "on <day>"),
        ("on 13 Feb 2024", "on 13 Feb 2024"),
        ("12024-02-03", "12024-02-03"),
    ],
)
def test_only_the_day_itself_is_replaced(text: str, left: str) -> None:
    """In any of its forms, and not as a part of another."""
    assert without_days(text, [RECORDED_ON]) == left
