"""Compares a server with a baseline: prompts, scores, answers and first tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.verify.agreement import (
    NoiseFloor,
    Scores,
    compare,
    lead_over,
    noisier,
    pooled,
    quantile,
)
from holdfast.verify.baseline import NOISE_FACTOR, Baseline, RecordedSequence
from holdfast.verify.check import Check
from holdfast.verify.checks.oracle.dates import differ_in_days
from holdfast.verify.checks.oracle.permutation import mean_shift, p_value
from holdfast.verify.checks.oracle.recording import prompt_of, rounds_of
from holdfast.verify.checks.self_agreement.judging import judge, malformed_blamed, noise
from holdfast.verify.checks.self_agreement.sequences import longest_tokens
from holdfast.verify.options import Options
from holdfast.verify.records import Source, at_least, at_most, equal_to
from holdfast.verify.scoring import decoded, next_top, scored
from holdfast.verify.trial import InconclusiveError, SkippedError, Trial

_MIN_P = 0.001
_MAX_GROWTH = 10
_SHOWN_CHARACTERS = 40
_MOST_CONTEXT_TOKENS = 8192
"""The longest prompt that is asked again outside `full`, which also records longer ones."""


@dataclass(frozen=True, slots=True)
class FloorOfTwo:
    """The noise of the noisier of two servers, and what the baseline alone says that it may be."""

    floor: NoiseFloor
    least: NoiseFloor
    most: NoiseFloor

    def source_of(self, limit: Callable[[NoiseFloor], float]) -> Source:
        """Where a limit comes from: the server's own noise has no part in the least or the most."""
        is_own = limit(self.least) < limit(self.floor) < limit(self.most)
        return "A/A" if is_own else "baseline"

    def or_noisier(self, other: NoiseFloor) -> FloorOfTwo:
        """The same where there is also another recorded noise."""
        return FloorOfTwo(*(noisier(one, other) for one in (self.floor, self.least, self.most)))


async def prompts(trial: Trial) -> None:
    """Every text of the baseline still becomes the same token ids: tokenizer and template."""
    texts, recorded_at = _baseline(trial).texts, _baseline(trial).recorded_at
    if not texts:
        raise SkippedError("the baseline has no texts")
    for one in texts:
        ids = await prompt_of(trial, one.text, is_chat=one.is_chat)
        name = f"{'chat' if one.is_chat else 'text'} {one.text[:_SHOWN_CHARACTERS]!r}"
        if ids is None:
            trial.blame(f"the {name} has no token ids any more")
        elif tuple(ids) != one.token_ids:
            is_day = one.is_chat and await differ_in_days(trial, one.token_ids, ids, recorded_at)
            if is_day:
                trial.warn(f"the {name} becomes a prompt that differs only in its date")
            else:
                trial.blame(f"the {name} is tokenized differently now")
    trial.measure("prompts that differ", len(trial.faults), limit=equal_to(0))
    trial.measure("prompts", len(texts))


async def scores(trial: Trial) -> None:
    """Score the sequences of the baseline again, token by token on the same context."""
    within = await _floor(trial)
    pairs = []
    for one in _sequences(trial):
        with malformed_blamed(trial):
            now = await scored(trial, [*one.prompt_ids, *one.answer_ids])
        pairs.append((now, _scores(one)))
    _judge(trial, "teacher-forced", pairs, within)
    found = pooled([compare(then, now) for now, then in pairs])
    # Where differences are small, the divergence grows with their square.
    source = within.source_of(lambda noise: noise.divergence)
    divergence = at_most(NOISE_FACTOR**2 * within.floor.divergence, source)
    trial.measure("teacher-forced: mean divergence", found.divergence, "nat", divergence)
    percentile = quantile(sorted(found.differences), 0.99)
    trial.measure("teacher-forced: 99 % of the differences", percentile, "nat")
    trial.measure("positions", len(found.by_position))
    await _compare_contexts(trial, within)


async def answers(trial: Trial) -> None:
    """Generate the answers of the baseline again; a fork is right only where two tokens are near.

    Each fork is named, with the lead that the baseline's first choice has over the token that came.
    """
    within = await _floor(trial)
    most = at_most(2 * within.floor.as_reordered.greatest, within.source_of(_greatest))
    forks = 0
    for number, one in enumerate(_sequences(trial)):
        with malformed_blamed(trial):
            made = await decoded(trial, one.prompt_ids, len(one.answer_ids))
        pairs = zip(made.token_ids, one.answer_ids, strict=True)
        fork = next((at for at, (now, then) in enumerate(pairs) if now != then), None)
        if fork is not None:
            forks += 1
            top = dict(one.tops[len(one.prompt_ids) + fork - 1])
            lead = lead_over(top, made.token_ids[fork])
            name = f"answer {number} forks at token {fork}, where the lead was"
            trial.measure(name, lead, "nat", most)
    trial.measure("forks", forks)


