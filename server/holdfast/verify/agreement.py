"""Do two ways to the same log-probs agree, within noise that was measured and not chosen?

Everything here is arithmetic; `scoring` asks the server.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.verify.baseline import NOISE_FACTOR

TopLogProbs = Mapping[int, float]
"""Log-probs at one position, by token id: the likeliest, and the token that stands there."""
Scores = Mapping[int, TopLogProbs]
"""By position in the sequence; position 0 has no log-prob."""

FLOAT32_RESOLUTION = 2.0**-23
"""The resolution of a number of magnitude 1, to which a reported log-prob is rounded."""
_NEARLY_ALL = 0.999
_NORMAL_P999 = 3.29
"""99.9 % of a normal distribution is within this many standard deviations."""
_STEPS = tuple(2.0**-exponent for exponent in range(11))
"""The steps to which logits of bfloat16 or float16 may be rounded: 1 nat to a thousandth."""
_STEP_SHARE = 0.95
"""The share of differences of log-probs that a step has to divide: some may be smaller."""
_STEP_SAMPLES = 20
"""With fewer differences, a step may divide them by chance."""
_TOLD = 128 * FLOAT32_RESOLUTION
"""How far a difference of two log-probs may miss a step, since each is rounded to float32."""


@dataclass(frozen=True, slots=True)
class DifferenceLimits:
    """What differences may be, in nats."""

    median: float
    greatest: float


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """How far a server differs from itself where nothing but noise can differ, in nats."""

    median: float
    p999: float
    """99.9 % of the differences are not greater."""
    divergence: float
    """Mean over the positions (`divergence`)."""
    samples: int

    @property
    def as_repeated(self) -> DifferenceLimits:
        """For the same work done twice: its median, and three times its 99.9th percentile."""
        return DifferenceLimits(self.median, NOISE_FACTOR * self.p999)

    @property
    def as_reordered(self) -> DifferenceLimits:
        """For the same sums in another order: the median is another one in every kernel.

        Where most differences are 0 and few are not, as with TensorFloat32 in only some of the
        products, the median says nothing; of a normal distribution it is a fifth of the percentile.
        """
        median = max(NOISE_FACTOR * self.median, self.p999 / NOISE_FACTOR)
        return DifferenceLimits(median, NOISE_FACTOR * self.p999)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences of two scores at the positions and tokens that both have, in nats."""

    by_position: Mapping[int, tuple[float, ...]]
    divergence: float

    @property
    def differences(self) -> tuple[float, ...]:
        """All of them."""
        return tuple(one for found in self.by_position.values() for one in found)

    @property
    def median(self) -> float:
        """Half of the differences are not greater."""
        return statistics.median(self.differences)

    @property
    def greatest(self) -> float:
        """The greatest difference."""
        return max(self.differences)

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """The greatest difference of each position, for a chart."""
        return tuple((float(at), max(found)) for at, found in sorted(self.by_position.items()))

    def is_within(self, limits: DifferenceLimits) -> bool:
        """Whether the differences keep to the limits."""
        return self.median <= limits.median and self.greatest <= limits.greatest


def compare(one: Scores, other: Scores) -> Comparison:
    """Compare at the positions that both have.

    Two lists without a common token differ by infinity.

    Raises:
        ValueError: there is no common position.
    """
    common = sorted(one.keys() & other.keys())
    if not common:
        raise ValueError("nothing to compare")
    found = {at: differences(one[at], other[at]) for at in common}
    return Comparison(found, statistics.fmean(divergence(one[at], other[at]) for at in common))


def differences(one: TopLogProbs, other: TopLogProbs) -> tuple[float, ...]:
    """The absolute differences at the tokens that both have; one infinity if they have none."""
    common = sorted(one.keys() & other.keys())
    return tuple(abs(one[token] - other[token]) for token in common) or (math.inf,)


def noisier(one: NoiseFloor, other: NoiseFloor) -> NoiseFloor:
    """The worse of both, number by number."""
    return NoiseFloor(
        median=max(one.median, other.median),
        p999=max(one.p999, other.p999),
        divergence=max(one.divergence, other.divergence),
        samples=one.samples + other.samples,
    )


def renormalised(one: Scores, other: Scores) -> tuple[Scores, Scores]:
    """Both at the positions and tokens that both have, as if there were no other tokens.

    What a grammar forbids has no probability, and the others have more of it, all alike.
    """
    mine, its = dict[int, TopLogProbs](), dict[int, TopLogProbs]()
    for at in one.keys() & other.keys():
        common = one[at].keys() & other[at].keys()
        if common:
            mine[at], its[at] = _normalised(one[at], common), _normalised(other[at], common)
    return mine, its


