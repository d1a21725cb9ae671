"""Does what an engine says agree with what was recorded, and who is told when it does not?"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from holdfast.engine.baseline import (
    BaselineWatch,
    CanaryAnswer,
    baseline_watch,
    top_width,
    worst_position,
)
from holdfast.errors import UsageError
from holdfast.records import BaselineComparison
from holdfast.settings import ProbeSettings
from holdfast.verify.baseline import (
    Baseline,
    FirstToken,
    Noise,
    RecordedSequence,
    write_baseline,
)

TOP = ((7, -0.25), (9, -1.5))
SEQUENCE = RecordedSequence((1, 2), (7,), (TOP, TOP))
FIRST = FirstToken((5, 6), (TOP, ((7, -0.5), (8, -1.0))))


def watch(noise_nats: float = 0.0, *, first: tuple[FirstToken, ...] = (FIRST,)) -> BaselineWatch:
    """One whose clock stands at 12."""
    baseline = Baseline(noise=Noise(p999=noise_nats), sequences=(SEQUENCE,), first_tokens=first)
    return BaselineWatch(baseline, clock=lambda: 12.0)


def test_the_worst_position_is_counted_as_in_the_sequence() -> None:
    """The first token has no log-prob, so the first difference is at position 1."""
    found = [dict(TOP), {7: -0.25, 9: -1.25}]
    assert worst_position((TOP, TOP), found) == (2, 0.25)
    assert worst_position((TOP, TOP), [dict(TOP), dict(TOP)])[1] == 0.0
    assert worst_position((TOP, TOP), [{8: -0.25}, dict(TOP)]) == (1, math.inf)


def test_without_recorded_noise_equality_is_demanded() -> None:
    """The smallest difference of two doubles is one."""
    assert watch().judge("probe", 0.0).agrees
    assert not watch().judge("probe", 5e-324).agrees


def test_three_times_the_recorded_noise_is_noise() -> None:
    """What a sample does not show of its worst case is allowed for."""
    assert watch(0.5).judge("probe", 1.5).agrees
    assert not watch(0.5).judge("probe", 1.75).agrees


def test_the_last_comparison_of_each_check_is_kept() -> None:
    """The one of a canary does not hide that of the probe."""
    compared = watch()
    assert compared.last() == {}
    compared.judge("canary", 0.0)
    compared.judge("probe", 1.0)
    compared.judge("canary", 0.0)
    assert compared.last() == {
        "probe": BaselineComparison(False, 1.0, 12.0),
        "canary": BaselineComparison(True, 0.0, 12.0),
    }


def test_one_canary_that_differs_is_not_forgotten() -> None:
    """A fault may come and go, and the next canary comes sooner than an alert fires."""
    compared = watch()
    assert not compared.judge("canary", 1.0).agrees
    assert compared.judge("canary", 0.0).agrees
    assert compared.last() == {"canary": BaselineComparison(False, 0.0, 12.0)}


def test_the_next_engine_has_had_no_canary() -> None:
    """What the probe of the last one found stays until its own."""
    compared = watch()
    compared.judge("canary", 1.0)
    compared.judge("probe", 0.0)
    compared.forget_canary()
    assert compared.last() == {"probe": BaselineComparison(True, 0.0, 12.0)}


def test_a_canary_is_compared_with_the_nearest_sample() -> None:
    """A recorded server with noise said several things, and each of them is right."""
    compared = watch()
    assert compared.canary_prompt == (5, 6)
    found = compared.judge_canary(CanaryAnswer(7, {7: -0.5, 8: -1.0}))
    assert found == BaselineComparison(True, 0.0, 12.0)
    differing = compared.judge_canary(CanaryAnswer(7, {7: -0.375, 8: -1.0}))
    assert differing == BaselineComparison(False, 0.125, 12.0)


@pytest.mark.parametrize(
    ("noise_nats", "token", "stray"),
    [
        (0.0, 7, None),
        (0.0, 8, 8),
        (0.0625, 8, 8),
        (0.125, 8, None),
        (0.125, 6, 6),
    ],
)
def test_a_token_that_noise_cannot_explain_does_not_agree(
    noise_nats: float, token: int, stray: int | None
) -> None:
    """Even if every log-prob is the recorded one; the token that led there led by 0.5 nat."""
    found = watch(noise_nats).judge_canary(CanaryAnswer(token, {7: -0.5, 8: -1.0}))
    assert found == BaselineComparison(stray is None, 0.0, 12.0, stray)


def test_what_nobody_told_is_not_judged() -> None:
    """Neither an engine that had company, nor a baseline without first tokens."""
    assert watch().judge_canary(CanaryAnswer()) is None
    without = watch(first=())
    assert without.canary_prompt == ()
    said = CanaryAnswer(7, dict(TOP))
    assert without.judge_canary(said) is None
    assert watch(first=(FirstToken((1,), ()),)).judge_canary(said) is None


@pytest.mark.parametrize(
    "sequences", [(), (RecordedSequence((1, 2), (7,), (TOP,)),), (RecordedSequence((1,), (), ()),)]
)
def test_a_baseline_that_proves_nothing_is_refused(
    sequences: tuple[RecordedSequence, ...],
) -> None:
    """It would make every engine agree."""
    with pytest.raises(UsageError, match="--verify-baseline") as caught:
        BaselineWatch(Baseline(sequences=sequences))
    assert "--record" in caught.value.remedy


def test_the_file_is_read_at_the_start(tmp_path: Path) -> None:
    """A missing one is a usage error that names the flag, and so is a probe that is off."""
    path = tmp_path / "baseline.gz"
    assert baseline_watch(ProbeSettings()) is None
    with pytest.raises(UsageError, match=r"--verify-baseline: .*there is no such file"):
        baseline_watch(ProbeSettings(baseline_file=path))
    write_baseline(Baseline(sequences=(SEQUENCE,)), path)
    found = baseline_watch(ProbeSettings(baseline_file=path))
    assert found is not None
    assert found.sequences == (SEQUENCE,)
    with pytest.raises(UsageError, match="--probe off"):
        baseline_watch(ProbeSettings(baseline_file=path, suite="off"))


@pytest.mark.parametrize(("allowed", "width"), [(-1, 8), (0, 0), (5, 5), (20, 8)])
def test_no_more_tokens_are_asked_for_than_the_server_tells(allowed: int, width: int) -> None:
    """vLLM refuses a request for more than --max-logprobs; -1 lifts the limit."""
    assert top_width(allowed) == width
