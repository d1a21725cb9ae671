"""The part of an engine's configuration that files and flags determine, without a device.

Its names are those of vLLM's configuration, so that a reserver can read either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config.model import (
    ModelConfig,
    _get_and_verify_max_len,
    try_match_architecture_defaults,
)
from vllm.engine import arg_utils
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum
from vllm.transformers_utils.config import (
    get_config,
    get_hf_text_config,
    get_pooling_config,
    get_sentence_transformer_tokenizer_config,
    try_get_tokenizer_config,
)
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)
from vllm.usage.usage_lib import UsageContext

from holdfast.planning.layout import refuse_layout
from holdfast.workspace.reservers import Device

DEVICES = {
    "gb10": Device("gb10", is_cuda=True, capability_major=12),
    "rtxpro6000": Device("rtxpro6000", is_cuda=True, capability_major=12),
    "h100": Device("h100", is_cuda=True, capability_major=9),
    "h200": Device("h200", is_cuda=True, capability_major=9),
    "b200": Device("b200", is_cuda=True, capability_major=10),
    "cpu": Device("cpu", is_cuda=False),
}
_MEMORY_GB = {"rtxpro6000": 102, "h100": 85, "h200": 150, "b200": 192}
"""The memory that their drivers report, in 10^9 bytes; NVML reports none for unified memory."""
_MINOR = {"gb10": 1}
"""The minor compute capability, unless it is 0."""
_DECODERS = ("ForCausalLM", "ForConditionalGeneration")
"""The ends of the names of vLLM's classes that have causal attention."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model's configuration, with the methods of vLLM's ModelConfig that reservers use."""

    hf_config: Any
    hf_text_config: Any
    architecture: Any
    max_model_len: int
    may_be_encoder: bool
    """Whether it is an encoder, which has no KV cache, or its code has to say so."""

    def get_head_size(self) -> int:
        """Return the size of one head, in elements."""
        return int(self.architecture.head_size)

    def get_num_attention_heads(self, parallel_config: Any) -> int:
        """Return the number of query heads of one rank."""
        heads = int(self.architecture.total_num_attention_heads)
        return heads // int(parallel_config.tensor_parallel_size)

    def get_num_kv_heads(self, parallel_config: Any) -> int:
        """Return the number of KV heads of one rank; ranks beyond the number of heads share."""
        heads = int(self.architecture.total_num_kv_heads)
        return max(1, heads // int(parallel_config.tensor_parallel_size))


@dataclass(frozen=True, slots=True)
class PlannedScheduler:
    """The sizes of a step; None if a size depends on an unknown device."""

    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    enable_chunked_prefill: bool | None


@dataclass(frozen=True, slots=True)
class PlannedCache:
    """How the KV cache is stored."""

    cache_dtype: str
    block_size: int | None
    enable_prefix_caching: bool | None


@dataclass(frozen=True, slots=True)
class PlannedConfig:
    """The part of vLLM's configuration that does not depend on the device."""

    model_config: PlannedModel
    parallel_config: Any
    scheduler_config: PlannedScheduler
    cache_config: PlannedCache
    attention_config: Any


def planned_config(
    arguments: AsyncEngineArgs, device: Device | None, *, is_named: bool
) -> PlannedConfig:
    """Read the configuration from the model's files, the flags and vLLM's defaults for `device`.

    vLLM's own errors about files that it cannot use pass through.

    Raises:
        UsageError: no engine can have this many ranks.
    """
    model = _read_model(arguments)
    heads = int(model.architecture.total_num_attention_heads)
    refuse_layout(arguments, heads, _shared_out_kv_heads(model))
    step_tokens, sequences = _sizes(arguments, model, device, is_named=is_named)
    attention = arguments.attention_config
    if arguments.attention_backend is not None:
        attention.backend = type(attention).validate_backend_before(arguments.attention_backend)
    return PlannedConfig(
        model_config=model,
        # The arguments have the same names as vLLM's ParallelConfig.
        parallel_config=arguments,
        scheduler_config=PlannedScheduler(step_tokens, sequences, arguments.enable_chunked_prefill),
        cache_config=PlannedCache(
            str(arguments.kv_cache_dtype), arguments.block_size, arguments.enable_prefix_caching
        ),
        attention_config=attention,
    )


def _shared_out_kv_heads(model: PlannedModel) -> int:
    """Return the number of KV heads that the ranks share out, 0 for a latent cache."""
    # With the code of Transformers, vLLM keeps a latent for every model that has this size.
    has_latent = (
        model.architecture.is_deepseek_mla
        or getattr(model.hf_text_config, "kv_lora_rank", None) is not None
    )
    if has_latent and not envs.VLLM_MLA_DISABLE:
        return 0
    return int(model.architecture.total_num_kv_heads)


def _read_model(arguments: AsyncEngineArgs) -> PlannedModel:
    hf_config = _hf_config(arguments)
    text_config = get_hf_text_config(hf_config)
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(hf_config.model_type, ModelArchConfigConvertorBase)
    converted = convertor(hf_config, text_config)
    architecture = converted.convert()
    is_pooling = _is_pooling(arguments, hf_config)
    max_model_len = _get_and_verify_max_len(
        hf_config=converted.hf_text_config,
        model_arch_config=architecture,
        tokenizer_config=_tokenizer_config(arguments, hf_config) if is_pooling else None,
        max_model_len=arguments.max_model_len,
        disable_sliding_window=arguments.disable_sliding_window,
        sliding_window=getattr(text_config, "sliding_window", None),
        # With a relative path, vLLM would look for it on the Hugging Face Hub.
        encoder_config=get_sentence_transformer_tokenizer_config(
            str(Path(arguments.model).absolute()), arguments.revision
        ),
    )
    is_causal = all(getattr(one, "is_causal", True) for one in (hf_config, text_config))
    may_be_encoder = not is_causal or (is_pooling and not _is_decoder(hf_config))
    return PlannedModel(hf_config, text_config, architecture, int(max_model_len), may_be_encoder)


def _hf_config(arguments: AsyncEngineArgs) -> Any:
    """Read the configuration as vLLM's ModelConfig does, which merges nested overrides into it."""
    overrides = arguments.hf_overrides
    given = {} if callable(overrides) else overrides
    nested = {name: value for name, value in given.items() if isinstance(value, dict)}
    hf_config = get_config(
        arguments.hf_config_path or arguments.model,
        arguments.trust_remote_code,
        arguments.revision,
        arguments.code_revision,
        arguments.config_format,
        hf_overrides_kw={name: given[name] for name in given if name not in nested},
        hf_overrides_fn=overrides if callable(overrides) else None,
    )
    # The method uses nothing of its object.
    ModelConfig._apply_dict_overrides(ModelConfig.__new__(ModelConfig), hf_config, nested)  # noqa: SLF001 - vLLM offers no other way
    return hf_config


def _tokenizer_config(arguments: AsyncEngineArgs, hf_config: Any) -> dict[str, Any] | None:
    """Return what may limit the prompt of a pooling model, if it is on this machine."""
    tokenizer = arguments.tokenizer or arguments.model
    if getattr(hf_config, "position_embedding_type", "") != "absolute":
        return None
    if not Path(tokenizer).is_dir():
        return None
    found: dict[str, Any] | None = try_get_tokenizer_config(
        tokenizer, trust_remote_code=arguments.trust_remote_code
    )
    return found


def _sizes(
    arguments: AsyncEngineArgs, model: PlannedModel, device: Device | None, *, is_named: bool
) -> tuple[int | None, int | None]:
    """Return `max_num_batched_tokens` and `max_num_seqs`, as given or by vLLM's default."""
    tokens, sequences = arguments.max_num_batched_tokens, arguments.max_num_seqs
    if device is None or (tokens is not None and sequences is not None):
        return tokens, sequences
    default_tokens, default_sequences = _default_sizes(arguments, device, is_named=is_named)
    factor = 2 if arguments.performance_mode == "throughput" else 1
    if sequences is None:
        sequences = default_sequences * factor
    if tokens is None and not _has_other_default(arguments, model, default_tokens * factor):
        tokens = default_tokens * factor
        if arguments.enable_chunked_prefill is False:
            tokens = max(tokens, model.max_model_len)
        tokens = min(tokens, sequences * model.max_model_len)
    if arguments.max_num_seqs is None and tokens is not None:
        sequences = min(sequences, tokens)
    return tokens, sequences


def _default_sizes(
    arguments: AsyncEngineArgs, device: Device, *, is_named: bool
) -> tuple[int, int]:
    world = arguments.pipeline_parallel_size * arguments.tensor_parallel_size
    with _defaults_for(device) if is_named else nullcontext():
        tokens, sequences = arguments.get_batch_defaults(world)
    return tokens[UsageContext.OPENAI_API_SERVER], sequences[UsageContext.OPENAI_API_SERVER]


@contextmanager
def _defaults_for(device: Device) -> Iterator[None]:
    """Make vLLM's defaults those for `device`, whatever this machine has."""
    found = arg_utils.current_platform
    arg_utils.current_platform = _platform(device)
    try:
        yield
    finally:
        arg_utils.current_platform = found


def _platform(device: Device) -> Platform:
    """Return a platform of vLLM's class that reports the numbers of `device`.

    If a query raises, vLLM assumes a small device, as it does for GB10: 0.32 because NVML does not
    report its memory, 0.33 by its compute capability (`EngineArgs.get_batch_defaults`).
    """

    class Named(Platform):  # type: ignore[misc]  # vLLM is Any to us
        _enum = PlatformEnum.CUDA if device.is_cuda else PlatformEnum.CPU

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            del device_id
            return device.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            del device_id
            return _MEMORY_GB[device.name] * 10**9

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            del device_id
            return DeviceCapability(device.capability_major, _MINOR.get(device.name, 0))

    return Named()


def _has_other_default(arguments: AsyncEngineArgs, model: PlannedModel, tokens: int) -> bool:
    """Return whether vLLM's default depends on more than the device: on images, experts or code.

    The code of a pooling model says whether a prompt may be split over steps. If it may not, a step
    takes in the longest.
    """
    is_batched = arguments.enable_expert_parallel and arguments.data_parallel_size > 1
    is_open = (
        arguments.enable_chunked_prefill is None
        and model.max_model_len > tokens
        and _is_pooling(arguments, model.hf_config)
    )
    return bool(model.architecture.is_mm_prefix_lm or is_batched or is_open)


def _is_pooling(arguments: AsyncEngineArgs, hf_config: Any) -> bool:
    """Return whether the model pools, by the flags and vLLM's rules for its files."""
    if arguments.runner != "auto":
        return bool(arguments.runner == "pooling")
    if arguments.convert not in {"auto", "none"}:
        return True
    if get_pooling_config(arguments.model, arguments.revision):
        return True
    names = hf_config.architectures or ()
    defaults = next(filter(None, map(try_match_architecture_defaults, names)), None)
    return defaults is not None and defaults[1][0] == "pooling"


def _is_decoder(hf_config: Any) -> bool:
    """Return whether vLLM's class for the model is one that generates text."""
    names = hf_config.architectures or ()
    known = (getattr(ModelRegistry.models.get(name), "class_name", name) for name in names)
    return any(name.endswith(_DECODERS) for name in known)
