"""The reference that every code path is compared with, and the noise within which it must agree.

The noise is measured in the same run. Two kinds of it are known to be nothing else:

repeated     The same request, alone, several times. On a CPU it is 0, and equality is asked.
reordered    The same sums in another order. A prompt cut at another length has the same log-probs
             at the positions that are left, since no token looks ahead; and requests that are all
             the same have the same answers, however many run in one step. Only the shapes of the
             matrix products change, from 1 row to hundreds, and with them the order of additions.
             Where logits are rounded, as in bfloat16, it is never less than a step of them.

Neither is taken from the path that is judged: a fault of it would raise its own limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.verify.agreement import (
    Comparison,
    DifferenceLimits,
    NoiseFloor,
    Scores,
    compare,
    floor_of,
    noisier,
    other_choices,
    pooled,
    rounding_floor,
)
from holdfast.verify.answers import MalformedError
from holdfast.verify.checks.self_agreement.sequences import (
    ANSWER_TOKENS,
    MOST_SCORED_TOKENS,
    sequences,
)
from holdfast.verify.records import Source, at_most, equal_to
from holdfast.verify.scoring import Decoded, decoded, next_top, scored
from holdfast.verify.trial import InconclusiveError, Trial, UnexpectedStatusError
from holdfast.verify.waiting import together

BASE_TOKENS = 96
"""The length of the prompt that most paths share."""
_REPEATS = 4
_CUTS = (1, 2, 3, 5, 8, 16, 33, 64)
"""Rows of the matrix products of a prefill."""
_CUT_PROMPTS = 10
_TWINS = (2, 3, 5)
"""Rows of those of a decode."""
_LOOKS = (0, 7, 8, 15, 23)
"""Which tokens of an answer behind a long prompt are looked at."""
MAX_NOISE = 0.5
"""A server that differs more from itself, in nats, hides every fault there is."""
_MAX_ROUNDING = 1.0
"""The most that rounding alone may be: logits of sound servers in bfloat16 may exceed 32: 0.82."""


@dataclass(frozen=True, slots=True)
class NoiseFloors:
    """How far the server differs from itself."""

    repeated: NoiseFloor
    measured: NoiseFloor
    """The noise of the repeated and of the reordered requests."""
    rounding: NoiseFloor
    """What the rounding of logits may add, whether or not these requests show it."""

    @property
    def reordered(self) -> NoiseFloor:
        """The noise within which a path must agree that adds in another order."""
        return noisier(self.measured, self.rounding)


async def noise(trial: Trial) -> NoiseFloors:
    """Both kinds, measured once.

    Raises:
        InconclusiveError: there is too much, or it cannot be measured.
    """
    found = await trial.once(_measured_noise)
    if found.measured.p999 > MAX_NOISE:
        raise InconclusiveError(
            f"too noisy: the server differs from itself by {found.measured.p999:.2g} nat"
        )
    if found.rounding.p999 > _MAX_ROUNDING:
        raise InconclusiveError(
            f"too noisy: the rounding of logits moves log-probs by {found.rounding.p999:.2g} nat"
        )
    return found


async def reference(trial: Trial, ids: Sequence[int]) -> Scores:
    """One prefill, alone and cold.

    Raises:
        InconclusiveError: it has no log-probs that can be compared.
    """
    try:
        return await scored(trial, ids)
    except (MalformedError, UnexpectedStatusError) as error:
        raise InconclusiveError(f"one prefill alone cannot be scored: {error}") from None


@contextmanager
def malformed_blamed(trial: Trial) -> Iterator[None]:
    """A log-prob that is not a number is a fault here: this path is the one that is judged."""
    try:
        yield
    except MalformedError as error:
        trial.blame(str(error), request=error.request)
        raise


def judge(
    trial: Trial,
    name: str,
    pairs: Sequence[tuple[Scores, Scores]],
    limits: DifferenceLimits,
    sources: tuple[Source, Source] = ("A/A", "A/A"),
) -> None:
    """Compare what a path says with its reference, and note the numbers with their limits.

    `sources` are those of the median's limit and of the greatest difference's.
    """
    found = pooled([compare(*pair) for pair in pairs])
    median = at_most(limits.median, sources[0])
    greatest = at_most(limits.greatest, sources[1])
    trial.measure(f"{name}: median difference", found.median, "nat", median)
    trial.measure(f"{name}: greatest difference", found.greatest, "nat", greatest)
    others = sum(len(other_choices(*pair, limits)) for pair in pairs)
    trial.measure(f"{name}: first choices that differ", others, limit=equal_to(0))
    trial.draw(name, "position", "greatest difference [nat]", found.points, greatest)


async def judge_answer(
    trial: Trial, name: str, prompt: Sequence[int], made: Decoded, limits: DifferenceLimits
) -> None:
    """Compare an answer with one prefill of the prompt and that answer: no fork can matter."""
    whole = await prefilled(trial, prompt, made.token_ids)
    judge(trial, name, [(made.scores, whole)], limits)


async def prefilled(trial: Trial, prompt: Sequence[int], answer: Sequence[int]) -> Scores:
    """The log-probs of an answer from prefills alone; behind a long prompt, of some tokens.

    Raises:
        InconclusiveError: it has no log-probs that can be compared.
    """
    whole = [*prompt, *answer]
    if len(whole) <= MOST_SCORED_TOKENS:
        return await reference(trial, whole)
    ends = [len(prompt) + look for look in _LOOKS]
    return {end: await next_top(trial, whole[:end]) for end in ends}


async def need_decode(trial: Trial) -> None:
    """Raise if a plain decode disagrees, so that only its own check reports that.

    Raises:
        InconclusiveError: it does not agree.
    """
    limits = (await noise(trial)).reordered.as_reordered
    plain = await trial.once(_plain_decode)
    if not plain.is_within(limits):
        raise InconclusiveError("a plain decode does not agree with prefill; see self.decode")


async def base_prompt(trial: Trial) -> list[int]:
    """The prompt that most paths share."""
    return (await trial.once(sequences)).prompt(BASE_TOKENS)


async def _plain_decode(trial: Trial) -> Comparison:
    prompt = await base_prompt(trial)
    try:
        made = await decoded(trial, prompt, ANSWER_TOKENS)
    except (MalformedError, UnexpectedStatusError) as error:
        raise InconclusiveError(f"a plain decode cannot be scored: {error}") from None
    return compare(made.scores, await reference(trial, [*prompt, *made.token_ids]))


async def _measured_noise(trial: Trial) -> NoiseFloors:
    prompt = await base_prompt(trial)
    first = await reference(trial, prompt)
    prefills = [compare(await reference(trial, prompt), first) for _ in range(_REPEATS)]
    repeated = [*prefills, *await _repeated_decodes(trial)]
    reordered = [*await _cut_prefills(trial), *await _twin_decodes(trial)]
    measured = floor_of([*repeated, *reordered])
    return NoiseFloors(floor_of(repeated), measured, rounding_floor(first.values()))


async def _repeated_decodes(trial: Trial) -> list[Comparison]:
    first = await _alone(trial)
    again = [await _alone(trial) for _ in range(_REPEATS)]
    return [_shared(one, first) for one in again]


async def _cut_prefills(trial: Trial) -> list[Comparison]:
    """One group for each length, over several prompts."""
    made = await trial.once(sequences)
    # Without the start that all texts have, which would be all that there is of the shortest.
    prompts = [made.prompt(200, number)[-max(_CUTS) - 1 :] for number in range(_CUT_PROMPTS)]
    wholes = [await reference(trial, prompt) for prompt in prompts]
    groups = []
    for cut in _CUTS:
        parts = [await reference(trial, prompt[:cut]) for prompt in prompts]
        groups.append(pooled([compare(*pair) for pair in zip(parts, wholes, strict=True)]))
    return groups


async def _twin_decodes(trial: Trial) -> list[Comparison]:
    """One group for each number of requests at a time, which are all the same."""
    alone = await _alone(trial)
    groups = []
    for count in _TWINS:
        twins = await together(*(_alone(trial) for _ in range(count)))
        groups.append(pooled([_shared(one, alone) for one in twins]))
    return groups


async def _alone(trial: Trial) -> Decoded:
    try:
        return await decoded(trial, await base_prompt(trial), ANSWER_TOKENS)
    except (MalformedError, UnexpectedStatusError) as error:
        raise InconclusiveError(f"a plain decode cannot be scored: {error}") from None


def _shared(one: Decoded, other: Decoded) -> Comparison:
    """Compare as far as both said the same: behind a fork they have another context."""
    pairs = zip(one.token_ids, other.token_ids, strict=True)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(one.token_ids))
    first = min(one.scores)
    kept = {at: top for at, top in one.scores.items() if at <= first + same}
    return compare(kept, other.scores)
