"""Reads from the resolved VllmConfig the facts that probe and supervisor need."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.platforms import current_platform
from vllm.renderers.hf import HfRenderer

from holdfast import __version__
from holdfast.records import EngineFacts

_UNRELATED_VARIABLES = {
    # Paths, access, logging and reports do not change how much workspace is needed.
    "VLLM_API_KEY",
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
    "VLLM_CONFIGURE_LOGGING",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_DO_NOT_TRACK",
    "VLLM_HOST_IP",
    "VLLM_LOGGING_CONFIG_PATH",
    "VLLM_LOGGING_LEVEL",
    "VLLM_LOG_STATS_INTERVAL",
    "VLLM_MAX_N_SEQUENCES",
    "VLLM_NO_USAGE_STATS",
    "VLLM_PORT",
    "VLLM_RPC_BASE_PATH",
    "VLLM_USAGE_SOURCE",
    "VLLM_USAGE_STATS_SERVER",
}


def engine_facts(
    llm: Any, tasks: frozenset[str], *, fingerprint: str, has_template: bool, is_unified: bool
) -> EngineFacts:
    """Return the facts of a running AsyncLLM, whose configuration the engine has completed."""
    config = llm.vllm_config
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    tokenizer = llm.renderer.tokenizer
    return EngineFacts(
        model=_served_name(model),
        world=world(config),
        max_model_len=model.max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=getattr(scheduler, "max_num_active_seqs", None) or scheduler.max_num_seqs,
        kv_capacity_tokens=_kv_capacity_tokens(config),
        kv_block_tokens=cache.block_size or 1,
        vocab_size=_vocab_size(model, tokenizer),
        special_token_ids=frozenset(getattr(tokenizer, "all_special_ids", None) or ()),
        max_logprobs=model.max_logprobs,
        tasks=tasks,
        has_tokenizer=tokenizer is not None,
        has_chat_template=has_template or renders_chats(llm.renderer),
        has_prefix_caching=bool(cache.enable_prefix_caching),
        has_chunked_prefill=bool(scheduler.enable_chunked_prefill),
        is_encoder_decoder=bool(model.is_encoder_decoder),
        data_parallel_size=config.parallel_config.data_parallel_size,
        is_unified_memory=is_unified,
        fingerprint=fingerprint,
        max_queued_requests=getattr(scheduler, "max_num_queued_reqs", None),
        has_sleep_mode=bool(model.enable_sleep_mode),
        has_profiler=config.profiler_config.profiler is not None,
        has_lora=config.lora_config is not None,
        largest_image=_largest_image(llm),
        max_num_scheduled_tokens=getattr(scheduler, "max_num_scheduled_tokens", None),
        draft_tokens=config.num_speculative_tokens,
        draft_slots=_draft_slots(config),
        draft_lookahead_tokens=config.num_lookahead_tokens,
        long_prefill_tokens=scheduler.long_prefill_token_threshold or None,
        pipeline_stages=config.parallel_config.pipeline_parallel_size,
        kv_watermark=scheduler.watermark,
        kv_blocks=cache.num_gpu_blocks or 0,  # vLLM adds up those of all engines
        max_loras=config.lora_config.max_loras if config.lora_config is not None else 0,
        least_cached_tokens=_least_cached_tokens(config),
        max_answer_tokens=max_answer_tokens(model),
    )


def max_answer_tokens(model: Any) -> int | None:
    """Return the limit on every answer that the operator has set with a generation config.

    That of the model itself is only a default (`OpenAIServingCompletion`, 0.32, 0.33).
    """
    if model.generation_config in {"auto", "vllm"}:
        limit = model.override_generation_config.get("max_new_tokens")
    else:
        limit = model.get_diff_sampling_param().get("max_tokens")
    return None if limit is None else int(limit)


def _least_cached_tokens(config: Any) -> int:
    """Return the length of a block of all groups of the KV cache, as far as the front end knows.

    It is two blocks if drafting drops the last one that is found (`KVCacheCoordinator`, 0.32).
    """
    cache, speculation = config.cache_config, config.speculative_config
    further = ("effective_attention_block_size", "mamba_block_size")
    sizes = (cache.block_size, *(getattr(cache, name, None) for name in further))
    block_tokens = math.lcm(*filter(None, sizes))
    is_dropped = speculation is not None and speculation.use_eagle_block_drop()
    return 2 * block_tokens if is_dropped else block_tokens


def world(config: Any) -> tuple[tuple[int, int], ...]:
    """List every (engine, rank) that must report, on all nodes."""
    parallel = config.parallel_config
    return tuple(
        (engine, rank)
        for engine in range(parallel.data_parallel_size_local or 1)
        for rank in range(parallel.world_size)
    )


def local_ranks(config: Any) -> int:
    """Count the ranks on this node."""
    parallel = config.parallel_config
    return int((parallel.data_parallel_size_local or 1) * parallel.local_world_size)


def fingerprint(config: Any) -> str:
    """Return a digest of everything that the need for workspace depends on.

    The factors are those of vLLM's `startup_plan.compute_plan_fingerprint` without the rank, since
    all ranks have the same reservation, and without the size of the device's memory, on which no
    workspace depends and which changes with a virtual machine's memory balloon. Added are the
    model's whole configuration, sizes, backends, VLLM_* variables, the installed reservers and our
    version.
    """
    parallel, scheduler = config.parallel_config, config.scheduler_config
    factors = {
        "config": config.compute_hash(),
        "device": [
            current_platform.get_device_name(),
            str(current_platform.get_device_capability() or ""),
        ],
        "versions": [vllm_version, torch.__version__, torch.version.cuda or "", __version__],
        "world_size": parallel.world_size,
        "model": config.model_config.hf_config.to_json_string(),
        "sizes": [
            config.model_config.max_model_len,
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            parallel.data_parallel_size,
        ],
        "attention": str(getattr(config, "attention_config", "")),
        "kernels": str(getattr(config, "kernel_config", "")),
        "is_eager": config.model_config.enforce_eager,
        "variables": _related_variables(os.environ),
        "reservers": sorted(
            f"{point.value} {point.dist.version if point.dist else ''}"
            for point in entry_points(group="holdfast.reservers")
        ),
    }
    digest = hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()
    return digest[:24]


def common_fingerprint(config: Any) -> str:
    """Return the fingerprint that this VllmConfig has in common with those of the other nodes.

    Left out is what the head hands out, and vLLM hashes as the node has it: the model, which is a
    path below the user's home with HF_HUB_OFFLINE=1, and the revision, which is a branch, a commit
    or nothing.
    """
    common = copy.copy(config)
    common.model_config = _without_place(config.model_config)
    speculative = config.speculative_config
    # With n-grams, the draft is the target.
    if speculative is not None and speculative.draft_model_config is not None:
        common.speculative_config = copy.copy(speculative)
        draft = _without_place(speculative.draft_model_config)
        common.speculative_config.draft_model_config = draft
    return fingerprint(common)


def _without_place(model_config: Any) -> Any:
    common = copy.copy(model_config)
    common.model, common.revision = "", None
    return common


def _related_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("VLLM_") and name not in _UNRELATED_VARIABLES
    }


def _served_name(model: Any) -> str:
    name = model.served_model_name
    return str(name[0] if isinstance(name, list) else name)


def _kv_capacity_tokens(config: Any) -> int:
    cache = config.cache_config
    engines = config.parallel_config.data_parallel_size_local or 1
    blocks = (cache.num_gpu_blocks or 0) // engines
    if blocks <= 1:
        # A model without KV cache has one block (`get_kv_cache_config_from_groups`, 0.32).
        return 0
    return int(cache.kv_cache_size_tokens or blocks * (cache.block_size or 1))


def renders_chats(renderer: Any) -> bool:
    """Whether the tokenizer has a template, or vLLM's code stands for one, as for DeepSeek-V4."""
    if renderer.tokenizer is None:
        return False
    is_code = not isinstance(renderer, HfRenderer)
    return is_code or bool(getattr(renderer.tokenizer, "chat_template", None))


