"""The group `soak`: what comes late in a load of hours is found by its check, alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from grainy_double import GrainyDouble
from holdfast.verify.checks import soak
from holdfast.verify.checks.self_agreement import contexts
from holdfast.verify.checks.soak import latency, memory, mix
from holdfast.verify.options import Options
from holdfast.verify.records import CheckResult, CheckStatus, at_most
from holdfast.verify.report import as_json
from holdfast.verify.soak_plan import SoakPlan
from openai_double import Body, OpenAIDouble
from sample_reports import report
from scoring_faults import Peculiarity
from soaked_double import HOUR_SECONDS, Ageing, SoakedDouble
from unseeded_double import Unseeded
from verified import not_passed, require_report, results

FOUND_BY: dict[Ageing, str] = {
    "one answer is 500": "load",
    "an engine dies": "load",
    "a workspace grows": "workspace",
    "a workspace is refused": "workspace",
    "memory leaks": "memory",
    "answers get slower": "latency",
    "greedy answers change": "canary",
    "weights change": "canary",
    "decodes change": "agreement",
    "the prefix cache rots": "agreement",
}
OF_SCORES: tuple[Ageing, ...] = ("weights change", "decodes change", "the prefix cache rots")
UNTOLD = {"soak.agreement": CheckStatus.SKIPPED}
"""Of a server that tells no log-probs."""


@pytest.fixture(autouse=True)
def few_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """These soaks have fewer than a hundred, all of the same duration."""
    monkeypatch.setattr(latency, "LEAST_ANSWERS", 5)


def soaked(
    app: SoakedDouble,
    clients: int = 1,
    interrupted: asyncio.Event | None = None,
    hours: float = 6.0,
) -> dict[str, CheckResult]:
    """What comes of some hours on the clock of the server."""
    options = Options(soak=SoakPlan(HOUR_SECONDS * hours, clients, clock=app.clock))
    return results(app, soak.CHECKS, "soak", options, interrupted)


def values(made: CheckResult) -> dict[str, float]:
    """The numbers of a check."""
    return {one.name: one.value for one in made.numbers}


def test_a_server_that_stays_as_it_is_passes() -> None:
    """Nothing is blamed, warned of or skipped, and the report keeps to its schema."""
    made = soaked(SoakedDouble(tells_scores=True))
    assert {name: (one.status, one.reason) for name, one in made.items() if one.reason} == {}
    whole = replace(report(*made.values()), profile="soak")
    require_report(json.loads(as_json.rendered(whole)))


def test_every_fault_has_its_check() -> None:
    """And every check a fault."""
    assert FOUND_BY.keys() == set(get_args(Ageing)) - {"every answer is 500"}
    assert set(FOUND_BY.values()) == {check.name for check in soak.CHECKS}


@pytest.mark.parametrize("ageing", FOUND_BY)
def test_a_fault_is_found_by_its_check(ageing: Ageing) -> None:
    """No other one fails."""
    is_of_scores = ageing in OF_SCORES
    made = soaked(SoakedDouble(ageing, tells_scores=is_of_scores))
    found = {f"soak.{FOUND_BY[ageing]}": CheckStatus.FAILED}
    assert not_passed(made) == (found if is_of_scores else {**UNTOLD, **found})


@pytest.mark.parametrize("trait", ["", "a cache that is off"])
def test_the_prefix_cache_is_looked_at_where_there_is_one(
    trait: Peculiarity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each look; without one, the decodes of each look are judged all the same."""
    if trait:
        monkeypatch.setattr(contexts, "_HITS_SECONDS", 0.2)
    app = SoakedDouble(tells_scores=True)
    app.peculiarity = trait
    made = soaked(app)
    assert not_passed(made) == {}
    looks = 2 + len(SoakPlan(HOUR_SECONDS * 6).interval_ends_seconds)
    found = values(made["soak.agreement"])
    assert found["looks at the prefix cache"] == (0 if trait else looks)
    assert "decoded and prefilled: greatest difference" in found


