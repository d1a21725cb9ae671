"""Is the base model what it is alone, while a LoRA adapter of it is asked in the same steps?"""

from __future__ import annotations

from functools import partial

from holdfast.verify.answers import dig
from holdfast.verify.check import FROM_STANDARD, Check
from holdfast.verify.checks.self_agreement.judging import (
    base_prompt,
    judge_answer,
    malformed_blamed,
    need_decode,
    noise,
)
from holdfast.verify.checks.self_agreement.sequences import ANSWER_TOKENS
from holdfast.verify.scoring import decoded
from holdfast.verify.trial import MODELS, SkippedError, Trial
from holdfast.verify.waiting import together

_NEIGHBOURS = 3


async def beside_adapter(trial: Trial) -> None:
    """Decode with the base model beside requests to an adapter; against one prefill alone."""
    adapter = await _adapter(trial)
    await need_decode(trial)
    prompt = await base_prompt(trial)
    limits = (await noise(trial)).reordered.as_reordered
    models = [trial.server.model, *[adapter] * _NEIGHBOURS]
    with malformed_blamed(trial):
        made, *_ = await together(
            *(decoded(trial, prompt, ANSWER_TOKENS, model=model) for model in models)
        )
    await judge_answer(trial, "base model beside an adapter", prompt, made, limits)


async def _adapter(trial: Trial) -> str:
    """The first LoRA adapter that the server lists, and that is not itself verified.

    Raises:
        SkippedError: it lists none.
    """
    listed = await trial.admitted(partial(trial.ask, MODELS))
    for entry in dig(listed.document, "data", kind=list):
        is_adapter = isinstance(entry, dict) and entry.get("parent")
        if is_adapter and (name := dig(entry, "id", kind=str)) != trial.server.model:
            return name
    raise SkippedError(
        "the server lists no LoRA adapter beside the verified model",
        "serve one with `--enable-lora --lora-modules NAME=PATH`",
    )


CHECKS = (
    Check(
        "beside_adapter",
        "self",
        beside_adapter,
        "The base model gets the log-probs that it gets alone, beside requests to a LoRA adapter.",
        profiles=FROM_STANDARD,
        needs=("completions",),
    ),
)
