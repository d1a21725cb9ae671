"""The step that compares what the engine computes with a recorded baseline."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from holdfast.engine.baseline import BaselineWatch, top_width, worst_position
from holdfast.errors import ProbeFailedError, ProbeTooSlowError
from holdfast.probe.client import CLAMPED_LOGPROB, exchange
from holdfast.probe.session import ProbeSession, StepResult
from holdfast.verify.agreement import TopLogProbs
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
    found, compared, too_slow = list[_Difference](), 0, None
    for number, sequence in enumerate(sequences, start=1):
        try:
            async for difference in _differences(session, sequence, number):
                found.append(difference)
        except ProbeTooSlowError as error:
            too_slow = error
            break
        compared = max(compared, len(sequence.tops) + 1)
    if found:
        _judge(watch, max(found, key=lambda one: one.nats))
    if too_slow and not compared:
        raise too_slow
    cut = f"{session.attempt}: {too_slow.cause}" if too_slow else ""
    reasons = list(filter(None, (reason if left_out else "", cut)))
    return StepResult(tokens=compared, limited=bool(reasons), reason="; ".join(reasons))


@dataclass(frozen=True, slots=True)
class _Difference:
    """Where a log-prob of one engine differs most from the recorded one."""

    nats: float
    place: str


def _judge(watch: BaselineWatch, worst: _Difference) -> None:
    """Judge the greatest difference.

    Raises:
        ProbeFailedError: the recorded noise does not explain it.
    """
    if not watch.judge("probe", worst.nats).agrees:
        raise ProbeFailedError(
            f"the log-probs differ from the baseline by {worst.nats:.3g} nats at {worst.place}, "
            f"and the recorded noise allows {watch.limit_nats:.3g}."
        )


async def _differences(
    session: ProbeSession, sequence: RecordedSequence, number: int
) -> AsyncIterator[_Difference]:
    """Score a sequence on every engine; each rank must have computed all of it."""
    ids = [*sequence.prompt_ids, *sequence.answer_ids]
    session.begin_attempt(f"sequence {number} of the baseline", len(ids))
    since = session.mark()
    for engine in session.engines:
        scored = await session.run_bounded(_scored(session, engine, ids))
        position, nats = worst_position(sequence.tops, scored)
        yield _Difference(nats, f"position {position} of sequence {number}")
    await session.require(
        lambda rank: since.new_tokens(rank) >= len(ids),
        f"the ranks did not schedule {len(ids)} new tokens for it.",
    )


async def _scored(session: ProbeSession, engine: int | None, ids: list[int]) -> list[TopLogProbs]:
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


def _top(entry: Any) -> TopLogProbs:
    values = entry.items() if isinstance(entry, dict) else ()
    top: dict[int, Any] = {
        int(token): told.get("logprob") for token, told in values if isinstance(told, dict)
    }
    if not top or not all(map(_is_finite, top.values())):
        raise ProbeFailedError(f"a log-prob of the prompt is not finite: {str(entry)[:200]}.")
    return top


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > CLAMPED_LOGPROB