class GrainySoaked(SoakedDouble, GrainyDouble):
    """Is soaked as its like, and has noise behind long prompts, the only ones in its cache."""


def test_long_prompts_in_the_cache_may_have_the_noise_of_long_contexts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The noise of short ones would limit them too strictly."""
    monkeypatch.setattr(contexts, "_HITS_SECONDS", 1.0)
    for module in ("openai_double", "double_model"):
        monkeypatch.setattr(f"{module}.MAX_MODEL_LEN", 1600)
    made = soaked(GrainySoaked(tells_scores=True))
    assert not_passed(made) == {}
    assert values(made["soak.agreement"])["looks at the prefix cache"] > 2


def test_the_load_is_mixed_and_bounded() -> None:
    """Each kind of request is there, and no more of them at a time than there are clients."""
    app = SoakedDouble()
    made = soaked(app, clients=4)["soak.load"]
    assert made.status is CheckStatus.PASSED
    assert all(values(made)[kind] for kind in mix.DECK)
    assert 2 <= app.most_at_a_time <= 4


def test_the_load_follows_from_the_seed() -> None:
    """A second soak asks the same."""
    first, second = (values(soaked(SoakedDouble())["soak.load"]) for _ in range(2))
    assert first == second


def test_a_soak_that_is_interrupted_is_judged_as_far_as_it_came() -> None:
    """Its memory, its workspaces and its answers are in the report."""
    app = SoakedDouble("memory leaks", answer_seconds=150.0)
    made = soaked(app, interrupted=app.has_aged)
    assert made["soak.load"].reason == "the run was interrupted"
    assert 60 < values(made["soak.load"])["minutes"] < 360
    assert made["soak.memory"].status is CheckStatus.FAILED
    others = {"soak.workspace", "soak.latency", "soak.canary"}
    assert not_passed(made).keys().isdisjoint(others)


@pytest.mark.parametrize(
    ("hours", "answer_seconds", "status"),
    [(0.02, 2.0, CheckStatus.INCONCLUSIVE), (1.4, 150.0, CheckStatus.WARNED)],
)
def test_a_short_soak_does_not_pass_for_memory(
    hours: float, answer_seconds: float, status: CheckStatus
) -> None:
    """Steady memory may still leak, and the check says how long it takes to know."""
    made = soaked(SoakedDouble(answer_seconds=answer_seconds), hours=hours)["soak.memory"]
    assert made.status is status
    assert "--hours" in made.reason


def test_a_soak_ends_with_the_server() -> None:
    """It does not ask a server that fails each request for hours, and judges what it has seen."""
    made = soaked(SoakedDouble("every answer is 500", answer_seconds=150.0))
    assert made["soak.load"].status is CheckStatus.FAILED
    (warning,) = made["soak.load"].warnings
    assert "the soak stopped after" in warning.what
    assert values(made["soak.load"])["minutes"] < 360
    assert made["soak.memory"].status is CheckStatus.PASSED


class Unforced(SoakedDouble):
    """Cannot be forced to call a function."""

    async def _body(self, request: Request) -> Body:
        body = await super()._body(request)
        if body.get("tool_choice", "auto") != "auto":
            raise HTTPException(400, "Thinking mode does not support this tool_choice")
        return body


def test_a_server_that_cannot_force_a_call_is_loaded_without() -> None:
    """Its words are a warning, and not an error in each chat with functions."""
    made = soaked(Unforced())
    assert not_passed(made) == {**UNTOLD, "soak.load": CheckStatus.WARNED}
    assert "Thinking mode" in made["soak.load"].reason


class UnseededSoak(Unseeded, SoakedDouble):
    """Refuses seeds, and is not Holdfast."""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_server_that_refuses_seeds_is_loaded_without(path: str) -> None:
    """Its sampled answers are whole all the same, also where only one of both APIs refuses."""
    app = UnseededSoak().only_at(path).without("/statusz")
    assert soaked(app)["soak.load"].status is CheckStatus.PASSED


class Restarted(SoakedDouble):
    """Has lost engines before the soak, and starts again in it."""

    async def _metrics(self, request: Request) -> Response:
        page = bytes((await super()._metrics(request)).body).decode()
        deaths, start = (0, 200) if self.has_aged.is_set() else (3, 100)
        died = f'holdfast_engine_deaths_total{{cause="core_exit"}} {deaths}'
        return PlainTextResponse(f"{page}{died}\nprocess_start_time_seconds {start}\n")


def test_a_restart_of_the_server_is_found() -> None:
    """It is not the death of an engine, and does not hide one: the counts begin again."""
    made = soaked(Restarted())
    assert made["soak.load"].status is CheckStatus.FAILED
    numbers = values(made["soak.load"])
    assert (numbers["restarts of the server"], numbers["engines that died"]) == (1, 0)


class Limiting(SoakedDouble):
    """Refuses some requests of the later hours, and says when to ask again."""

    def __init__(self, refusals: int, retry_after: str, status: int = 429) -> None:
        super().__init__()
        self._refusals = refusals
        self._retry_after = retry_after
        self._status = status

    async def _chat(self, request: Request) -> Response:
        return self._refusal() or await super()._chat(request)

    async def _completion(self, request: Request) -> Response:
        return self._refusal() or await super()._completion(request)

    def _refusal(self) -> Response | None:
        if not self.has_aged.is_set() or not self._refusals:
            return None
        self._refusals -= 1
        return JSONResponse({}, self._status, {"Retry-After": self._retry_after})


def test_a_soak_waits_where_the_server_limits_requests() -> None:
    """A request that is let in later is answered, and is not an error."""
    made = soaked(Limiting(refusals=20, retry_after="0"))
    assert not_passed(made) == UNTOLD


def test_a_soak_counts_how_often_the_server_was_away() -> None:
    """Each request is answered later, and the check warns of how many were refused with 503."""
    made = soaked(Limiting(refusals=7, retry_after="0", status=503))
    assert not_passed(made) == {**UNTOLD, "soak.load": CheckStatus.WARNED}
    assert values(made["soak.load"])["requests refused for now with 503"] == 7


def test_what_is_not_let_in_before_its_deadline_is_an_error() -> None:
    """A soak that the server keeps out has shown nothing of it."""
    made = soaked(Limiting(refusals=1, retry_after="3600"))["soak.load"]
    assert made.status is CheckStatus.FAILED
    assert "429" in made.reason
    assert values(made)["unexpected errors"] == 1


class LateSampled(SoakedDouble):
    """Leaks, and from some hour on has each sample wait for half an hour."""

    def __init__(self) -> None:
        super().__init__("memory leaks")
        self._is_refusing = False

    async def _metrics(self, request: Request) -> Response:
        self._is_refusing = self.has_aged.is_set() and not self._is_refusing
        if not self._is_refusing:
            return await super()._metrics(request)
        self._now_seconds += HOUR_SECONDS / 2
        return JSONResponse({}, 429, {"Retry-After": "0"})


def test_a_sample_has_the_time_of_its_answer() -> None:
    """The server may let the question in long after it came, with what it holds by then."""
    made = soaked(LateSampled())["soak.memory"]
    ((_, first), *others) = points = made.series[0].points
    begun_hours = points[0][0]
    assert len(others) >= 10
    for hours, mib in others:
        assert mib - first == pytest.approx(4 * (hours - begun_hours), abs=0.2)


def test_another_server_is_loaded_all_the_same() -> None:
    """What it does not tell is skipped by name, and the rest is judged."""
    app = SoakedDouble()
    gone = ("/metrics", "/statusz")
    app.router.routes = [one for one in app.router.routes if getattr(one, "path", "") not in gone]
    made = soaked(app)
    skipped = dict.fromkeys(("soak.workspace", "soak.memory"), CheckStatus.SKIPPED)
    assert not_passed(made) == {**UNTOLD, **skipped}
    assert {"engines that died", "restarts of the server"}.isdisjoint(values(made["soak.load"]))


def test_without_a_soak_there_is_nothing_to_judge() -> None:
    """A run that is interrupted before it skips them all."""
    later = [check for check in soak.CHECKS if check.is_afterthought]
    made = results(OpenAIDouble(), later)
    assert {one.status for one in made.values()} == {CheckStatus.SKIPPED}


def held(*mib: float, hours: float = 6.0, generations: Sequence[int] = ()) -> list[memory.Held]:
    """Samples at equal distances."""
    step = hours / (len(mib) - 1)
    known = generations or [1] * len(mib)
    return [memory.Held(step * at, *pair) for at, pair in enumerate(zip(mib, known, strict=True))]


def test_the_slope_is_that_of_the_line_through_the_samples() -> None:
    """By least squares; scatter that is the same all along changes nothing."""
    assert memory.slope_of(held(10, 16, 22, hours=2.0)) == pytest.approx(6)
    assert memory.slope_of(held(10, 11, 10, 11, 10)) == pytest.approx(0)


def test_a_new_engine_has_a_height_of_its_own() -> None:
    """Memory that it gives back hides no leak, and none is seen where it takes more."""
    leak = held(10, 11, 12, 3, 4, 5, hours=5.0, generations=(1, 1, 1, 2, 2, 2))
    assert memory.slope_of(leak) == pytest.approx(1)
    steady = held(3, 3, 3, 10, 10, 10, generations=(1, 1, 1, 2, 2, 2))
    assert memory.slope_of(steady) == pytest.approx(0)


@pytest.mark.parametrize(("hours", "begins"), [(6.0, 1.0), (3.0, 1.0), (0.75, 0.25)])
def test_the_warm_up_is_an_hour_or_a_third(hours: float, begins: float) -> None:
    """Whichever is shorter."""
    warm = memory.after_warm_up(held(*[1.0] * 13, hours=hours))
    assert begins <= warm[0].hours < begins + hours / 12


@pytest.mark.parametrize(("hours", "limit"), [(5.0, 1.0), (1.0, 1.0), (0.9, 64.0)])
def test_less_than_an_hour_finds_only_fast_leaks(hours: float, limit: float) -> None:
    """Allocators take several MiB at once."""
    assert memory.limit_of(hours) == at_most(limit)


def test_an_hour_and_a_half_finds_slow_leaks() -> None:
    """As the page says: samples every 22.5 s and one after the last answers span an hour."""
    at_hours = [22.5 * number / HOUR_SECONDS for number in range(240)]
    told = [memory.Held(hours, 1.0, 1) for hours in (*at_hours, 1.5 + 2 / HOUR_SECONDS)]
    assert memory.limit_of(memory.fitted_hours(told)) == at_most(1.0)


def test_time_without_samples_is_not_watched() -> None:
    """A server that reported nothing for half an hour after the warm-up was watched for less."""
    at_hours = [0.01 * number for number in range(151) if not 50 <= number < 80]
    told = [memory.Held(hours, 1.0, 1) for hours in at_hours]
    assert memory.fitted_hours(told) == pytest.approx(0.7)
    assert memory.limit_of(memory.fitted_hours(told)) == at_most(64.0)


def test_the_limit_of_p99_has_what_a_sample_leaves_open() -> None:
    """The 99th percentile of 1,000 is the 990th, and the server's may be the 996th."""
    ascending = [1.0] * 990 + [2.0] * 10
    assert latency.limit_of(ascending) == at_most(2.4, "A/A")
    assert latency.limit_of([1.0] * 1000) == at_most(1.2)
