"""Do penalties and grammars leave the log-probs of the model as they are?

They change which token is taken. vLLM's log-probs are those before penalties, unless the server
runs with `--logprobs-mode processed_logprobs`; then there is nothing to compare. What a grammar
forbids is taken out before, so the tokens that it allows have the same probabilities to each other.
"""

from __future__ import annotations

from typing import Any

from holdfast.verify.agreement import FLOAT32_RESOLUTION, DifferenceLimits, renormalised
from holdfast.verify.check import Check
from holdfast.verify.checks.roads.judging import (
    base_prompt,
    judge,
    judge_answer,
    need_decode,
    noise,
    on_road,
    reference,
)
from holdfast.verify.checks.roads.sequences import ANSWER_TOKENS
from holdfast.verify.scoring import decoded, is_raw
from holdfast.verify.trial import SkippedError, Trial, UnexpectedStatusError

_PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
}
_GRAMMAR: dict[str, Any] = {"structured_outputs": {"regex": "[ -~\\n]*"}}
"""Printable text of any length: most answers are allowed as they are."""
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
    with on_road(trial):
        made = await decoded(trial, prompt, ANSWER_TOKENS, **_PENALTIES)
    limits = (await noise(trial)).reordered.as_reordered
    await judge_answer(trial, "with penalties", prompt, made, limits)


async def grammar(trial: Trial) -> None:
    """An answer that follows a grammar, scored in one prefill without."""
    await need_decode(trial)
    prompt = await base_prompt(trial)
    try:
        with on_road(trial):
            made = await decoded(trial, prompt, ANSWER_TOKENS, **_GRAMMAR)
    except UnexpectedStatusError as error:
        if error.status != _BAD_REQUEST:
            raise
        raise SkippedError("the server does not accept grammars (structured_outputs)") from None
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