async def first_tokens(trial: Trial) -> None:
    """Ask for first tokens many times: a small change of all weights shows in their means."""
    recorded = _baseline(trial).first_tokens
    if not recorded:
        raise SkippedError("the baseline has no first tokens")
    limits = (await _floor(trial)).floor.as_reordered
    with malformed_blamed(trial):
        now = await rounds_of(trial, [one.prompt_ids for one in recorded])
    rounds = min(len(one.samples) for one in recorded)
    then = [[dict(one.samples[number]) for one in recorded] for number in range(rounds)]
    found = p_value(then, now, within=limits.median)
    trial.measure("p of the same log-probs", found, "", at_least(_MIN_P))
    trial.measure("shift of the means", mean_shift(then, now), "nat")
    trial.measure("shift up to which p is 1", limits.median, "nat")
    trial.measure("first tokens", len(recorded))


async def _compare_contexts(trial: Trial, within: FloorOfTwo) -> None:
    """Compare what follows long prompts, which no sequence reaches."""
    baseline, most = _baseline(trial), longest_tokens(trial)
    if trial.profile != "full":
        most = min(most, _MOST_CONTEXT_TOKENS)
    found = [one for one in baseline.contexts if len(one.prompt_ids) < most]
    trial.measure(
        "longest context", max((len(one.prompt_ids) for one in found), default=0), "tokens"
    )
    if not found:
        return
    with malformed_blamed(trial):
        now = {len(one.prompt_ids): await next_top(trial, one.prompt_ids) for one in found}
    then = {len(one.prompt_ids): dict(one.top) for one in found}
    recorded = baseline.contexts_noise
    long = NoiseFloor(recorded.median, recorded.p999, recorded.divergence, len(found))
    _judge(trial, "behind long contexts", [(now, then)], within.or_noisier(long))


def _judge(
    trial: Trial, name: str, pairs: Sequence[tuple[Scores, Scores]], within: FloorOfTwo
) -> None:
    sources = within.source_of(_median), within.source_of(_greatest)
    judge(trial, name, pairs, within.floor.as_reordered, sources)


def _median(noise: NoiseFloor) -> float:
    return noise.as_reordered.median


def _greatest(noise: NoiseFloor) -> float:
    return noise.as_reordered.greatest


def _baseline(trial: Trial) -> Baseline:
    if trial.baseline is None:
        raise SkippedError(
            "--against was not given", "record a baseline with --record, and give it to --against"
        )
    return trial.baseline


def _sequences(trial: Trial) -> list[RecordedSequence]:
    """The sequences that fit into the server's context."""
    recorded, most = _baseline(trial).sequences, longest_tokens(trial)
    found = [one for one in recorded if len(one.prompt_ids) + len(one.answer_ids) < most]
    if not found:
        raise InconclusiveError("no sequence of the baseline fits into the server's context")
    return found


def _scores(one: RecordedSequence) -> Scores:
    return {at: dict(top) for at, top in enumerate(one.tops, start=1)}


async def _floor(trial: Trial) -> FloorOfTwo:
    """The noise of the noisier of both servers.

    What is wrong with a server may make it noisy, too. So its own noise counts only up to ten times
    what was recorded.
    """
    then, now = _baseline(trial).noise, (await noise(trial)).reordered
    least = NoiseFloor(then.median, then.p999, then.divergence, now.samples)
    most = NoiseFloor(
        _MAX_GROWTH * then.median,
        _MAX_GROWTH * then.p999,
        _MAX_GROWTH * then.divergence,
        now.samples,
    )
    floor = NoiseFloor(
        median=max(least.median, min(now.median, most.median)),
        p999=max(least.p999, min(now.p999, most.p999)),
        divergence=max(least.divergence, min(now.divergence, most.divergence)),
        samples=now.samples,
    )
    return FloorOfTwo(floor, least, most)


def _is_asked_for(options: Options) -> bool:
    return options.baseline is not None


CHECKS = (
    Check(
        "prompts",
        "oracle",
        prompts,
        "Texts and chats become the same tokens as when the baseline was recorded.",
        needs=("completions",),
        asked_for=_is_asked_for,
    ),
    Check(
        "scores",
        "oracle",
        scores,
        "Token by token, log-probs are those of the baseline.",
        needs=("completions",),
        asked_for=_is_asked_for,
        deadline_seconds=3600.0,
    ),
    Check(
        "answers",
        "oracle",
        answers,
        "Greedy answers equal the baseline's, except where two tokens were about equally likely.",
        needs=("completions",),
        asked_for=_is_asked_for,
        deadline_seconds=3600.0,
    ),
    Check(
        "first_tokens",
        "oracle",
        first_tokens,
        "The log-probs of first tokens, asked many times, have not moved since the baseline.",
        needs=("completions",),
        asked_for=_is_asked_for,
        deadline_seconds=3600.0,
    ),
)
