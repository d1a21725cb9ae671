"""A thinking budget goes on over a seam: the V1 runner's own state, advanced by what was sent."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from holdfast.patches import thinking_budgets
from holdfast.patches.continued import SENT_TOKENS
from holdfast.patches.thinking_budgets import count_sent_thoughts

START = [1]
ENDS = ([2], [2, 3], [4, 2])
"""The end that is forced; the first token of one is a usual one."""
VOCABULARY = 8
ROUNDS = 100
FORCED = 1e8
V1, V2 = (SimpleNamespace(use_v2_model_runner=is_v2) for is_v2 in (False, True))


@pytest.fixture(autouse=True)
def _vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put in the place of vLLM's code is taken back."""
    own = ThinkingBudgetStateHolder.sync_batch
    monkeypatch.setattr(ThinkingBudgetStateHolder, "sync_batch", own)


@dataclass
class Thinker:
    """A request, and what its model would write if nothing were forced."""

    prompt: list[int]
    budget: int
    proposed: list[int]
    end: Sequence[int]
    written: list[int] = field(default_factory=list)

    def write(self, *, begun: int = 0) -> list[int]:
        """Write the answer after its first `begun` tokens, and return all of it."""
        markers = SimpleNamespace(
            reasoning_start_token_ids=START, reasoning_end_token_ids=list(self.end)
        )
        config: Any = markers
        holder = ThinkingBudgetStateHolder(config, 2, 0, torch.device("cpu"), is_pin_memory=False)
        answer = self.written[:begun]
        holder.sync_batch(self._added(answer))
        for proposed in self.proposed[begun:]:
            holder.update_state([answer], None)
            logits = holder.apply_to_logits(torch.zeros(1, VOCABULARY), False, [[]])
            is_forced = bool(logits.max() > FORCED)
            answer.append(int(logits.argmax()) if is_forced else proposed)
        return answer

    def _added(self, answer: list[int]) -> Any:
        sent = {SENT_TOKENS: [*answer]} if answer else None
        parameters = SamplingParams(thinking_token_budget=self.budget, extra_args=sent)
        return SimpleNamespace(removed=[], added=[(0, parameters, self.prompt, answer)], moved=[])


def thinker(seed: int, end: Sequence[int]) -> Thinker:
    """One that thinks before its answer or in it, once or again, until it is stopped or not."""
    drawn = random.Random(seed)
    prompt = drawn.choices(range(1, 7), k=drawn.randrange(1, 6)) + drawn.choice([[], START])
    weights = drawn.choice([(1, 1, 1, 8, 8), (1, 1, 1, 1, 1), (0, 1, 1, 9, 9), (1, 0, 0, 5, 5)])
    proposed = drawn.choices(range(1, 6), weights, k=drawn.randrange(2, 30))
    one = Thinker(prompt, drawn.randrange(8), proposed, end)
    one.written = one.write()
    return one


class Beginning(thinking_budgets._Beginning):
    """Counts the tokens that are read of it."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        Beginning.read += not isinstance(found, thinking_budgets._Beginning)
        return found


def broken_seams(end: Sequence[int]) -> int:
    """Count the seams after which another answer is written than without them."""
    thinkers = [thinker(seed, end) for seed in range(ROUNDS)]
    return sum(
        one.write(begun=begun) != one.written
        for one in thinkers
        for begun in range(1, len(one.written))
    )


@pytest.mark.parametrize("end", ENDS, ids=str)
def test_a_budget_is_the_same_over_each_seam(end: Sequence[int]) -> None:
    """Within a thought, within its forced end, after it, and in the next one."""
    assert broken_seams(end) > 0  # what is fixed
    count_sent_thoughts(V1)
    count_sent_thoughts(V1)
    assert broken_seams(end) == 0


def test_a_row_that_was_moved_is_counted_too() -> None:
    """vLLM adds rows, and then moves them to where there is room."""
    count_sent_thoughts(V1)
    markers: Any = SimpleNamespace(reasoning_start_token_ids=START, reasoning_end_token_ids=[2, 3])
    holder = ThinkingBudgetStateHolder(markers, 2, 0, torch.device("cpu"), is_pin_memory=False)
    answer = [5, 2, 3, 5]
    parameters = SamplingParams(thinking_token_budget=1, extra_args={SENT_TOKENS: answer[:]})
    moved: Any = SimpleNamespace(
        removed=[], added=[(0, parameters, START, answer)], moved=[(0, 1, None)]
    )
    holder.sync_batch(moved)
    [state] = holder._state.values()
    assert state["scan_offset"] > 0  # after the thought that has ended
    assert state["output_tok_ids"] is answer


def test_a_long_answer_is_counted_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not over and over for each of its tokens, for which a rank would stand still."""
    monkeypatch.setattr(thinking_budgets, "_Beginning", Beginning)
    count_sent_thoughts(V1)
    own = ThinkingBudgetStateHolder._find_last_sequence_index
    looked_at = 0

    def counted(target: list[int], marker: list[int]) -> int:
        nonlocal looked_at
        looked_at += len(target)
        return int(own(target, marker))

    monkeypatch.setattr(
        ThinkingBudgetStateHolder, "_find_last_sequence_index", staticmethod(counted)
    )
    proposed = [5] * 4096
    one = Thinker(START, 1 << 20, proposed, [2, 3], proposed)
    assert one.write(begun=len(proposed) - 1) == proposed
    assert looked_at < 3 * len(proposed)
    assert Beginning.read < 3 * len(proposed)


def test_the_v2_runner_stays_as_it_is() -> None:
    """It derives all of it from the tokens."""
    own = ThinkingBudgetStateHolder.sync_batch
    count_sent_thoughts(V2)
    assert ThinkingBudgetStateHolder.sync_batch is own
