"""Does an answer get the log-probs, token by token, that it has as part of a prompt?"""

from __future__ import annotations

from holdfast.verify.check import Check
from holdfast.verify.checks.self_agreement.contexts import (
    GROWING_SECONDS,
    LONGEST_TOKENS,
    long_floor,
)
from holdfast.verify.checks.self_agreement.judging import judge_answer, malformed_blamed, noise
from holdfast.verify.checks.self_agreement.sequences import (
    ANSWER_TOKENS,
    MOST_SCORED_TOKENS,
    Sequences,
    sequences,
)
from holdfast.verify.records import Profile
from holdfast.verify.scoring import decoded
from holdfast.verify.trial import SkippedError, Trial

_LENGTHS: dict[Profile, tuple[int, ...]] = {
    "quick": (17, 250),
    "standard": (15, 16, 17, 96, 250, 4090),
}
_EVERY_LENGTH = (
    *(1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 250, 255, 256, 257, 488),
    *(506, 1018, 2042, 4090, 8186, 16378, 32762, 65530, 131066, LONGEST_TOKENS),
)
"""So that the answer crosses each power of two, where blocks, chunks and windows end."""


async def decode(trial: Trial) -> None:
    """Decode behind prompts of several lengths, and score each answer in prefills."""
    made = await trial.once(sequences)
    short = (await noise(trial)).reordered
    for length in prompt_lengths(trial.profile, made):
        is_long = length + ANSWER_TOKENS > MOST_SCORED_TOKENS
        try:
            floor = await long_floor(trial) if is_long else short
        except SkippedError:  # without a prefix cache, the noise of long contexts is unknown
            break
        prompt = made.prompt(length, number=length)
        with malformed_blamed(trial):
            answer = await decoded(trial, prompt, ANSWER_TOKENS)
        name = f"behind {length} tokens"
        await judge_answer(trial, name, prompt, answer, floor.as_reordered)


def prompt_lengths(profile: Profile, made: Sequences) -> list[int]:
    """The profile's lengths that fit; the longest that fits stands for those that do not."""
    most = made.longest_scored(ANSWER_TOKENS)
    most += made.longest_tokens > MOST_SCORED_TOKENS  # single tokens of the answer are looked at
    return sorted({min(one, most) for one in _LENGTHS.get(profile, _EVERY_LENGTH)})


CHECKS = (
    Check(
        "decode",
        "self",
        decode,
        "A token gets the log-prob from decoding that it gets in a prefill, at any length.",
        needs=("completions",),
        deadline_seconds=GROWING_SECONDS,
    ),
)
