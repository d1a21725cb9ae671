"""Is one prefill what it should be, and how far does the server differ from itself?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.verify.agreement import DifferenceLimits, Scores, lead_over
from holdfast.verify.baseline import WIDTH
from holdfast.verify.check import Check
from holdfast.verify.checks.self_agreement.judging import (
    BASE_TOKENS,
    MAX_NOISE,
    base_prompt,
    judge,
    malformed_blamed,
    noise,
    reference,
)
from holdfast.verify.checks.self_agreement.sequences import (
    ANSWER_TOKENS,
    MOST_SCORED_TOKENS,
    sequences,
)
from holdfast.verify.scoring import Decoded, decoded, scored, written
from holdfast.verify.trial import Trial, UnexpectedStatusError

_WIDTHS = (1, 3, 20)
_ROUNDING = 1e-4


async def prefill(trial: Trial) -> None:
    """Score prompts twice, look at each log-prob, and measure the noise."""
    made = await trial.once(sequences)
    lengths = (BASE_TOKENS, MOST_SCORED_TOKENS, min(MOST_SCORED_TOKENS, made.longest_tokens - 1))
    for number, length in enumerate({min(one, made.longest_tokens - 1) for one in lengths}):
        with malformed_blamed(trial):
            ids = made.prompt(length, number)
            found = await scored(trial, ids)
        _require_order(trial, ids, found)
    own = await noise(trial)
    for name, floor in (("repeated", own.repeated), ("reordered", own.measured)):
        trial.measure(f"{name}: median difference", floor.median, "nat")
        trial.measure(f"{name}: 99.9 % of the differences", floor.p999, "nat")
        trial.measure(f"{name}: differences", floor.samples)
    trial.measure("step to which logits are rounded", own.rounding.median, "nat")
    if own.rounding.p999 > MAX_NOISE:
        hidden = own.reordered.as_reordered.greatest
        trial.warn(
            f"logits are rounded so coarsely that differences of less than {hidden:.2g} nat "
            "do not show"
        )


def _require_order(trial: Trial, ids: list[int], scores: Scores) -> None:
    """No token of a prompt can be likelier than the likeliest ones."""
    for at in range(1, len(ids)):
        best = sorted(scores[at].values(), reverse=True)
        own = scores[at][ids[at]]
        # All but one are the likeliest; the prompt's own token is the one, or among them.
        is_listed = len(best) >= min(WIDTH, 2)
        trial.require(is_listed, f"position {at} has no list of the likeliest tokens")
        is_ordered = own <= best[0] + _ROUNDING
        trial.require(is_ordered, f"position {at} has a token above the likeliest")


async def widths(trial: Trial) -> None:
    """The same prompt and answer with lists of other widths, and the answer without any."""
    prompt = await base_prompt(trial)
    whole = await reference(trial, prompt)
    answer = await decoded(trial, prompt, ANSWER_TOKENS)
    limits = (await noise(trial)).repeated.as_repeated
    pairs: list[tuple[Scores, Scores]] = []
    for width in _WIDTHS:
        try:
            with malformed_blamed(trial):
                prompts = await scored(trial, prompt, width=width)
                answers = await decoded(trial, prompt, ANSWER_TOKENS, width=width)
        except UnexpectedStatusError as error:
            _skip_if_refused(error, width)
            continue
        same = _same_tokens(trial, f"with {width} log-probs", answers.token_ids, answer, limits)
        shared = {at: top for at, top in answers.scores.items() if at <= len(prompt) + same}
        pairs += [(prompts, whole), (shared, answer.scores)]
    alone = await written(trial, prompt, ANSWER_TOKENS)
    _same_tokens(trial, "without log-probs", alone, answer, limits)
    trial.measure("widths", len(pairs) // 2)
    judge(trial, "other widths", pairs, limits)


def _same_tokens(
    trial: Trial, how: str, now: Sequence[int], then: Decoded, limits: DifferenceLimits
) -> int:
    """How many tokens are the same; the next one is a fault unless noise can explain it."""
    chosen = zip(then.scores.items(), now, then.token_ids, strict=True)
    for same, ((at, top), token, other) in enumerate(chosen):
        if token != other:
            is_noise = lead_over(top, token) <= 2 * limits.greatest
            trial.require(is_noise, f"{how}, position {at} has another token")
            return same
    return len(now)


def _skip_if_refused(error: UnexpectedStatusError, width: int) -> None:
    """A server may limit the width, as vLLM's `--max-logprobs` does."""
    body: Mapping[str, Any] = error.request.body or {}
    if width <= WIDTH or body.get("logprobs") != width:
        raise error


CHECKS = (
    Check(
        "prefill",
        "self",
        prefill,
        "A prompt's log-probs are valid, and repeat within noise.",
        needs=("completions",),
    ),
    Check(
        "widths",
        "self",
        widths,
        "With log-probs of many tokens, of few or of none, answers and log-probs are the same.",
        needs=("completions",),
    ),
)