def floor_of(comparisons: Iterable[Comparison]) -> NoiseFloor:
    """The noise of comparisons in which only noise can differ.

    Each is a group with a noise of its own, for example a shape of a matrix product. Every number
    is that of the noisiest group: the quiet ones must not hide it.
    """
    groups = list(comparisons)
    return NoiseFloor(
        median=max(group.median for group in groups),
        p999=max(quantile(sorted(group.differences), _NEARLY_ALL) for group in groups),
        divergence=max(group.divergence for group in groups),
        samples=sum(len(group.differences) for group in groups),
    )


def rounding_floor(tops: Iterable[TopLogProbs]) -> NoiseFloor:
    """The noise of logits that are rounded, as those of bfloat16 are; 0 if they seem not to be.

    Sums in another order may be rounded to another step, and all the differences that a run has
    measured can be 0 for all that. The deviation of a logit, which some roundings on the way to it
    add up to, is taken to be normal and of one step: of the finest for the median, and of the
    steps of the greatest logits for the percentile. The divergence of two distributions is half
    the variance of what their log-probs differ by, where that is little. That is a bound already,
    so it is told without the factor by which limits exceed what was measured.
    """
    ordered = [sorted(top.values(), reverse=True) for top in tops]
    fine = _step_of([values[0] - value for values in ordered for value in values[1:]])
    coarse = _step_of([values[0] - values[1] for values in ordered if len(values) > 1])
    step = max(fine, coarse)
    return NoiseFloor(fine, _NORMAL_P999 * step, step**2 / 2 / NOISE_FACTOR**2, samples=0)


def pooled(comparisons: Sequence[Comparison]) -> Comparison:
    """Several comparisons as one; positions are numbered on."""
    found = [each for one in comparisons for each in one.by_position.values()]
    mean = statistics.fmean(one.divergence for one in comparisons)
    return Comparison(dict(enumerate(found)), mean)


def quantile(ascending: Sequence[float], share: float) -> float:
    """The least value that this share of the values does not exceed."""
    return ascending[max(math.ceil(share * len(ascending)) - 1, 0)]


def first_choice(top: TopLogProbs) -> int:
    """The likeliest token; of equals, the one with the least id."""
    return min(top, key=lambda token: (-top[token], token))


def margin(top: TopLogProbs) -> float:
    """By how much the likeliest token leads; infinity if no other is known."""
    best = sorted(top.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else math.inf


def lead_over(top: TopLogProbs, token: int) -> float:
    """Return by how much the likeliest token leads this one; infinity if it is not in `top`."""
    return max(top.values()) - top.get(token, -math.inf)


def other_choices(one: Scores, reference: Scores, limits: DifferenceLimits) -> list[int]:
    """The positions with another first choice, though its lead exceeds what noise can take."""
    return [
        at
        for at in sorted(one.keys() & reference.keys())
        if first_choice(one[at]) != first_choice(reference[at])
        and margin(reference[at]) > 2 * limits.greatest
    ]


def divergence(reference: TopLogProbs, other: TopLogProbs) -> float:
    """Kullback-Leibler divergence of the likeliest tokens and of the rest as one.

    A token that `other` lacks counts with the least log-prob that it has, as in
    https://arxiv.org/abs/2512.03816.
    """
    least = min(other.values())
    pairs = [(value, other.get(token, least)) for token, value in reference.items()]
    rests = [1 - sum(math.exp(pair[side]) for pair in pairs) for side in (0, 1)]
    total = sum(math.exp(here) * (here - there) for here, there in pairs)
    if min(rests) > 0:
        total += rests[0] * math.log(rests[0] / rests[1])
    return max(total, 0.0)


def _step_of(differences: Sequence[float]) -> float:
    """Return the greatest step that divides nearly all of these; 0 if there is none."""
    told = [one for one in differences if one > _TOLD]  # equals are multiples of anything
    if len(told) < _STEP_SAMPLES:
        return 0.0
    for step in _STEPS:
        misses = [abs(one - step * round(one / step)) for one in told]
        if sum(miss <= _TOLD for miss in misses) >= _STEP_SHARE * len(told):
            return step
    return 0.0


def _normalised(top: TopLogProbs, tokens: Collection[int]) -> TopLogProbs:
    total = math.log(math.fsum(math.exp(top[token]) for token in tokens))
    return {token: top[token] - total for token in tokens}
