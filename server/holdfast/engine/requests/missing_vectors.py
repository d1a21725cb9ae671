"""Ends the pooling requests for which an engine has no vector: those it aborts, and its failures.

Seen in vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import EMPTY_CPU_TENSOR


def fill_missing_vectors(outputs: Iterable[Any], states: Mapping[str, Any]) -> list[Any]:
    """Give each pooling request that ends without a vector an empty one; return the failed ones.

    A pause and a sleep end them so. vLLM takes an output without a vector for one of a request that
    generates, and its assertion would end the task that reads what the engine sends. A miss in the
    cache of media is a failure too, which vLLM itself tells the client.
    """
    failed = []
    for output in outputs:
        if output.finish_reason is None or output.pooling_output is not None:
            continue
        state = states.get(output.request_id)
        if state is None or state.detokenizer is not None or output.mm_cache_miss_hashes:
            continue
        output.pooling_output = EMPTY_CPU_TENSOR
        if output.finish_reason == FinishReason.ERROR:
            failed.append(state)
    return failed


def tell_failures(states: Iterable[Any]) -> None:
    """Have the callers of these requests get an error, in the place of the empty vector."""
    for state in states:
        state.queue.put(
            GracefulHTTPError(
                "The engine failed on this request.", HTTPStatus.INTERNAL_SERVER_ERROR
            )
        )
