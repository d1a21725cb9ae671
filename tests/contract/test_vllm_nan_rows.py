"""Which requests have a NaN in their logits, by vLLM's own runners with our count in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample import sampler
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from holdfast.patches.engine import mark_nan_rows

CPU = torch.device("cpu")
REQUESTS = ["first", "second", "third"]
DRAFTS = [[1, 2], [], [3]]
"""So that the first has the rows 0 to 2, the second row 3, and the third the rows 4 and 5."""


@pytest.fixture(autouse=True)
def _vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put in the place of vLLM's code is taken back."""
    for owner, name in (
        (gpu_model_runner, "count_nans_per_row"),
        (gpu_model_runner.GPUModelRunner, "_sample"),
        (sampler, "get_num_nans"),
        (rejection_sampler, "get_num_nans"),
        (model_runner.GPUModelRunner, "sample"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def marks_of_v1(logits: torch.Tensor, drafts: list[list[int]] | None) -> list[int]:
    """Those of a step of the V1 runner."""
    runner: Any = SimpleNamespace(
        input_batch=SimpleNamespace(
            req_id_to_index={name: at for at, name in enumerate(REQUESTS)},
            sampling_metadata=None,
            update_async_output_token_ids=lambda: None,
        ),
        rejection_sampler=lambda *_: None,
        sampler=lambda **_: None,
        use_async_scheduling=False,
        _get_spec_decode_draft_probs=lambda _: None,
    )
    given = None if drafts is None else SpecDecodeMetadata.make_dummy(drafts, CPU)
    kind = gpu_model_runner.GPUModelRunner
    kind._sample(runner, logits, given)
    found = kind._get_nans_in_logits(runner, logits)
    return [found[name] for name in REQUESTS]


def marks_of_v2(logits: torch.Tensor, drafts: list[list[int]] | None) -> list[int]:
    """Those of a step of the V2 runner."""

    def sampled(given: torch.Tensor, *_: Any) -> Any:
        marks = rejection_sampler.get_num_nans(given)
        return SamplerOutput(
            NOTHING, None, num_nans=marks, num_sampled=NOTHING, num_rejected=NOTHING
        )

    rows = torch.tensor([1 + len(one) for one in drafts or [[]] * len(REQUESTS)])
    bounds = torch.tensor([0, *rows.cumsum(0).tolist()], dtype=torch.int32)
    batch: Any = SimpleNamespace(
        num_reqs=len(REQUESTS),
        num_draft_tokens=len(logits) - len(REQUESTS),
        logits_indices=torch.arange(len(logits)),
        cu_num_logits=bounds,
    )
    runner: Any = SimpleNamespace(
        batch_sharder=None,
        model=SimpleNamespace(compute_logits=lambda hidden: hidden),
        rejection_sampler=sampled,
        sampler=sampled,
        speculator=SimpleNamespace(draft_logits=None),
    )
    output, *_ = model_runner.GPUModelRunner.sample(runner, logits, batch, None)
    marks: list[int] = output.num_nans.tolist()
    return marks


NOTHING = torch.empty(0)
RUNNERS = [
    pytest.param(marks_of_v1, False, id="v1"),
    pytest.param(marks_of_v2, True, id="v2"),
]


def step(rows: int, *bad: int) -> torch.Tensor:
    """Logits with a NaN in each of these rows."""
    logits = torch.zeros(rows, 4)
    logits[list(bad), 1] = torch.nan
    return logits


@pytest.mark.parametrize(("marks", "is_second"), RUNNERS)
def test_a_request_has_the_marks_of_all_its_rows(marks: Any, *, is_second: bool) -> None:
    """Those of its drafts too: vLLM would give the second request the second row of the first."""
    mark_nan_rows(SimpleNamespace(use_v2_model_runner=is_second))
    assert marks(step(6, 0, 1, 2), DRAFTS) == [3, 0, 0]
    assert marks(step(6, 3), DRAFTS) == [0, 1, 0]
    assert marks(step(6, 5), DRAFTS) == [0, 0, 1]
    assert marks(step(6), DRAFTS) == [0, 0, 0]


@pytest.mark.parametrize(("marks", "is_second"), RUNNERS)
def test_without_drafts_each_request_has_its_row(marks: Any, *, is_second: bool) -> None:
    """Also in the step after one that had some."""
    mark_nan_rows(SimpleNamespace(use_v2_model_runner=is_second))
    marks(step(6), DRAFTS)
    assert marks(step(3, 1, 2), None) == [0, 1, 1]


def test_a_second_worker_in_the_process_changes_nothing() -> None:
    """An elastic engine makes another one."""
    for _ in range(2):
        mark_nan_rows(SimpleNamespace(use_v2_model_runner=False))
        mark_nan_rows(SimpleNamespace(use_v2_model_runner=True))
    assert marks_of_v1(step(6, 3), DRAFTS) == marks_of_v2(step(6, 3), DRAFTS) == [0, 1, 0]
