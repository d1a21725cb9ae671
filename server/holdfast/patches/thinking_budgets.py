"""Lets an answer that goes on in another engine keep what is left of its thinking budget.

Each step of vLLM's V1 runner brings the state of a budget up to date (`ThinkingBudgetStateHolder`,
0.32). A request that enters the batch with a part of its output gets a new state, which takes that
part for one step: it may force the end of the thought a second time, or give the next thought no
budget. Here it takes one token after the other, as it did when they were written. The V2 runner
derives everything from the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast.patches import fits
from holdfast.patches.continued import sent_tokens
from holdfast.patches.patch import original, replace


def count_sent_thoughts(vllm_config: Any) -> None:
    """Have a worker of the V1 runner count what was sent of an answer as it counts its own."""
    if vllm_config.use_v2_model_runner or not fits("patches.thinking_budgets.count_sent_thoughts"):
        return
    from vllm.v1.sample.thinking_budget_state import (  # noqa: PLC0415 - imports torch
        ThinkingBudgetStateHolder,
    )

    sync_batch = original(ThinkingBudgetStateHolder, "sync_batch")

    def sync_and_count(holder: Any, batch_update: Any) -> None:
        sync_batch(holder, batch_update)
        if not batch_update or not holder.has_tracked_requests():
            return
        # A row may have been moved since it was added, but it keeps its list.
        begun = {
            id(output) for _, parameters, _, output in batch_update.added if sent_tokens(parameters)
        }
        for state in holder._state.values():  # noqa: SLF001 - vLLM has no other name for it
            if id(state["output_tok_ids"]) in begun:
                _advance(holder, state)

    replace(ThinkingBudgetStateHolder, "sync_batch", sync_and_count)


def _advance(holder: Any, state: dict[str, Any]) -> None:
    """Bring a new state to the step before the one that follows its output."""
    output = state["output_tok_ids"]
    written = _Beginning(output)
    state["output_tok_ids"] = written
    with _found_at_once(holder, written):
        for tokens in range(len(output)):
            written.end = tokens
            state["force_index"] = []
            holder._update_think_state(state)  # noqa: SLF001 - as above
    state["output_tok_ids"] = output


@dataclass(slots=True)
class _Beginning(Sequence[int]):
    """The tokens of a list from one place to another. A slice copies nothing.

    vLLM takes one to the end at each token, which for a long answer would take a second.
    """

    tokens: Sequence[int]
    begin: int = 0
    end: int = 0

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, place: Any) -> Any:
        places = range(self.begin, self.end)[place]
        if isinstance(places, range):
            return _Beginning(self.tokens, places.start, max(places.start, places.stop))
        return self.tokens[places]


@contextmanager
def _found_at_once(holder: Any, written: _Beginning) -> Iterator[None]:
    """While entered, find markers in the end of `written` without going over it.

    vLLM goes over it at each token, which for a long answer would take seconds.
    """
    places = {
        tuple(marker): _places(written.tokens, marker)
        for marker in (holder.think_start_token_ids, holder.think_end_token_ids)
    }

    def find(tail: _Beginning, marker: Sequence[int]) -> int:
        return max(places[tuple(marker)][tail.end] - tail.begin, -1)

    holder._find_last_sequence_index = find  # noqa: SLF001 - as above
    try:
        yield
    finally:
        del holder._find_last_sequence_index  # noqa: SLF001 - vLLM's own is found again


def _places(output: Sequence[int], marker: Sequence[int]) -> list[int]:
    """Return, for each number of first tokens, where the last marker in them begins; -1 if none."""
    places = [-1]
    for end in range(1, len(output) + 1):
        begin = end - len(marker)
        is_marker = begin >= 0 and bool(marker) and list(output[begin:end]) == list(marker)
        places.append(begin if is_marker else places[-1])
    return places
