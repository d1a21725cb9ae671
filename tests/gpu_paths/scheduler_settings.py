"""vLLM's configuration of a scheduler and its KV cache, for each way to draft, cache and run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from fake_engine import Body

Groups = Literal["full", "full and window", "window", "full and mamba"]
WINDOW_TOKENS = 64
MAMBA_BLOCK_TOKENS = 128
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"method": "ngram"},
    "ngram_gpu": {"method": "ngram_gpu"},
    "suffix": {"method": "suffix"},
    "medusa": {"method": "medusa"},
    "mlp_speculator": {"method": "mlp_speculator"},
    "eagle": {"method": "eagle"},
    "eagle3": {"method": "eagle3"},
    "mtp": {"method": "mtp"},
    "draft_model": {"method": "draft_model"},
    "P-EAGLE": {"method": "eagle3", "parallel_drafting": True},
    "PARD": {"method": "draft_model", "parallel_drafting": True},
    "DFlash": {"method": "dflash", "parallel_drafting": True},
    "DSpark": {"method": "dspark", "parallel_drafting": True},
}
"""The rows of `SpeculativeConfig.max_num_new_slots_for_drafting`, and the methods without a row."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How an engine is configured, as far as its scheduler asks."""

    method: str = "none"
    draft_tokens: int = 3
    is_chunked: bool = True
    is_async: bool = False
    has_second_runner: bool = False
    """Whether the workers run vLLM's second model runner, the default on GPUs."""
    pipeline_stages: int = 1
    engines: int = 1
    has_lora: bool = False
    has_prefix_caching: bool = True
    groups: Groups = "full"
    blocks: int | None = None
    """Blocks of KV cache; None for as many as one request of `max_model_len` needs."""
    max_model_len: int = 600
    step_tokens: int = 640
    step_requests: int = 24
    others: Body = field(default_factory=dict)
    """Further settings of the scheduler."""


@contextmanager
def decoder_configuration(directory: Path) -> Iterator[Any]:
    """vLLM's configuration of a model with a decoder alone."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from holdfast import demo
    from holdfast.demo.files import ensure_demo_model

    demo.register()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        arguments = AsyncEngineArgs(model=str(ensure_demo_model(directory)), enforce_eager=True)
        yield arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def configured(base: Any, setting: Setting) -> tuple[Any, Any]:
    """vLLM's configuration and KV cache for `setting`, made from the one of a running model."""
    config = copy.deepcopy(base)
    config.model_config.max_model_len = setting.max_model_len
    scheduler, cache = config.scheduler_config, config.cache_config
    scheduler.max_num_batched_tokens = setting.step_tokens
    scheduler.max_num_scheduled_tokens = None
    scheduler.max_num_seqs = setting.step_requests
    scheduler.enable_chunked_prefill = setting.is_chunked
    scheduler.async_scheduling = setting.is_async
    config.parallel_config.pipeline_parallel_size = setting.pipeline_stages
    config.parallel_config.data_parallel_size = setting.engines
    config.parallel_config.data_parallel_size_local = setting.engines
    cache.enable_prefix_caching = setting.has_prefix_caching
    config.speculative_config = _speculation(setting)
    config.lora_config = _lora() if setting.has_lora else None
    config._set_max_num_scheduled_tokens()
    for name, value in setting.others.items():
        setattr(scheduler, name, value)
    kv_cache = _kv_cache(config, setting)
    from vllm.v1.core.kv_cache_utils import update_kv_cache_capacity

    cache.num_gpu_blocks = kv_cache.num_blocks * setting.engines
    update_kv_cache_capacity(config, kv_cache)
    return config, kv_cache


def _speculation(setting: Setting) -> Any:
    """vLLM's own record, past the reading of a draft model that no scheduler asks."""
    from vllm.config import SpeculativeConfig

    if setting.method == "none":
        return None
    made = SpeculativeConfig(method="ngram", num_speculative_tokens=setting.draft_tokens)
    for name, value in METHODS[setting.method].items():
        setattr(made, name, value)
    made.draft_model_config = SimpleNamespace(hf_config=SimpleNamespace())
    return made


def _lora() -> Any:
    from vllm.config.lora import LoRAConfig

    return LoRAConfig(max_lora_rank=8, max_loras=1)


def _kv_cache(config: Any, setting: Setting) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    full = FullAttentionSpec(**shape)
    window = SlidingWindowSpec(**shape, sliding_window=WINDOW_TOKENS)
    config.cache_config.block_size = 16
    config.cache_config.mamba_cache_mode = "none"
    specs = {"full": [full], "full and window": [full, window, window], "window": [window]}
    if setting.groups == "full and mamba":
        mode = "align" if setting.has_prefix_caching else "none"
        config.cache_config.mamba_cache_mode = mode
        config.cache_config.block_size = MAMBA_BLOCK_TOKENS
        full = FullAttentionSpec(**{**shape, "block_size": MAMBA_BLOCK_TOKENS})
        mamba = MambaSpec(
            block_size=MAMBA_BLOCK_TOKENS if mode == "align" else setting.max_model_len,
            shapes=((16, 16),),
            dtypes=(torch.float32,),
            page_size_padded=full.page_size_bytes,
            mamba_cache_mode=mode,
            num_speculative_blocks=config.num_speculative_tokens,
        )
        specs["full and mamba"] = [full, mamba]
    groups = [KVCacheGroupSpec([f"layer{i}"], one) for i, one in enumerate(specs[setting.groups])]
    blocks = setting.blocks or 1 + sum(
        -(
            -group.kv_cache_spec.max_memory_usage_bytes(config)
            // group.kv_cache_spec.page_size_bytes
        )
        for group in groups
    )
    if setting.groups == "full and mamba" and not setting.blocks:
        # With no more than it says that it needs, vLLM preempts its only request forever (0.32).
        blocks += 2 + config.num_speculative_tokens
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
