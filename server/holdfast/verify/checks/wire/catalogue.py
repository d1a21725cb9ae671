"""Which models are there?"""

from __future__ import annotations

from collections import Counter
from functools import partial

from holdfast.verify.answers import dig
from holdfast.verify.check import Check
from holdfast.verify.denials import denies_chats
from holdfast.verify.naming import MAX_TOKENS
from holdfast.verify.trial import MODELS, InconclusiveError, Trial

_OK = 200


async def models(trial: Trial) -> None:
    """The list of models is one, and each name stands for one model."""
    answer = await trial.admitted(partial(trial.ask, MODELS))
    if not trial.require(answer.status == _OK, f"its status is {answer.status}", answer):
        return
    names: list[str] = []
    with trial.demanding_form(answer):
        trial.require(answer.document.get("object") == "list", "it is not a `list`", answer)
        for entry in dig(answer.document, "data", kind=list):
            names.append(dig(entry, "id", kind=str))
            dig(entry, "created", kind=int)
            dig(entry, "owned_by", kind=str)
            is_model = dig(entry, "object", kind=str) == "model"
            trial.require(is_model, f"{names[-1]} is not a `model`", answer)
    twice = [name for name, count in Counter(names).items() if count > 1]
    trial.require(not twice, f"{', '.join(twice)} is listed twice", answer)
    trial.measure("models", len(names))
    _judge_abilities(trial)


def _judge_abilities(trial: Trial) -> None:
    """Say what the server refuses, where the checks that need it are skipped without a fault.

    Raises:
        InconclusiveError: it has no route that writes, or refuses every chat.
    """
    able, refusals = trial.server.abilities, trial.server.refusals
    told = refusals.get("chat", "")
    if not {"chat", "completions"} & set(able):
        neither = "the server answers neither chats nor completions"
        raise InconclusiveError(f"{neither}: {told}" if told else neither)
    if told and not denies_chats(told):
        raise InconclusiveError(f"the server refuses the smallest chat: {told}")
    if refused := refusals.get(MAX_TOKENS):
        trial.warn(f"a chat is refused for its `{MAX_TOKENS}`, which most clients send: {refused}")


CHECKS = (
    Check("models", "wire", models, "The list of models has OpenAI's form, and no name twice."),
)
