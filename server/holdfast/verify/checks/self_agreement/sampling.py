"""Do penalties and grammars have an effect, and leave the log-probs of the model as they are?

They change which token is taken. vLLM's log-probs are those before penalties, unless the server
runs with `--logprobs-mode processed_logprobs`; then there is nothing to compare. What a grammar
forbids is taken out before, so the tokens that it allows have the same probabilities to each other.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from holdfast.verify.agreement import (
    FLOAT32_RESOLUTION,
    DifferenceLimits,
    first_choice,
    lead_over,
    renormalised,
)
from holdfast.verify.answers import excerpt
from holdfast.verify.check import Check
from holdfast.verify.checks.self_agreement.judging import (
    BASE_TOKENS,
    base_prompt,
    judge,
    judge_answer,
    malformed_blamed,
    need_decode,
    noise,
    reference,
)
from holdfast.verify.checks.self_agreement.sequences import ANSWER_TOKENS, sequences
from holdfast.verify.scoring import Decoded, decoded, is_raw
from holdfast.verify.trial import SkippedError, Trial, UnexpectedStatusError

_PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
}
_STRENGTH = 2.0
"""The greatest penalty that OpenAI's API knows."""
_ADDED: dict[str, Any] = {"presence_penalty": _STRENGTH, "frequency_penalty": _STRENGTH}
"""Penalties that are taken off a logit as they are: what they leave of a log-prob is known."""
_PENALIZED_PROMPTS = 4
_ROUNDING = 1e-3
"""In nats: of two tokens that are nearer, rounding may choose either."""
_GRAMMAR: dict[str, Any] = {"structured_outputs": {"regex": "[ -~\\n]*"}}
"""Printable text of any length: most answers are allowed as they are."""
_DIGITS: dict[str, Any] = {"structured_outputs": {"regex": "[0-9]{64}"}}
"""What no model says by itself behind the prompt."""
_DIGIT_TOKENS = 8
"""Fewer than spell 64 digits: the grammar does not end before the answer does."""
_SHOWN_CHARACTERS = 80
_BAD_REQUEST = 400


async def penalties(trial: Trial) -> None:
    """An answer with penalties, scored in one prefill without."""
    await need_decode(trial)
    if not await trial.once(_is_raw):
        raise SkippedError(
            "the server reports log-probs after penalties",
            "serve the model with --logprobs-mode raw_logprobs",
        )
    prompt = await base_prompt(trial)
    with malformed_blamed(trial):
        made = await decoded(trial, prompt, ANSWER_TOKENS, **_PENALTIES)
    limits = (await noise(trial)).reordered.as_reordered
    await judge_answer(trial, "with penalties", prompt, made, limits)
    await _require_effect(trial, limits)


async def _require_effect(trial: Trial, limits: DifferenceLimits) -> None:
    """No token is repeated only because it is the likeliest: the penalties may leave another one.

    The log-probs are those before penalties, so what the penalties leave of them is known.
    """
    made, changed = await trial.once(sequences), 0
    for number in range(_PENALIZED_PROMPTS):
        prompt = made.prompt(BASE_TOKENS, number)
        with malformed_blamed(trial):
            answer = await decoded(trial, prompt, ANSWER_TOKENS, **_ADDED)
        changed += _changed_tokens(trial, answer, 2 * limits.greatest + _ROUNDING)
    trial.measure("tokens that penalties changed", changed)
    if not changed and not trial.faults:
        trial.warn("no answer repeats a token, so nothing shows whether penalties have an effect")


def _changed_tokens(trial: Trial, answer: Decoded, least_lead: float) -> int:
    """How many tokens are not the likeliest; blame those that the penalties had to change."""
    said, changed = Counter[int](), 0
    for (at, top), token in zip(answer.scores.items(), answer.token_ids, strict=True):
        left = {one: value - _penalty(said[one]) for one, value in top.items()}
        is_likeliest = token == first_choice(top)
        is_right = not is_likeliest or lead_over(left, token) <= least_lead
        trial.require(is_right, f"position {at} has a token that the penalties rule out")
        changed += not is_likeliest
        said[token] += 1
    return changed


def _penalty(count: int) -> float:
    """What a token loses that was said that many times before."""
    return _STRENGTH * ((count > 0) + count)


async def grammar(trial: Trial) -> None:
    """An answer that follows a grammar, scored in one prefill without."""
    await need_decode(trial)
    prompt = await base_prompt(trial)
    try:
        with malformed_blamed(trial):
            narrow = await decoded(trial, prompt, _DIGIT_TOKENS, **_DIGITS)
            made = await decoded(trial, prompt, ANSWER_TOKENS, **_GRAMMAR)
    except UnexpectedStatusError as error:
        if error.status != _BAD_REQUEST:
            raise
        raise SkippedError("the server does not accept grammars (structured_outputs)") from None
    # Some tokenizers put a space before every text.
    is_allowed = re.fullmatch("[0-9]+", narrow.text.strip()) is not None
    said = excerpt(narrow.text, _SHOWN_CHARACTERS)
    trial.require(is_allowed, f"a grammar of digits is accepted, and the answer is {said!r}")
    whole = await reference(trial, [*prompt, *made.token_ids])
    limits = (await noise(trial)).reordered.as_reordered
    # Each was rounded before and after what is forbidden was taken out.
    greatest = max(abs(value) for top in made.scores.values() for value in top.values())
    rounding = 4 * FLOAT32_RESOLUTION * greatest
    allowed = DifferenceLimits(limits.median + rounding, limits.greatest + rounding)
    judge(trial, "with a grammar", [renormalised(made.scores, whole)], allowed)


async def _is_raw(trial: Trial) -> bool:
    return await is_raw(trial, await base_prompt(trial))


CHECKS = (
    Check(
        "penalties",
        "self",
        penalties,
        "Penalties change which token is taken, and no log-prob.",
        needs=("completions",),
    ),
    Check(
        "grammar",
        "self",
        grammar,
        "A grammar forbids tokens, and the others keep their probabilities to each other.",
        needs=("completions",),
    ),
)
