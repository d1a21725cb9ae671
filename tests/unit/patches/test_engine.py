"""Which seeds a model runner on the CPU may use in a step, and which rows have a NaN."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.patches.engine import marked_nan_rows, withhold_unused_seeds


def _runner(device: str = "cpu") -> Any:
    """A runner with three seeded requests, the second in mid-prompt; it records what it may use."""
    batch = SimpleNamespace(generators={0: "a", 1: "b", 2: "c"})
    runner = SimpleNamespace(
        device=SimpleNamespace(type=device),
        input_batch=batch,
        discard_request_mask=SimpleNamespace(np=[False, True, False]),
        seen=[],
    )

    def sample_tokens(grammar: str) -> str:
        runner.seen.append(dict(batch.generators))
        if grammar == "broken":
            raise RuntimeError("on purpose")
        return f"sampled {grammar}"

    runner.sample_tokens = sample_tokens
    return runner


def test_a_draw_that_is_discarded_comes_from_no_seed() -> None:
    """The generator is back for the next step, in the same row."""
    runner = _runner()
    withhold_unused_seeds(runner)
    assert runner.sample_tokens("x") == "sampled x"
    assert runner.seen == [{0: "a", 2: "c"}]
    assert runner.input_batch.generators == {0: "a", 1: "b", 2: "c"}


def test_the_generators_are_back_after_a_failure() -> None:
    """The batch is complete again afterwards."""
    runner = _runner()
    withhold_unused_seeds(runner)
    with pytest.raises(RuntimeError):
        runner.sample_tokens("broken")
    assert runner.input_batch.generators == {0: "a", 1: "b", 2: "c"}


def test_other_devices_are_left_alone() -> None:
    """Their generators have offsets, by which vLLM takes a draw back."""
    runner = _runner("cuda")
    sample_tokens = runner.sample_tokens
    withhold_unused_seeds(runner)
    assert runner.sample_tokens is sample_tokens


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_with_a_nan_is_marked(kind: torch.dtype) -> None:
    """Infinities are none: a grammar forbids by them."""
    nothing, everything = -torch.inf, torch.inf
    rows = [[1.0, 2.0], [torch.nan, 2.0], [2.0, torch.nan], [nothing, nothing], [everything, 1.0]]
    marked = marked_nan_rows(torch.tensor(rows, dtype=kind))
    assert marked.dtype == torch.int32
    assert marked.tolist() == [0, 1, 1, 0, 0]
    assert marked_nan_rows(torch.empty(0, 7, dtype=kind)).tolist() == []
