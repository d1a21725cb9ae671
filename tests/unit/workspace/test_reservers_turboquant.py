"""The TurboQuant and UltraQuant reserver against vLLM's own builder and attention."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends import turboquant_attn

from holdfast.workspace.plan import Term
from holdfast.workspace.reservers import ReserverContext
from holdfast.workspace.reservers.turboquant import declare
from layer_requests import request_meter

Asked = Callable[[Callable[[], object]], int]


@pytest.fixture(name="asked_by")
def asked_by_fixture(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Records what is requested."""
    return request_meter(monkeypatch)


@pytest.fixture
def ultraquant(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's attention class; without a GPU, vLLM's stand-in for Triton lacks these names."""
    monkeypatch.setattr(tl, "float16", None, raising=False)
    monkeypatch.setattr(triton, "next_power_of_2", lambda number: number, raising=False)
    module = importlib.import_module("vllm.v1.attention.backends.ultraquant_attn")
    return module.UltraQuantAttentionImpl


def configuration(random: Random, packing: str) -> Any:
    """The part of vLLM's configuration that both vLLM's builder and the reserver read."""
    kv_heads = random.choice([1, 2, 4, 8])
    heads, head_size = kv_heads * random.choice([1, 4, 8]), random.choice([64, 128, 256])
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=random.randint(2048, 2 * 1024 * 1024),
            dtype=torch.bfloat16,
            get_num_attention_heads=lambda _parallel: heads,
            get_num_kv_heads=lambda _parallel: kv_heads,
            get_head_size=lambda: head_size,
        ),
        parallel_config=None,
        scheduler_config=SimpleNamespace(
            enable_chunked_prefill=True,
            max_num_batched_tokens=random.randint(129, 65536),
            max_num_seqs=random.randint(1, 1024),
        ),
        cache_config=SimpleNamespace(
            cache_dtype=packing,
            block_size=random.choice([16, 32, 64, 128]),
            enable_prefix_caching=True,
        ),
        attention_config=SimpleNamespace(
            tq_max_kv_splits_for_cuda_graph=random.choice([8, 32]),
        ),
    )


def declared(config: Any) -> list[Term]:
    return list(
        declare(
            ReserverContext(
                vllm_config=config,
                max_model_len=config.model_config.max_model_len,
                max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
                max_num_seqs=config.scheduler_config.max_num_seqs,
                hf_config=None,
            )
        )
    )


def decoding(attention: Any, config: Any) -> None:
    model = config.model_config
    heads, head_size = model.get_num_attention_heads(None), model.get_head_size()
    itself = SimpleNamespace(
        head_size=head_size,
        num_heads=heads,
        max_num_kv_splits=config.attention_config.tq_max_kv_splits_for_cuda_graph,
    )
    shape = (config.scheduler_config.max_num_seqs, heads, head_size)
    query = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    nothing = torch.empty(0)
    attention._decode_attention(itself, query, nothing, None, nothing, nothing)


def continuing(attention: Any, config: Any) -> None:
    """The next chunk of a request with the longest possible cached context."""
    model = config.model_config
    kv_heads, head_size = model.get_num_kv_heads(None), model.get_head_size()
    query = torch.empty(
        (129, model.get_num_attention_heads(None), head_size), device="meta", dtype=torch.bfloat16
    )
    chunk = torch.empty((129, kv_heads, head_size), device="meta")
    cache = torch.empty((1, config.cache_config.block_size, kv_heads, 128), device="meta")
    last = model.max_model_len
    if attention is turboquant_attn.TurboQuantAttentionImpl:
        itself = SimpleNamespace(_mse_bytes=1, _val_data_bytes=1)
        attention._continuation_prefill(
            itself, None, query, chunk, chunk, cache, chunk, last - 1, last, chunk, chunk
        )
    else:
        attention._ultraquant_continuation_prefill(
            SimpleNamespace(),
            layer=None,
            query=query,
            key_chunk=chunk,
            val_chunk=chunk,
            kv_cache=cache,
            block_table=chunk,
            cached_len=last - 1,
            seq_len=last,
            PiT=chunk,
        )


@pytest.mark.parametrize("family", ["TurboQuant", "UltraQuant"])
def test_each_term_is_what_the_attention_asks_for(
    asked_by: Asked, ultraquant: Any, family: str
) -> None:
    """Over 200 random configurations: no less, and at most a tenth more."""
    is_turbo, random = family == "TurboQuant", Random(family)
    attention = turboquant_attn.TurboQuantAttentionImpl if is_turbo else ultraquant
    for _ in range(200):
        config = configuration(random, "turboquant_k8v4" if is_turbo else "ultraquant_4bit")
        decode, continuation = declared(config)
        assert (decode.asked_by, continuation.asked_by) == (
            f"{family} decode",
            f"{family} continuation",
        )
        for term, ask in ((decode, decoding), (continuation, continuing)):
            asked = asked_by(partial(ask, attention, config))
            assert asked <= term.needed_bytes <= 1.1 * asked


def test_the_builder_of_vllm_asks_for_no_more(asked_by: Asked) -> None:
    """The first term is at least what vLLM reserves itself, too late for the KV cache."""
    random = Random(0)
    for _ in range(200):
        config = configuration(random, "turboquant_4bit_nc")
        builder = SimpleNamespace(
            vllm_config=config,
            kv_cache_spec=SimpleNamespace(
                num_kv_heads=config.model_config.get_num_kv_heads(None),
                head_size=config.model_config.get_head_size(),
                block_size=config.cache_config.block_size,
            ),
        )
        reserve = turboquant_attn.TurboQuantMetadataBuilder._reserve_workspace
        assert asked_by(partial(reserve, builder)) == declared(config)[0].needed_bytes


def test_a_cache_hit_continues_without_chunked_prefill() -> None:
    """vLLM reserves no continuation then, but a request with a cached prefix still needs it."""
    config = configuration(Random(1), "turboquant_k8v4")
    config.scheduler_config.enable_chunked_prefill = False
    assert [term.asked_by for term in declared(config)] == [
        "TurboQuant decode",
        "TurboQuant continuation",
    ]
    config.cache_config.enable_prefix_caching = False
    assert [term.asked_by for term in declared(config)] == ["TurboQuant decode"]


def test_short_steps_are_decoded() -> None:
    """With 128 tokens a step no continuation is long enough to be unpacked."""
    config = configuration(Random(2), "ultraquant_4bit")
    config.scheduler_config.max_num_batched_tokens = 128
    assert [term.asked_by for term in declared(config)] == ["UltraQuant decode"]


def test_an_unknown_block_size_is_the_largest() -> None:
    """`holdfast plan` may not know it: the bound then covers each that the kernels support."""
    config = configuration(Random(3), "turboquant_k8v4")
    config.cache_config.block_size = None
    unknown = declared(config)[1].needed_bytes
    config.cache_config.block_size = 128
    assert declared(config)[1].needed_bytes == unknown


def test_other_caches_declare_nothing() -> None:
    """A KV cache in another format is left alone."""
    assert declared(configuration(Random(4), "fp8")) == []
