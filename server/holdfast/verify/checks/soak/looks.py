"""The requests that are the same each time: a greedy answer, and two sequences in two ways each.

They are asked while the load pauses, because on a GPU a batch changes the order of additions.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from holdfast.verify.agreement import DifferenceLimits, Scores
from holdfast.verify.answers import MalformedError
from holdfast.verify.checks.asking import either
from holdfast.verify.checks.self_agreement.contexts import cached_floor, cached_tokens
from holdfast.verify.checks.self_agreement.judging import base_prompt, noise, prefilled
from holdfast.verify.checks.self_agreement.sequences import ANSWER_TOKENS, sequences
from holdfast.verify.checks.soak.history import Look
from holdfast.verify.checks.soak.talk import REQUEST_SECONDS
from holdfast.verify.scoring import decoded, next_top, scored
from holdfast.verify.target import NoAnswerError
from holdfast.verify.trial import InconclusiveError, SkippedError, Trial, UnexpectedStatusError

_QUESTION = "Tell me a short story about a lighthouse."
_TOKENS = 32
_NOT_FOUND = (
    SkippedError,
    NoAnswerError,
    UnexpectedStatusError,
    MalformedError,
    InconclusiveError,
)


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """A prompt that every look asks for with one salt, so that the prefix cache may keep it."""

    ids: tuple[int, ...]
    salt: str
    limits: DifferenceLimits
    """How far log-probs behind it may differ."""


async def cached_prompt(trial: Trial) -> CachedPrompt | None:
    """A prompt that the prefix cache keeps in part; None if it keeps none that can be scored."""
    try:
        length = await trial.once(cached_tokens)
        ids = (await trial.once(sequences)).prompt(length)
        limits = (await cached_floor(trial)).as_reordered
    except _NOT_FOUND:
        return None
    return CachedPrompt(tuple(ids), secrets.token_hex(8), limits)


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


async def look(
    trial: Trial, at_seconds: float, kept: CachedPrompt | None, *, has_scores: bool
) -> Look:
    """Ask them all.

    Raises:
        NoAnswerError: there is no answer in time.
        UnexpectedStatusError: its status is not 200.
        InconclusiveError: it is 429 until the deadline, or what was decoded cannot be prefilled.
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
        cached, cold = await _behind_prefix(trial, kept) if kept is not None else ({}, {})
    except (MalformedError, SkippedError) as error:
        return Look(at_seconds, text, broken=str(error))
    return Look(at_seconds, text, prefill, made.scores, again, cached, cold)


async def _behind_prefix(trial: Trial, kept: CachedPrompt) -> tuple[Scores, Scores]:
    """An answer behind a prefix from the cache, and the same tokens from prefills without it."""
    # Finds the blocks of an earlier look; those that the load has evicted, it makes again.
    await next_top(trial, kept.ids, salt=kept.salt)
    made = await decoded(trial, kept.ids, ANSWER_TOKENS, salt=kept.salt)
    return made.scores, await prefilled(trial, kept.ids, made.token_ids)
