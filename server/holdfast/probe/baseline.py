"""The step that compares what the engine computes with a recorded baseline."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any

from holdfast.engine.baseline import top_width, worst_position
from holdfast.errors import ProbeFailedError, ProbeTooSlowError
from holdfast.probe.client import CLAMPED_LOGPROB, exchange
from holdfast.probe.session import ProbeSession, StepResult
from holdfast.verify.agreement import Top
from holdfast.verify.baseline import RecordedSequence


async def baseline(session: ProbeSession) -> StepResult:
    """Prove that every engine gives the baseline's sequences the recorded log-probs.

    Each is scored alone and in one request, teacher-forced, as it was recorded.
    """
    watch = session.baseline
    if watch is None:
        return StepResult(is_skipped=True, reason="no --verify-baseline was given")
    longest = session.longest_allowed_tokens
    sequences = [one for one in watch.sequences if len(one.tops) + 1 <= longest]
    left_out = len(watch.sequences) - len(sequences)
    reason = f"{left_out} sequences of the baseline are longer than {longest} tokens"
    if not sequences:
        return StepResult(is_skipped=True, limited=True, reason=reason)
    worst, compared, too_slow = _Difference(), 0, ""
    for number, sequence in enumerate(sequences, start=1):
        try:
            found = await _difference(session, sequence, number)
        except ProbeTooSlowError as error:
            if not compared:
                raise
            too_slow = f"{session.attempt}: {error.cause}"
            break
        worst = max(worst, found, key=lambda one: one.nats)
        compared = max(compared, len(sequence.tops) + 1)
    if not watch.judge("probe", worst.nats).agrees:
        raise ProbeFailedError(
            f"the log-probs differ from the baseline by {worst.nats:.3g} nats at {worst.place}, "
            f"and the recorded noise allows {watch.limit_nats:.3g}."
        )
    reasons = list(filter(None, (reason if left_out else "", too_slow)))
    return StepResult(tokens=compared, limited=bool(reasons), reason="; ".join(reasons))


@dataclass(frozen=True, slots=True)
class _Difference:
    """Where a log-prob differs most from the recorded one."""

    nats: float = -1.0
    place: str = ""


async def _difference(
    session: ProbeSession, sequence: RecordedSequence, number: int
) -> _Difference:
    """Score a sequence on every engine; each rank must have computed all of it."""
    ids = [*sequence.prompt_ids, *sequence.answer_ids]
    session.begin_attempt(f"sequence {number} of the baseline", len(ids))
    since, worst = session.mark(), _Difference()
    for engine in session.engines:
        found = await session.run_bounded(_scored(session, engine, ids))
        position, nats = worst_position(sequence.tops, found)
        one = _Difference(nats, f"position {position} of sequence {number}")
        worst = max(worst, one, key=lambda each: each.nats)
    await session.require(
        lambda rank: since.new_tokens(rank) >= len(ids),
        f"the ranks did not schedule {len(ids)} new tokens for it.",
    )
    return worst


async def _scored(session: ProbeSession, engine: int | None, ids: list[int]) -> list[Top]:
    """Return the log-probs at each position but the first.

    vLLM ignores its prefix cache for `prompt_logprobs`, and the salt keeps it so.
    """
    asked = {
        "prompt_logprobs": top_width(session.facts.max_logprobs),
        "cache_salt": secrets.token_hex(8),
    }
    answer = await exchange(session.client, session.message(engine, [ids], extra=asked))
    entries = answer["choices"][0].get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(ids):
        raise ProbeFailedError("the answer does not have a log-prob for each token of the prompt.")
    return [_top(entry) for entry in entries[1:]]


def _top(entry: Any) -> Top:
    values = entry.items() if isinstance(entry, dict) else ()
    top: dict[int, Any] = {
        int(token): told.get("logprob") for token, told in values if isinstance(told, dict)
    }
    if not top or not all(map(_is_finite, top.values())):
        raise ProbeFailedError(f"a log-prob of the prompt is not finite: {str(entry)[:200]}.")
    return top


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > CLAMPED_LOGPROB
