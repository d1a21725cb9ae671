"""The DeepSeek reserver against vLLM's own layers and the known table of sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v4 import configuration_deepseek_v4
from vllm.forward_context import override_forward_context
from vllm.models.deepseek_v4.nvidia import flashmla as v4
from vllm.models.deepseek_v41.nvidia import flash_mla_mega_attn as v41_mega
from vllm.models.deepseek_v41.nvidia import flashmla as v41
from vllm.transformers_utils.configs.deepseek_v4 import DeepseekV4Config
from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from holdfast.workspace.plan import MIB, Term, WorkspaceSpec, plan_reservations
from holdfast.workspace.reservers import Device, ReserverContext, Undetermined, deepseek
from holdfast.workspace.reservers.deepseek import PrefillSizes, declare, layer_bytes, prefill_bytes
from layer_requests import request_meter

M_TOKENS = 1024 * 1024
HOPPER = Device("h100", is_cuda=True, capability_major=9)
GB10 = Device("gb10", is_cuda=True, capability_major=12)
Asked = Callable[[Callable[[], object]], int]


@pytest.fixture(name="asked_by")
def asked_by_fixture(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Records what a layer requests."""
    return request_meter(monkeypatch)


def on_meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("max_model_len", "step_tokens", "few_mib", "all_mib"),
    [
        (M_TOKENS, 8192, 1076.5, 324.5),
        (M_TOKENS, 32768, 1232.6, 1200.6),
        (M_TOKENS, 65536, 1440.8, 2368.8),
        (M_TOKENS // 2, 65536, 928.8, 1328.8),
        (M_TOKENS // 4, 65536, 672.8, 808.8),
    ],
)
def test_the_known_sizes_come_out(
    max_model_len: int, step_tokens: int, few_mib: float, all_mib: float
) -> None:
    """Layers with ratio 4 and with ratio 128 need what the audit of vLLM's source found."""
    sizes = PrefillSizes(max_model_len, step_tokens, 128, 512, 512, ratios=(0, 4, 128))
    assert layer_bytes(sizes, 4) / MIB == pytest.approx(few_mib, abs=0.051)
    assert layer_bytes(sizes, 128) / MIB == pytest.approx(all_mib, abs=0.051)
    assert prefill_bytes(sizes) == max(layer_bytes(sizes, 4), layer_bytes(sizes, 128))


def random_sizes(random: Random, ratios: tuple[int, ...]) -> PrefillSizes:
    return PrefillSizes(
        max_model_len=random.randint(256, 2 * M_TOKENS),
        max_num_batched_tokens=random.randint(64, 70_000),
        window_tokens=random.choice([64, 128, 512]),
        head_size=random.choice([128, 512, 576]),
        index_topk=random.choice([128, 512, 1024, 2048]),
        image_tokens=random.choice([0, 384]) if 128 in ratios else 0,
        ratios=ratios,
    )


def layer(kind: Any, sizes: PrefillSizes, ratio: int) -> Any:
    """The attributes that a method of the attention layer reads."""
    index = torch.empty(
        (sizes.max_num_batched_tokens, sizes.index_topk), device="meta", dtype=torch.int32
    )
    return SimpleNamespace(
        PREFILL_CHUNK_SIZE=kind.PREFILL_CHUNK_SIZE,
        compress_ratio=ratio,
        max_model_len=sizes.max_model_len,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        window_size=sizes.window_tokens,
        max_image_tokens=sizes.image_tokens,
        topk_indices_buffer=index,
    )


def profiled(kind: Any, sizes: PrefillSizes, ratio: int) -> None:
    query = on_meta(1, 64, sizes.head_size)
    with override_forward_context(SimpleNamespace(attn_metadata=None)):
        kind.forward_mqa(layer(kind, sizes, ratio), query, query, query, query)


def served(kind: Any, sizes: PrefillSizes, ratio: int) -> None:
    """A step of requests as long as they may be, each with one new token, cut as vLLM cuts it."""
    width = -(-sizes.max_model_len // ratio) + sizes.window_tokens
    requests = 4 * (width + sizes.max_num_batched_tokens) // width
    requests = min(requests, sizes.max_num_batched_tokens)
    seen = torch.full((requests,), sizes.max_model_len, dtype=torch.int64)
    metadata = SimpleNamespace(
        num_prefills=requests,
        num_decodes=0,
        num_decode_tokens=0,
        num_prefill_tokens=requests,
        prefill_seq_lens=seen,
        prefill_gather_lens=seen,
        prefill_seq_lens_cpu=seen,
        prefill_query_lens_cpu=torch.ones_like(seen),
        prefill_window_size=sizes.window_tokens,
        prefill_max_model_len=sizes.max_model_len,
        prefill_max_num_batched_tokens=sizes.max_num_batched_tokens,
        query_start_loc=torch.arange(requests + 1),
        query_start_loc_cpu=torch.arange(requests + 1),
    )
    metadata.get_prefill_chunk_plan = partial(
        DeepseekSparseSWAMetadata.get_prefill_chunk_plan, metadata
    )
    # As wide as the buffer that DeepseekV4SparseMLAMetadataBuilder allocates.
    compressed = -(-sizes.max_model_len // ratio)
    index = torch.empty((requests, -(-compressed // 128) * 128), device="meta")
    kind._forward_prefill(
        layer(kind, sizes, ratio),
        q=on_meta(requests, 64, sizes.head_size),
        positions=seen,
        compressed_k_cache=None,
        swa_k_cache=None,
        output=on_meta(requests, 64, sizes.head_size),
        attn_metadata=SimpleNamespace(c128a_prefill_topk_indices=index),
        swa_metadata=metadata,
    )


def test_version_4_declares_what_its_layers_ask_for(asked_by: Asked) -> None:
    """Over 200 random configurations: never less than any layer, at most a tenth more than all."""
    random, kind = Random(4), v4.DeepseekV4FlashMLAAttention
    for _ in range(200):
        sizes = random_sizes(random, random.choice([(0,), (0, 4), (0, 128), (0, 4, 128)]))
        asked = [
            asked_by(partial(ask, kind, sizes, max(1, ratio)))
            for ratio in sizes.ratios
            for ask in ((profiled, served) if ratio else (profiled,))
        ]
        assert max(asked) <= prefill_bytes(sizes) <= 1.1 * max(asked)


@pytest.mark.parametrize("is_mega", [False, True])
def test_version_4_1_declares_what_its_layers_ask_for(asked_by: Asked, is_mega: bool) -> None:
    """Over 200 random configurations, for both of its attention kernels."""
    random = Random(41)
    for _ in range(200):
        sizes = random_sizes(random, random.choice([(0,), (0, 1), (0, 2), (0, 1, 2)]))
        if is_mega:
            mega = v41_mega.DeepseekV4MegaAttnAttention
            query = on_meta(1, 64, sizes.head_size)
            asked = [
                asked_by(partial(mega._reserve_prefill_workspace, layer(mega, sizes, ratio), query))
                for ratio in sizes.ratios
            ]
        else:
            kind = v41.DeepseekV4FlashMLAAttention
            asked = [asked_by(partial(profiled, kind, sizes, ratio)) for ratio in sizes.ratios]
        assert max(asked) <= prefill_bytes(sizes) <= 1.1 * max(asked)


def test_vllm_leaves_out_the_wide_index(asked_by: Asked) -> None:
    """With ratio 128 a served step needs more than vLLM's profile run reserved; ours covers it."""
    sizes = PrefillSizes(M_TOKENS, 65536, 128, 512, 512, ratios=(0, 128))
    kind = v4.DeepseekV4FlashMLAAttention
    reserved = asked_by(partial(profiled, kind, sizes, 128))
    needed = asked_by(partial(served, kind, sizes, 128))
    assert reserved < needed <= prefill_bytes(sizes)


def context(hf_config: Any, device: Device | None, backend: str | None = None) -> ReserverContext:
    chosen = SimpleNamespace(name=backend) if backend else None
    return ReserverContext(
        vllm_config=SimpleNamespace(attention_config=SimpleNamespace(backend=chosen)),
        max_model_len=M_TOKENS,
        max_num_batched_tokens=65536,
        max_num_seqs=8,
        hf_config=hf_config,
        device=device,
    )


def version_4(**changed: Any) -> Any:
    return DeepseekV4Config(
        compress_ratios=[0, 4, 128], sliding_window=128, head_dim=512, index_topk=512, **changed
    )


def test_the_model_is_read_from_its_configuration() -> None:
    """The kinds of layers, the window and the images come from the configuration."""
    sizes = PrefillSizes(M_TOKENS, 65536, 128, 512, 512, ratios=(0, 4, 128))
    expected = Term("declared", "DeepSeek-V4 prefill", prefill_bytes(sizes))
    assert list(declare(context(version_4(), HOPPER))) == [expected]
    (with_images,) = declare(context(version_4(vision_n_layers=2), HOPPER))
    assert isinstance(with_images, Term)
    assert with_images.needed_bytes == expected.needed_bytes + 65536 * 384 * 4


def test_the_configuration_of_transformers_is_read_too() -> None:
    """vLLM 0.33 uses the class of transformers, which has a rate per kind of layer."""
    ratios = {"compress_ratios": [0, 4, 128], "num_hidden_layers": 3}
    sizes = {"sliding_window": 128, "head_dim": 512, "index_topk": 512}
    theirs = configuration_deepseek_v4.DeepseekV4Config(**ratios, **sizes)
    assert not hasattr(theirs, "compress_ratios")
    assert list(declare(context(theirs, HOPPER))) == list(declare(context(version_4(), HOPPER)))


def test_a_draft_of_dspark_is_not_reserved_the_targets_prefill() -> None:
    """It attends to a window, in a lane of its own, where a gigabyte would stay unused."""
    spec = WorkspaceSpec("stats", 1, 0, 0.0, "alongside", None)
    declared = [term for term in declare(context(version_4(), HOPPER)) if isinstance(term, Term)]
    target, draft = plan_reservations(spec, [(0, 0), (0, 1)], declared)
    assert target.size_bytes > 1000 * MIB
    assert draft.size_bytes == 0


def test_a_ratio_of_one_has_a_full_cache_in_version_4_1_alone() -> None:
    """The same list of ratios means another kind of layer in each version."""
    text = {
        "compress_ratios": [0, 1],
        "sliding_window": 128,
        "head_dim": 512,
        "index_topk": 512,
    }
    (newer,) = declare(context(DeepseekV41Config(text_config=text), HOPPER))
    (older,) = declare(context(DeepseekV4Config(**text), HOPPER))
    assert isinstance(newer, Term)
    assert isinstance(older, Term)
    assert newer.needed_bytes > 4 * M_TOKENS * 512 * 2 > older.needed_bytes


@pytest.mark.parametrize(
    ("device", "backend", "terms"),
    [
        (HOPPER, None, 1),
        (GB10, None, 0),
        (GB10, "FLASHMLA_SPARSE_DSV4", 1),
        (HOPPER, "FLASHINFER_MLA_SPARSE_DSV4", 0),
        (HOPPER, "FLASHINFER_MLA_SPARSE_DSV41", 0),
        (GB10, "FLASHMLA_SPARSE_DSV41", 1),
    ],
)
def test_only_the_kernels_that_use_the_workspace_reserve(
    device: Device, backend: str | None, terms: int
) -> None:
    """FlashInfer, vLLM's default on GB10 and RTX PRO 6000, has its own buffer."""
    assert len(list(declare(context(version_4(), device, backend)))) == terms


def test_other_devices_are_not_guessed() -> None:
    """On the CPU, vLLM has no such kernel, and only that is declared."""
    (answer,) = declare(context(version_4(), Device("cpu", is_cuda=False)))
    assert isinstance(answer, Undetermined)


def test_other_models_declare_nothing() -> None:
    """A configuration of another kind is left alone."""
    assert list(declare(context(SimpleNamespace(model_type="llama"), HOPPER))) == []
    assert list(declare(context(None, HOPPER))) == []


@pytest.mark.parametrize(
    "name", [name for name in AttentionBackendEnum.__members__ if "DSV4" in name]
)
def test_every_backend_of_these_models_is_known(name: str) -> None:
    """The names are vLLM's, so that a named kernel is not taken for the device's default."""
    lists = [names for names in (deepseek._FLASHINFER, deepseek._FLASHMLA) if name in names]
    assert len(lists) == (0 if name.startswith("ROCM_") else 1)
