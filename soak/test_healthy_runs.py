"""A server that is well passes twenty times in a row: no check fails by chance."""

from __future__ import annotations

import pytest

from holdfast.verify.checks import ALL, oracle, self_agreement
from holdfast.verify.options import Options
from holdfast.verify.records import CheckStatus
from openai_double import OpenAIDouble
from scoring_double import ScoringDouble
from scoring_faults import Peculiarity
from verified import not_passed, recorded, results

RUNS = 20
QUICK = [c for c in ALL if "quick" in c.profiles and oracle.is_asked_for(c, Options())]
UNTOLD = {"self", "skill"}
"""Groups with a check that is skipped at a server without log-probs, and in a run without tasks."""


def test_the_profile_of_every_day_passes() -> None:
    """All that it does not skip, at one server."""
    app = OpenAIDouble()
    for number in range(RUNS):
        made = results(app, QUICK, "quick")
        wrong = {
            name: (status, made[name].reason)
            for name, status in not_passed(made).items()
            if status is not CheckStatus.SKIPPED or made[name].group not in UNTOLD
        }
        assert wrong == {}, f"run {number}"


@pytest.mark.parametrize("trait", ["", "noise of 0.003 nat"])
def test_every_code_path_and_the_baseline_agree(trait: Peculiarity) -> None:
    """Also at a server whose noise is another one each time."""
    app = ScoringDouble(trait, "of an operator")
    options = Options(recorded(app))
    for number in range(RUNS):
        made = results(app, [*self_agreement.CHECKS, *oracle.comparing.CHECKS], options=options)
        reasons = {name: made[name].reason for name in not_passed(made)}
        assert reasons == {}, f"run {number}"
