"""The fused-MoE reserver against vLLM's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
    int4_w4a16_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import BatchedTritonExperts
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from holdfast.workspace.plan import Term
from holdfast.workspace.reservers import ReserverContext, Undetermined, moe
from layer_requests import request_meter

Asked = Callable[[Callable[[], object]], int]
NOTHING = torch.empty(0)


@pytest.fixture(name="asked_by")
def asked_by_fixture(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Records what the kernels request, which vLLM's CPU build does not let them do."""
    gpu = SimpleNamespace(is_cpu=lambda: False, is_rocm=lambda: False)
    monkeypatch.setattr(modular_kernel, "current_platform", gpu)
    monkeypatch.setattr(moe, "current_platform", gpu)
    return request_meter(monkeypatch)


class Experts(torch.nn.Module):  # type: ignore[misc]  # torch is Any to us
    """A layer of experts like vLLM's RoutedExperts, with weights that take no memory."""

    def __init__(self, config: Any, kernel: Any, *, is_packed: bool) -> None:
        super().__init__()
        count, hidden = config.num_local_experts, config.hidden_dim
        inner = config.intermediate_size_per_partition
        shapes = (
            ((count, hidden // 16, 4 * inner), (count, inner // 16, 2 * hidden))
            if is_packed
            else ((count, 2 * inner, hidden), (count, hidden, inner))
        )
        names = ("w13_qweight", "w2_qweight") if is_packed else ("w13_weight", "w2_weight")
        for name, shape in zip(names, shapes, strict=True):
            setattr(self, name, torch.empty(shape, device="meta"))
        self.weights = [getattr(self, name) for name in names]
        self.moe_config = config
        self.global_num_experts = config.num_experts
        self.activation = config.activation
        self.quant_method = SimpleNamespace(moe_kernel=kernel)


class Runner(torch.nn.Module):  # type: ignore[misc]  # as above
    """What stands between the experts and their wrapper, as vLLM's MoERunner."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.routed_experts = experts

    @property
    def _quant_method(self) -> Any:
        return self.routed_experts.quant_method


def with_lora(layer: Experts) -> Any:
    """vLLM's wrapper, without the weights of adapters."""
    wrapper = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    torch.nn.Module.__init__(wrapper)
    wrapper.base_layer = Runner(layer)
    return wrapper


def configuration(random: Random, *, data_parallel: int) -> Any:
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.dp_size = data_parallel
    experts = random.choice([4, 8, 64, 256])
    return FusedMoEConfig(
        num_experts=experts * data_parallel,
        experts_per_token=random.choice([1, 2, 4]),
        hidden_dim=64 * random.randint(4, 128),
        intermediate_size=64 * random.randint(2, 128),
        num_local_experts=experts,
        num_logical_experts=experts * data_parallel,
        activation=MoEActivation.SILU,
        device="meta",
        routing_method=RoutingMethodType.Default,
        moe_parallel_config=parallel,
        in_dtype=random.choice([torch.bfloat16, torch.float32]),
    )


def layer_of(kind: str, random: Random, config: Any) -> Experts:
    if kind == "batched":
        experts = BatchedTritonExperts(
            config,
            FUSED_MOE_UNQUANTIZED_CONFIG,
            max_num_tokens=random.choice([64, 256]),
            num_dispatchers=random.choice([1, 8]),
        )
    elif kind == "marlin":
        scales = torch.empty(1), torch.empty(1)
        experts = MarlinExperts(config, int4_w4a16_moe_quant_config(*scales, None, None))
    else:
        experts = TritonExperts(config, FUSED_MOE_UNQUANTIZED_CONFIG)
    no_output = SimpleNamespace(allocate_fused_expert_output=lambda *_: None)
    kernel = SimpleNamespace(impl=modular_kernel.FusedMoEKernelModularImpl(no_output, experts))
    return Experts(config, kernel, is_packed=kind == "marlin")


def full_step(layer: Experts, tokens: int) -> None:
    """vLLM's own kernel with `tokens` on this rank, from each data-parallel rank."""
    config, implementation = layer.moe_config, layer.quant_method.moe_kernel.impl
    experts = implementation.fused_experts
    shape: tuple[int, ...] = (tokens * config.dp_size, config.hidden_dim)
    if isinstance(experts, BatchedTritonExperts):
        rows = experts.max_num_tokens * experts.num_dispatchers
        shape = (config.num_local_experts, rows, config.hidden_dim)
    implementation._fused_experts(
        in_dtype=config.in_dtype,
        a1q=torch.empty(shape, device="meta"),
        a1q_scale=None,
        w1=layer.weights[0],
        w2=layer.weights[1],
        topk_weights=NOTHING,
        topk_ids=torch.empty((shape[0], config.experts_per_token), device="meta"),
        activation=layer.activation,
        global_num_experts=layer.global_num_experts,
        local_num_experts=config.num_local_experts,
        expert_map=None,
        apply_router_weight_on_input=False,
        expert_tokens_meta=None,
    )


def context(model: Any, tokens: int, hf_config: Any = None) -> ReserverContext:
    return ReserverContext(
        vllm_config=None,
        max_model_len=8192,
        max_num_batched_tokens=tokens,
        max_num_seqs=8,
        hf_config=hf_config,
        model=model,
    )


@pytest.mark.parametrize("kind", ["triton", "marlin", "batched"])
def test_the_term_is_what_the_kernels_ask_for(asked_by: Asked, kind: str) -> None:
    """Over 200 random models of two layers: the larger of them, and at most a tenth more."""
    random = Random(kind)
    for _ in range(200):
        data_parallel = random.choice([1, 4])
        layers = [
            layer_of(kind, random, configuration(random, data_parallel=data_parallel))
            for _ in range(2)
        ]
        tokens = random.randint(1, 32768)
        (term,) = moe.declare(context(torch.nn.ModuleList(layers), tokens))
        asked = max(asked_by(partial(full_step, layer, tokens)) for layer in layers)
        assert isinstance(term, Term)
        assert asked <= term.needed_bytes <= 1.1 * asked


def test_a_part_of_a_step_needs_no_more(asked_by: Asked) -> None:
    """The full step is the worst case of these kernels: fewer tokens need less."""
    random = Random(0)
    layer = layer_of("triton", random, configuration(random, data_parallel=1))
    (term,) = moe.declare(context(torch.nn.ModuleList([layer]), 8192))
    assert isinstance(term, Term)
    assert all(
        asked_by(partial(full_step, layer, tokens)) <= term.needed_bytes
        for tokens in (1, 7, 4096, 8191)
    )


@pytest.mark.usefixtures("asked_by")
def test_experts_with_lora_are_asked_alone() -> None:
    """The wrapper has their kernel too, but no weights; the kernels of adapters ask for nothing."""
    random = Random(4)
    layer = layer_of("triton", random, configuration(random, data_parallel=1))
    wrapped, bare = (
        list(moe.declare(context(torch.nn.ModuleList([model]), 8192)))
        for model in (with_lora(layer), layer)
    )
    assert wrapped == bare
    assert len(bare) == 1


@pytest.mark.usefixtures("asked_by")
@pytest.mark.parametrize(("lane", "tokens"), [(0, 8192), (1, 8 * (1 + 7))])
def test_the_experts_of_a_draft_are_asked_too(lane: int, tokens: int) -> None:
    """In its lane, for one of its steps, which in a lane of its own contains no prompt."""
    random = Random(3)
    target, draft = (
        torch.nn.ModuleList([layer_of("triton", random, configuration(random, data_parallel=1))])
        for _ in range(2)
    )
    speculative = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=7))
    both = replace(
        context(target, 8192), draft_model=draft, draft_lane=lane, vllm_config=speculative
    )
    own, drafts = moe.declare(both)
    (alone,) = moe.declare(context(draft, tokens))
    assert isinstance(own, Term)
    assert isinstance(drafts, Term)
    assert isinstance(alone, Term)
    assert own.lanes == (0,)
    assert (drafts.needed_bytes, drafts.lanes) == (alone.needed_bytes, (lane,))


def test_on_the_cpu_nothing_is_reserved() -> None:
    """vLLM's experts use no workspace there, so they declare nothing."""
    random = Random(0)
    layer = layer_of("triton", random, configuration(random, data_parallel=1))
    assert list(moe.declare(context(torch.nn.ModuleList([layer]), 8192))) == []


@pytest.mark.usefixtures("asked_by")
def test_a_model_without_experts_declares_nothing() -> None:
    """Modules without such a kernel are left alone."""
    assert list(moe.declare(context(torch.nn.ModuleList([torch.nn.Linear(1, 1)]), 64))) == []


@pytest.mark.parametrize(
    ("hf_config", "is_known"),
    [
        (SimpleNamespace(num_local_experts=8), False),
        (SimpleNamespace(text_config=SimpleNamespace(n_routed_experts=256)), False),
        (SimpleNamespace(num_experts=None), True),
        (None, True),
    ],
)
def test_without_a_model_the_kernel_is_unknown(hf_config: Any, is_known: bool) -> None:
    """`holdfast plan` has no layers, and says so for models with experts."""
    answers = list(moe.declare(context(None, 8192, hf_config)))
    assert bool(answers) is not is_known
    assert all(isinstance(answer, Undetermined) for answer in answers)
