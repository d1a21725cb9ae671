"""The requests that are the same each time: a greedy answer, and one sequence in two ways.

They are asked while the load pauses, because on a GPU a batch changes the order of additions.
"""

from __future__ import annotations

from holdfast.verify.agreement import DifferenceLimits
from holdfast.verify.answers import MalformedError
from holdfast.verify.checks.self_agreement.judging import base_prompt, noise
from holdfast.verify.checks.self_agreement.sequences import ANSWER_TOKENS
from holdfast.verify.checks.soak.history import Look
from holdfast.verify.checks.soak.talk import REQUEST_SECONDS
from holdfast.verify.checks.wire.asking import either
from holdfast.verify.scoring import decoded, scored
from holdfast.verify.target import NoAnswerError
from holdfast.verify.trial import InconclusiveError, SkippedError, Trial, UnexpectedStatusError

_QUESTION = "Tell me a short story about a lighthouse."
_TOKENS = 32


async def limits_of(trial: Trial) -> DifferenceLimits:
    """How far log-probs may differ from one look to the next, and from one path to another.

    Raises:
        SkippedError: the server does not report log-probs.
        InconclusiveError: it is too noisy, or its noise cannot be measured.
    """
    if "completions" not in trial.server.abilities:
        raise SkippedError("the server does not answer completions, which report log-probs")
    try:
        return (await noise(trial)).reordered.as_reordered
    except (NoAnswerError, UnexpectedStatusError, MalformedError) as error:
        raise InconclusiveError(f"the noise of the log-probs is not known: {error}") from None


async def look(trial: Trial, at_seconds: float, *, has_scores: bool) -> Look:
    """Ask them all.

    Raises:
        NoAnswerError: there is no answer in time.
        UnexpectedStatusError: its status is not 200.
    """
    text = ""
    try:
        path, body = either(trial, _QUESTION, max_tokens=_TOKENS)
        answer = await trial.post(path, body, deadline_seconds=REQUEST_SECONDS)
        text = f"{answer.reasoning()}\n{answer.content()}"
        if not has_scores:
            return Look(at_seconds, text)
        prompt = await base_prompt(trial)
        prefill = await scored(trial, prompt)
        made = await decoded(trial, prompt, ANSWER_TOKENS)
        again = await scored(trial, [*prompt, *made.token_ids])
    except (MalformedError, SkippedError) as error:
        return Look(at_seconds, text, broken=str(error))
    return Look(at_seconds, text, prefill, made.scores, again)
