"""A fault that is planted is found by the check that is meant for it, whatever else runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

import pytest

from double_defects import Defect
from holdfast.verify import packages
from holdfast.verify.baseline import Baseline
from holdfast.verify.checks import ALL, oracle
from holdfast.verify.checks.wire import leaving
from holdfast.verify.options import Options
from holdfast.verify.records import CheckResult, CheckStatus
from scoring_faults import Peculiarity
from toy_scorer import LONG_TOKENS, MAX_TOKENS
from verified import SCHEMAS, not_passed, recorded, results
from whole_double import WholeDouble

pytestmark = pytest.mark.skipif(
    not all(map(packages.has_module, packages.DISTRIBUTIONS)),
    reason=f"packages that checks need are not installed: {packages.REMEDY}",
)


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """What is wrong with a server, and every check that does not pass for it."""

    found_by: str
    """The check that is meant for it."""
    follow: frozenset[str] = frozenset()
    """Checks that see the same in another way."""
    warned: frozenset[str] = frozenset()
    """Checks that take it for what the model may as well have done."""
    unjudged: frozenset[str] = frozenset()
    """Checks that cannot judge, since what they build on is broken."""
    defect: Defect | Literal[""] = ""
    peculiarity: Peculiarity = ""
    max_tokens: int = MAX_TOKENS


PLANTED = {
    "a weight scaled by 1.01": PlantedFault(
        "oracle.scores",
        frozenset({"oracle.answers", "oracle.first_tokens"}),
        peculiarity="a weight scaled by 1.01",
    ),
    "two rows swapped": PlantedFault("oracle.scores", peculiarity="two rows of the head swapped"),
    "two rows of a batch swapped": PlantedFault(
        "self.full_batch", peculiarity="two rows of a batch swapped"
    ),
    "the last block of a chunk dropped": PlantedFault(
        "self.chunked",
        frozenset({"oracle.answers", "oracle.scores"}),
        peculiarity="the last block of a chunk dropped",
    ),
    "positions off by one after 4,096": PlantedFault(
        "oracle.scores", peculiarity="positions off by one after 4,096", max_tokens=LONG_TOKENS
    ),
    "lm_head quantized": PlantedFault(
        "oracle.scores",
        frozenset({"oracle.answers", "oracle.first_tokens"}),
        peculiarity="a quantized head",
    ),
    "one NaN row": PlantedFault(
        "self.prefill",
        # The reference of each is one prefill, which has no log-prob in that row.
        unjudged=frozenset(
            {
                "self.widths",
                "self.decode",
                "self.prefix",
                "self.chunked",
                "self.full_batch",
                "self.penalties",
                "self.grammar",
                "oracle.scores",
                "oracle.answers",
                "oracle.first_tokens",
            }
        ),
        peculiarity="a NaN row",
    ),
    "a template changed by a space": PlantedFault(
        "oracle.prompts", peculiarity="a template changed by a space"
    ),
    "a parser that drops the second call": PlantedFault(
        "tools.parser",
        # The probe cannot tell a call that the server dropped from one that no model wrote.
        warned=frozenset({"tools.probe"}),
        defect="the second call dropped",
    ),
    "usage off by one": PlantedFault("wire.usage", defect="completion_tokens off by one"),
    "an SSE chunk split wrong": PlantedFault(
        "wire.events",
        frozenset({"tools.form", "tools.probe", "wire.provider_check"}),
        # Each reads a stream to judge something else in it.
        unjudged=frozenset(
            {
                "wire.choices",
                "wire.usage",
                "wire.prompt_tokens",
                "wire.length",
                "wire.stop",
                "wire.unasked_usage",
                "wire.incremental",
                "wire.stream_twin",
                "wire.own_answers",
                "wire.openai_types",
                "tools.stream_twin",
                "tools.markup",
            }
        ),
        defect="an event split wrong",
    ),
    "a stream that differs from its twin": PlantedFault(
        "wire.stream_twin",
        frozenset({"tools.stream_twin"}),
        # A stream with a stop text is compared with one without, which differs already.
        unjudged=frozenset({"wire.stop"}),
        defect="a stream that drops a token",
    ),
}
NOT_ASKED_FOR = dict.fromkeys(("skill.own_tasks", "skill.lm_eval"), CheckStatus.SKIPPED)


@pytest.fixture(autouse=True)
def _few_timed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fault is in how long an answer takes that clients leave."""
    monkeypatch.setattr(leaving, "_TIMED_TOKENS", (16, 32))


@cache
def baseline_of(max_tokens: int) -> Baseline:
    """What a server that is well is recorded as."""
    return recorded(WholeDouble(max_tokens=max_tokens))


@cache
def made_for(fault: PlantedFault) -> dict[str, CheckResult]:
    """What comes of all checks of `quick`, those that compare with a baseline included."""
    options = Options(baseline_of(fault.max_tokens))
    checks = [one for one in ALL if "quick" in one.profiles and oracle.is_asked_for(one, options)]
    app = WholeDouble(fault.defect, fault.peculiarity, fault.max_tokens)
    return results(app, checks, "quick", options)


def exempt_in_the_guide() -> set[str]:
    """The checks whose reports have no request to repeat, as the guide says."""
    text = (SCHEMAS.parent / "verifying.md").read_text()
    begin = text.index("These checks have no request")
    return set(re.findall(r"`([a-z]+\.[a-z_]+)`", text[begin : text.index("\n\n", begin)]))


@pytest.mark.parametrize("max_tokens", [MAX_TOKENS, LONG_TOKENS])
def test_a_server_that_is_well_passes_every_check(max_tokens: int) -> None:
    """Only what no flag asks for is skipped."""
    assert not_passed(made_for(PlantedFault("", max_tokens=max_tokens))) == NOT_ASKED_FOR


def test_every_check_can_be_repeated() -> None:
    """By a request in the report; the guide names those that have none."""
    made = made_for(PlantedFault("", max_tokens=MAX_TOKENS))
    without = {name for name, one in made.items() if not one.requests}
    assert without - NOT_ASKED_FOR.keys() == {"survive.unharmed", "tools.probe"}
    assert without <= exempt_in_the_guide()
    assert exempt_in_the_guide() <= {one.full_name for one in ALL}


@pytest.mark.parametrize("fault", PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found_by_its_check_and_by_no_accident(fault: PlantedFault) -> None:
    """Every check of the profile runs, and those that do not pass are the ones that are named."""
    named = {
        CheckStatus.FAILED: {fault.found_by} | fault.follow,
        CheckStatus.WARNED: fault.warned,
        CheckStatus.INCONCLUSIVE: fault.unjudged,
    }
    expected = {name: status for status, names in named.items() for name in names}
    assert not_passed(made_for(fault)) == expected | NOT_ASKED_FOR
