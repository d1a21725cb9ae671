"""Counts what an engine has done for a request whose caller leaves before it gets that.

Seen in vLLM 0.32 and, by its source, in 0.33.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.sampling_params import RequestOutputKind


def unread_tokens(
    processor: Any, collector: Any, is_sent: Callable[[str], bool]
) -> tuple[int, int]:
    """Return how many tokens of its prompt, and of its answers, its caller was not told of.

    `processor` is the engine's OutputProcessor, and `collector` has the outputs of the request. A
    prompt counts as a whole once the engine has it, which `is_sent` says of a sequence. That of a
    stream is told with the first output.
    """
    request_id = collector.request_id
    parent = processor.parent_requests.get(request_id)
    names = (request_id,) if parent is None else tuple(parent.child_requests)
    states = processor.request_states
    running = {name: states[name] for name in names if name in states}
    ended = [one for one in getattr(parent, "output_aggregator", ()) if one is not None]
    lengths = [one.prompt_len for name, one in running.items() if ended or is_sent(name)]
    answers = [*ended]
    is_stream = collector.aggregate
    if (waiting := _waiting(collector)) is not None:
        answers += waiting.outputs if isinstance(waiting.outputs, list) else ()
        lengths += () if is_stream else (len(waiting.prompt_token_ids or ()),)
    if is_stream and (len(names) < _count(parent) or not all(map(_is_untouched, running.values()))):
        lengths = []
    tokens = sum(len(one.token_ids) for one in answers) + sum(map(_withheld, running.values()))
    return max(lengths, default=0), tokens


def _waiting(collector: Any) -> Any:
    """Return the output that the caller would get next; None if there is none."""
    return None if isinstance(collector.output, Exception) else collector.output


def _count(parent: Any) -> int:
    """Return how many answers a request wants."""
    return 1 if parent is None else int(parent.sampling_params.n)


def _is_untouched(state: Any) -> bool:
    """Whether nothing was generated; not known of a prompt that comes as a stream."""
    return state.is_prefilling and state.input_chunk_queue is None


def _withheld(state: Any) -> int:
    """Count the tokens of an unfinished answer that vLLM has not put into an output yet."""
    if state.detokenizer is None:
        return 0
    tokens = int(state.detokenizer.num_output_tokens())
    if state.output_kind is RequestOutputKind.FINAL_ONLY:
        return tokens
    is_stream = state.output_kind is RequestOutputKind.DELTA
    return tokens - state.sent_tokens_offset if is_stream and state.stream_interval > 1 else 0