def _draft_slots(config: Any) -> int:
    """Return what the scheduler deducts from its budget per request (`Scheduler.schedule`)."""
    speculation = config.speculative_config
    return int(speculation.max_num_new_slots_for_drafting) if speculation is not None else 0


def _largest_image(llm: Any) -> tuple[int, int] | None:
    """Return the image size with which vLLM itself measures an encoder's memory.

    `BaseDummyInputsBuilder.get_dummy_mm_data` makes it, in the main process as in each worker, for
    a prompt of max_model_len.
    """
    model = llm.vllm_config.model_config
    if not model.is_multimodal_model:
        return None
    processor = llm.renderer.get_mm_processor()
    if not processor.info.allowed_mm_limits.get("image"):
        return None
    # The sizes of --limit-mm-per-prompt are left out: they bound the measurement, not a client.
    options = type(model.get_multimodal_config().limit_per_prompt)()
    made = processor.dummy_inputs.get_dummy_mm_data(model.max_model_len, {"image": 1}, options)
    images = made.get("image")
    size = getattr(images[0] if isinstance(images, list) else images, "size", None)
    return (int(size[0]), int(size[1])) if isinstance(size, tuple) else None


def _vocab_size(model: Any, tokenizer: Any) -> int:
    size = int(model.get_vocab_size())
    return min(size, len(tokenizer)) if tokenizer is not None else size
