"""The arithmetic of the Lamport workspace against vLLM's own, and what its cache holds."""

from __future__ import annotations

import importlib
import sys
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from holdfast.workspace.reservers import Device, ReserverContext, Undetermined
from holdfast.workspace.reservers.lamport import (
    buffer_bytes,
    declare,
    lamport_bytes,
    workspace_bytes,
)

NAME = "vllm.model_executor.layers.minimax_rms_norm.lamport_workspace"
HOPPER = Device("h100", is_cuda=True, capability_major=9)


@pytest.fixture
def vllms(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module, which needs the CUDA bindings only to allocate."""
    bindings = ModuleType("cuda")
    vars(bindings)["cudart"] = ModuleType("cuda.cudart")
    monkeypatch.setitem(sys.modules, "cuda", bindings)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


def test_the_size_is_that_of_vllm(vllms: Any) -> None:
    """Over 200 random configurations, to the byte."""
    random = Random(3)
    for _ in range(200):
        tokens, ranks = random.randint(1, 65536), random.randint(2, 72)
        expected = vllms.LamportWorkspace.compute_comm_size_for_minimax(tokens, ranks)
        assert buffer_bytes(tokens, ranks) == expected
        assert workspace_bytes(tokens, ranks) == 3 * expected


def test_what_vllm_caches_is_counted(vllms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through vLLM's own cache: each workspace once, three buffers each."""
    monkeypatch.setattr(
        vllms,
        "LamportWorkspace",
        type(
            "WithoutGPU",
            (vllms.LamportWorkspace,),
            {"__init__": _remember_size, "workspace": None, "__del__": lambda _self: None},
        ),
    )
    assert lamport_bytes() == 0
    for tokens in (2048, 2048, 65536):
        vllms.get_allreduce_workspace(0, 8, max_tokens=tokens)
    assert lamport_bytes() == workspace_bytes(2048, 8) + workspace_bytes(65536, 8)


def _remember_size(
    itself: Any, _rank: int, _world_size: int, comm_size: int, _group: object = None
) -> None:
    itself.comm_size = comm_size


def test_a_process_without_the_module_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of other families never import it."""
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    assert lamport_bytes() == 0


def test_the_module_may_move(vllms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found wherever a version of vLLM keeps it, and counted once under two names."""
    vllms._workspace_cache["any"] = SimpleNamespace(comm_size=2)
    monkeypatch.setitem(sys.modules, "vllm.elsewhere.lamport_workspace", vllms)
    assert lamport_bytes() == 6


def test_vllm_still_limits_the_fused_kernel_to_the_same_tokens() -> None:
    """The number of tokens behind the size is vLLM's."""
    from vllm.model_executor.layers.minimax_rms_norm import rms_norm_tp

    assert rms_norm_tp.MINIMAX_QK_NORM_MAX_TOKEN_NUM == 2048


@pytest.mark.parametrize(
    ("architecture", "ranks", "device", "answers"),
    [
        ("MiniMaxM2ForCausalLM", 8, HOPPER, 1),
        ("MiniMaxM2ForCausalLM", 1, HOPPER, 0),
        ("MiniMaxM2ForCausalLM", 8, Device("cpu", is_cuda=False), 0),
        ("LlamaForCausalLM", 8, HOPPER, 0),
    ],
)
def test_a_plan_says_what_it_cannot_know(
    architecture: str, ranks: int, device: Device, answers: int
) -> None:
    """Whether the GPUs reach each other's memory decides, and no slot holds it."""
    context = ReserverContext(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        ),
        max_model_len=1,
        max_num_batched_tokens=1,
        max_num_seqs=1,
        hf_config=SimpleNamespace(architectures=[architecture]),
        device=device,
    )
    answered = list(declare(context))
    assert len(answered) == answers
    assert all(isinstance(answer, Undetermined) for answer in answered)
