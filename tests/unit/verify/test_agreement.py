"""The arithmetic of agreement: differences, floors, first choices."""

from __future__ import annotations

import math
import random

import pytest

from holdfast.verify.agreement import (
    DifferenceLimits,
    NoiseFloor,
    TopLogProbs,
    compare,
    divergence,
    first_choice,
    floor_of,
    margin,
    noisier,
    other_choices,
    pooled,
    quantile,
    renormalised,
    rounding_floor,
)
from holdfast.verify.baseline import NOISE_FACTOR

ONE = {1: {7: -0.5, 8: -1.0}, 2: {7: -0.2, 9: -3.0}}
OTHER = {1: {7: -0.5, 8: -1.25}, 2: {7: -0.3, 6: -3.0}, 3: {7: -1.0}}


def test_only_common_positions_and_tokens_are_compared() -> None:
    """In nats, and without a sign."""
    found = compare(ONE, OTHER)
    assert found.by_position == {1: (0.0, 0.25), 2: (pytest.approx(0.1),)}
    assert found.median == pytest.approx(0.1)
    assert found.greatest == 0.25
    assert dict(found.points) == {1: 0.25, 2: pytest.approx(0.1)}


def test_lists_without_a_common_token_differ_by_infinity() -> None:
    """No limit allows that."""
    found = compare({1: {7: -0.5}}, {1: {8: -0.5}})
    assert found.greatest == math.inf
    assert not found.is_within(DifferenceLimits(1e9, 1e9))


def test_nothing_in_common_is_not_agreement() -> None:
    """It is a mistake of the caller."""
    with pytest.raises(ValueError, match="nothing to compare"):
        compare({1: {7: -0.5}}, {2: {7: -0.5}})


def test_a_floor_is_that_of_the_noisiest_group() -> None:
    """A hundred groups that are exact do not hide the one that is not."""
    exact = compare(ONE, ONE)
    floor = floor_of([*[exact] * 100, compare(ONE, OTHER)])
    assert floor.median == pytest.approx(0.1)
    assert floor.p999 == 0.25
    assert floor.samples == 403
    assert floor.divergence == compare(ONE, OTHER).divergence


def test_without_noise_equality_is_asked() -> None:
    """As on a CPU."""
    floor = floor_of([compare(ONE, ONE)])
    assert floor.as_repeated == floor.as_reordered == DifferenceLimits(0.0, 0.0)
    assert compare(ONE, ONE).is_within(floor.as_repeated)
    assert not compare(ONE, OTHER).is_within(floor.as_repeated)


def test_limits_follow_from_the_noise() -> None:
    """The median of the same work is taken as it is; of another order, three times."""
    floor = NoiseFloor(median=0.1, p999=0.5, divergence=0.0, samples=9)
    assert floor.as_repeated == DifferenceLimits(0.1, 1.5)
    assert floor.as_reordered.median == pytest.approx(0.3)
    assert floor.as_reordered.greatest == 1.5


def test_a_median_of_nearly_nothing_is_not_the_limit() -> None:
    """The noise of float32 on an H200, and what an answer behind 17 tokens differed by there."""
    noise = NoiseFloor(median=4.24e-5, p999=3.9e-3, divergence=0.0, samples=16_958)
    limits = noise.as_reordered
    assert limits.median == pytest.approx(1.3e-3)
    assert limits.median > 6.19e-4
    assert limits.greatest > 3.31e-3


def rounded_tops(step: float, leading_step: float, *, count: int = 40) -> list[TopLogProbs]:
    """Log-probs of logits that are multiples of a step, the two greatest of another."""
    draw = random.Random(3)
    tops: list[TopLogProbs] = []
    for _ in range(count):
        leading = [leading_step * draw.randrange(200, 240) for _ in range(2)]
        logits = [*leading, *(step * draw.randrange(100, 200) for _ in range(6))]
        total = math.log(math.fsum(map(math.exp, logits)))
        tops.append({token: value - total for token, value in enumerate(logits)})
    return tops


