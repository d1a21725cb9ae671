"""Does a sequence get the same log-probs alone and among many?"""

from __future__ import annotations

from holdfast.verify.check import Check
from holdfast.verify.checks.self_agreement.judging import (
    judge,
    malformed_blamed,
    need_decode,
    noise,
    reference,
)
from holdfast.verify.checks.self_agreement.sequences import ANSWER_TOKENS, sequences
from holdfast.verify.records import Profile
from holdfast.verify.scoring import decoded, scored
from holdfast.verify.trial import Trial
from holdfast.verify.waiting import together

_SEQUENCES: dict[Profile, int] = {"quick": 8, "standard": 16}
_LEAST_OF_FULL, _MOST_OF_FULL = 64, 256
"""Each sequence is also scored alone, so more would take hours on a slow server."""
_SHORTEST_TOKENS = 20
_STEP_TOKENS = 5
"""Each prompt is longer than the one before, so that no two rows of a batch are alike."""
_MAX_TOKENS = 300


async def full_batch(trial: Trial) -> None:
    """Decode many sequences at once, then score them at once; against each of them alone."""
    await need_decode(trial)
    made = await trial.once(sequences)
    limits = (await noise(trial)).reordered.as_reordered
    told = trial.server.configuration
    most = min(_MAX_TOKENS, made.longest_scored(ANSWER_TOKENS))
    prompts = [
        made.prompt(min(_SHORTEST_TOKENS + _STEP_TOKENS * number, most), 100 + number)
        for number in range(batch_size(trial.profile, told.max_num_seqs if told is not None else 0))
    ]
    with malformed_blamed(trial):
        answers = await together(*(decoded(trial, one, ANSWER_TOKENS) for one in prompts))
        wholes = [
            [*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)
        ]
        rescored = await together(*(scored(trial, one) for one in wholes))
    alone = [await reference(trial, one) for one in wholes]
    decodes = [answer.scores for answer in answers]
    judge(trial, "decoded together", list(zip(decodes, alone, strict=True)), limits)
    judge(trial, "prefilled together", list(zip(rescored, alone, strict=True)), limits)
    trial.measure("sequences", len(prompts))


def batch_size(profile: Profile, max_num_seqs: int) -> int:
    """How many sequences are a full batch: in `full`, what the server lets run; 0 if unknown."""
    if profile in _SEQUENCES:
        return _SEQUENCES[profile]
    return min(max(max_num_seqs, _LEAST_OF_FULL), _MOST_OF_FULL)


CHECKS = (
    Check(
        "full_batch",
        "self",
        full_batch,
        "A sequence among many others gets the log-probs that it gets alone.",
        needs=("completions",),
        deadline_seconds=3600.0,
    ),
)
