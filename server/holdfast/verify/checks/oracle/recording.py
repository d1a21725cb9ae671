"""Measures what a baseline has: scores of fixed sequences, and how far the server differs from
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast import __version__
from holdfast.verify.agreement import NoiseFloor, TopLogProbs
from holdfast.verify.baseline import (
    Baseline,
    FirstToken,
    Noise,
    Origin,
    RecordedContext,
    RecordedSequence,
    RecordedText,
)
from holdfast.verify.check import Check
from holdfast.verify.checks.self_agreement.contexts import cold_contexts, long_floor
from holdfast.verify.checks.self_agreement.judging import malformed_blamed, noise, reference
from holdfast.verify.checks.self_agreement.sequences import MOST_SCORED_TOKENS, Sequences, sequences
from holdfast.verify.scoring import decoded, next_top, token_ids_of
from holdfast.verify.trial import SkippedError, Trial, UnexpectedStatusError

ANSWER_TOKENS = 32
ROUNDS = 12
"""Each round asks for every first token once."""
_LENGTHS = (12, 48, 96, 192, 350, MOST_SCORED_TOKENS - ANSWER_TOKENS)
_FIRST_TOKENS = 8
_FIRST_PROMPT_TOKENS = 4
_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "naïve 北京 \N{SLIGHTLY SMILING FACE} 0.1e-5\n\ttabs  and  spaces ",
    "def f(x):\n    return {'a': x ** 2}",
)


async def record(trial: Trial) -> None:
    """Measure a baseline; the command writes it when the run is over."""
    with malformed_blamed(trial):
        made = await trial.once(measured)
    positions = sum(len(one.tops) for one in made.sequences)
    trial.measure("sequences", len(made.sequences))
    trial.measure("positions", positions)
    trial.measure("texts", len(made.texts))
    trial.measure("first tokens", len(made.first_tokens))
    longest = max((len(one.prompt_ids) for one in made.contexts), default=0)
    trial.measure("longest context", longest, "tokens")


async def measured(trial: Trial) -> Baseline:
    """A baseline without scores, time and verdict, which only a run that is over has."""
    made = await trial.once(sequences)
    floor = (await noise(trial)).reordered
    most = made.longest_scored(ANSWER_TOKENS)
    lengths = sorted({min(one, most) for one in _LENGTHS})
    recorded = [await _sequence(trial, made, length) for length in lengths]
    fingerprint = (await decoded(trial, made.prompt(lengths[0]), 1)).fingerprint
    contexts, contexts_noise = await _contexts(trial, made)
    server = trial.server
    return Baseline(
        origin=Origin(
            model=server.model,
            vllm=server.vllm,
            max_model_len=server.max_model_len,
            fingerprint=fingerprint,
            tool=__version__,
            verdict="",
        ),
        noise=_noise(floor),
        sequences=tuple(recorded),
        first_tokens=await _first_tokens(trial, made),
        texts=await _texts(trial),
        contexts=contexts,
        contexts_noise=contexts_noise,
    )


async def rounds_of(trial: Trial, prompts: Sequence[Sequence[int]]) -> list[list[TopLogProbs]]:
    """What follows each of these prompts, by round, then by prompt.

    Each is asked alone, as the canary of `serve --verify-baseline` asks: what shares an engine's
    step may change the log-probs.
    """
    return [[await next_top(trial, prompt) for prompt in prompts] for _ in range(ROUNDS)]


async def prompt_of(trial: Trial, text: str, *, is_chat: bool) -> list[int] | None:
    """The token ids that a text, or a chat of that one message, becomes; None if untold."""
    if not is_chat:
        return await token_ids_of(trial, text)
    if "chat" not in trial.server.abilities:
        return None
    try:
        answer = await trial.chat(text, max_tokens=1, return_token_ids=True)
    except UnexpectedStatusError:
        return None
    found: Any = answer.document.get("prompt_token_ids")
    is_told = isinstance(found, list) and all(type(one) is int for one in found)
    return found if is_told else None


async def _sequence(trial: Trial, made: Sequences, length: int) -> RecordedSequence:
    prompt = made.prompt(length, 1000 + length)
    answer = await decoded(trial, prompt, ANSWER_TOKENS)
    whole = [*prompt, *answer.token_ids]
    scores = await reference(trial, whole)
    tops = tuple(_packed(scores[at]) for at in range(1, len(whole)))
    return RecordedSequence(tuple(prompt), answer.token_ids, tops)


async def _first_tokens(trial: Trial, made: Sequences) -> tuple[FirstToken, ...]:
    numbers = range(2000, 2000 + _FIRST_TOKENS)
    prompts = [made.prompt(100, number)[-_FIRST_PROMPT_TOKENS:] for number in numbers]
    rounds = await rounds_of(trial, prompts)
    return tuple(
        FirstToken(tuple(prompt), tuple(_packed(tops[index]) for tops in rounds))
        for index, prompt in enumerate(prompts)
    )


async def _contexts(trial: Trial, made: Sequences) -> tuple[tuple[RecordedContext, ...], Noise]:
    """What follows long prompts, and its noise; nothing where no prefix cache shows the noise."""
    try:
        floor = await long_floor(trial)
    except SkippedError:
        return (), Noise()
    found = await trial.once(cold_contexts)
    longer = {length: top for length, top in found.items() if length > MOST_SCORED_TOKENS}
    contexts = [
        RecordedContext(tuple(made.prompt(length)), _packed(top)) for length, top in longer.items()
    ]
    return tuple(contexts), _noise(floor)


async def _texts(trial: Trial) -> tuple[RecordedText, ...]:
    found = []
    for text in _TEXTS:
        for is_chat in (False, True):
            ids = await prompt_of(trial, text, is_chat=is_chat)
            if ids is not None:
                found.append(RecordedText(text, is_chat, tuple(ids)))
    return tuple(found)


def _noise(floor: NoiseFloor) -> Noise:
    return Noise(floor.median, floor.p999, floor.divergence)


def _packed(top: TopLogProbs) -> tuple[tuple[int, float], ...]:
    return tuple(top.items())


CHECKS = (
    Check(
        "record",
        "oracle",
        record,
        "A baseline of this server can be measured; only `--record` saves it.",
        needs=("completions",),
        deadline_seconds=3600.0,
        asked_for=lambda options: options.records,
    ),
)