def test_rounded_logits_have_a_floor_without_any_difference() -> None:
    """An answer of the demo in bfloat16 on an H200 keeps to it; its short prompts had no noise."""
    floor = rounding_floor(rounded_tops(2**-6, 2**-5))
    assert floor.median == 2**-6
    assert floor.p999 == pytest.approx(3.29 * 2**-5)
    measured = floor_of([compare(ONE, ONE)])
    limits = noisier(measured, floor).as_reordered
    assert limits.median > 0.03125
    assert limits.greatest > 0.2188


def test_rounding_may_diverge_as_far_as_it_moves_logits() -> None:
    """A server that rounds to other steps keeps to the limit of what showed no noise."""
    tops, draw = rounded_tops(2**-6, 2**-5), random.Random(5)
    moved = [
        {
            token: value + draw.gauss(0, 2**-5 if token < 2 else 2**-6)
            for token, value in top.items()
        }
        for top in tops
    ]
    whole = [
        {
            token: value - math.log(math.fsum(map(math.exp, top.values())))
            for token, value in top.items()
        }
        for top in moved
    ]
    found = compare(dict(enumerate(tops)), dict(enumerate(whole)))
    floor = rounding_floor(tops)
    assert 0 < found.divergence < NOISE_FACTOR**2 * floor.divergence == 2**-11


def test_logits_that_are_not_rounded_have_no_step() -> None:
    """Those of float32 may be anything; nor do a few numbers make a step."""
    draw = random.Random(3)
    tops = [{token: -draw.random() * 9 for token in range(8)} for _ in range(40)]
    assert rounding_floor(tops) == NoiseFloor(0.0, 0.0, 0.0, 0)
    assert rounding_floor(rounded_tops(2**-6, 2**-5, count=2)).median == 0


def test_comparisons_are_pooled() -> None:
    """Every difference counts once."""
    found = pooled([compare(ONE, OTHER), compare(ONE, ONE)])
    assert sorted(found.differences) == [0, 0, 0, 0, 0, pytest.approx(0.1), 0.25]


def test_what_is_forbidden_leaves_the_others_as_likely_to_each_other() -> None:
    """However much probability it had, and whether or not it is told."""
    whole = {1: {7: math.log(0.5), 8: math.log(0.25), 9: math.log(0.2)}}
    masked = {1: {7: math.log(0.5 / 0.8), 8: math.log(0.25 / 0.8)}}
    found = compare(*renormalised(masked, whole))
    assert found.greatest == pytest.approx(0, abs=1e-12)
    assert len(found.differences) == 2


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.999, 4.0), (1.0, 4.0), (0.0, 1.0)])
def test_a_quantile_is_a_value_that_was_measured(share: float, value: float) -> None:
    """Never one between two."""
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == value


def test_another_first_choice_counts_beyond_the_noise() -> None:
    """Two that are nearer than both may move can change places."""
    limits = DifferenceLimits(0.1, 0.1)
    near, far = {1: {7: -0.5, 8: -0.6}}, {1: {7: -0.5, 8: -0.9}}
    now = {1: {7: -0.7, 8: -0.4}}
    assert other_choices(now, near, limits) == []
    assert other_choices(now, far, limits) == [1]
    assert other_choices(far, far, limits) == []


def test_the_first_choice_of_equals_is_the_same_each_time() -> None:
    """However the server sorts them."""
    assert first_choice({9: -1.0, 3: -1.0}) == first_choice({3: -1.0, 9: -1.0}) == 3
    assert margin({9: -1.0, 3: -1.0}) == 0
    assert margin({3: -1.0}) == math.inf


def test_a_divergence_is_that_of_the_textbook() -> None:
    """The rest counts as one token; a token that is missing, with the least that is told."""
    reference = {1: math.log(0.5), 2: math.log(0.25)}
    other = {1: math.log(0.25), 2: math.log(0.5)}
    assert divergence(reference, reference) == 0
    assert divergence(reference, other) == pytest.approx(0.25 * math.log(2))
    missing = {1: math.log(0.5), 3: math.log(0.1)}
    expected = 0.25 * math.log(2.5) + 0.25 * math.log(0.25 / 0.4)
    assert divergence(reference, missing) == pytest.approx(expected)
