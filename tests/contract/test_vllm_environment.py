"""vLLM's variables, which its front end reads for each token."""

from __future__ import annotations

import pytest
from vllm import envs
from vllm.v1.metrics import stats

from holdfast.patches.front_end import variables_read_once

VARIABLE = "VLLM_COMPUTE_NANS_IN_LOGITS"


def test_a_variable_is_read_once_while_an_engine_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the next engine is started with is read again."""
    monkeypatch.setenv(VARIABLE, "0")
    with variables_read_once():
        monkeypatch.setenv(VARIABLE, "1")
        assert not envs.VLLM_COMPUTE_NANS_IN_LOGITS
    assert envs.VLLM_COMPUTE_NANS_IN_LOGITS


def test_vllm_reads_one_for_each_token() -> None:
    """Once it does not, nothing is gained any more."""
    code = stats.IterationStats.update_from_output.__code__
    assert {"envs", VARIABLE} <= set(code.co_names)
