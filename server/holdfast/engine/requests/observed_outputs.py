"""Reads what an engine sends before vLLM does: which prompts it has read, and what it aborts.

Seen in vLLM 0.32 and, by its source, in 0.33.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.engine import FinishReason

from holdfast.engine.requests.missing_vectors import fill_missing_vectors, tell_failures
from holdfast.engine.requests.sequence_queue import SequenceQueue


def observed(
    processor: Any, sequences: SequenceQueue, on_aborted: Callable[[Sequence[str]], None]
) -> Callable[..., Any]:
    """Wrap `process_outputs` of vLLM to tell the queue which prompts the engine has processed.

    It also tells what the engine has aborted, by vLLM's internal IDs, before any caller can know,
    and ends pooling requests for which the engine has no vector.
    """
    process, states = processor.process_outputs, processor.request_states

    def process_outputs(outputs: Any, *args: Any, **options: Any) -> Any:
        aborted = [one.request_id for one in outputs if one.finish_reason is FinishReason.ABORT]
        if aborted:
            on_aborted(aborted)
        failed = fill_missing_vectors(outputs, states)
        processed = process(outputs, *args, **options)
        tell_failures(failed)
        sequences.step_ended(states.is_read)
        return processed

    return process_outputs
