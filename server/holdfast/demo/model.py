"""vLLM's Llama, with a prefill scratch that grows with the context, and with faults to order.

The attention's queries stand in the workspace while the kernel reads them, so that a workspace that
is too small or shared shows in the tokens; otherwise nothing changes in the arithmetic. As with
DeepSeek-V4, a dummy run has no attention metadata and takes nothing. The scratch is taken inside
vLLM's attention operator, which no compiled or captured graph contains.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backend import subclass_attention_backend
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from holdfast.demo.damages import damage_weights, shifted, without_last_block
from holdfast.demo.steps import StepShape, commonest_count
from holdfast.demo.switches import (
    CONFIG_KEY,
    DemoFault,
    DemoSwitches,
    InjectedFaultError,
    scratch_rows,
)
from holdfast.errors import UsageError

_PREFIX = "HoldfastDemo"


class DemoAttention(LlamaAttention):  # type: ignore[misc] # vLLM is untyped
    """Llama's attention, whose kernel reads the queries of a prefill from the workspace."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        switches = _switches(config)
        self._scratch_bytes_per_token = switches.scratch_bytes_per_token
        self._stages_decodes = switches.stages_decodes
        self.attn.attn_backend = _with_step_shape(self.attn.attn_backend)
        self.attn.impl.forward = functools.partial(self._attend, self.attn.impl.forward)
        if switches.damage == "dropped_block":
            store = self.attn.impl.do_kv_cache_update
            step_tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens
            self.attn.impl.do_kv_cache_update = functools.partial(
                _store_damaged, store, step_tokens
            )

    def _attend(  # noqa: PLR0913, PLR0917 - the signature of vLLM's attention implementations
        self,
        attend: Callable[..., torch.Tensor],
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_metadata is not None and is_workspace_manager_initialized():
            step: StepShape = attn_metadata.holdfast_step
            if step.prefills or self._stages_decodes:
                query = self._staged(query[: step.scheduled_tokens], step)
        return attend(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)

    def _staged(self, query: torch.Tensor, step: StepShape) -> torch.Tensor:
        """`query`, copied to the end of a scratch with a row for each token of the context.

        A step of decodes alone has a row for each of its tokens: a graph of it knows no context.
        """
        row_bytes = query[0].numel() * query.element_size()
        if row_bytes > self._scratch_bytes_per_token:
            raise UsageError(
                f"A query takes {row_bytes} bytes, more than the demo model's "
                f"scratch_bytes_per_token of {self._scratch_bytes_per_token}.",
                remedy="Raise scratch_bytes_per_token, or split the model over more ranks.",
            )
        context_tokens = step.longest_context_tokens if step.prefills else 0
        rows = scratch_rows(context_tokens, step.scheduled_tokens)
        shape = (rows, self._scratch_bytes_per_token)
        (scratch,) = current_workspace_manager().get_simultaneous((shape, torch.uint8))
        staged = scratch[-len(query) :, :row_bytes].view(query.dtype).view(query.shape)
        staged.copy_(query)
        return staged


class DemoDecoderLayer(LlamaDecoderLayer):  # type: ignore[misc] # vLLM is untyped
    """Llama's layer with the demo's attention."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=DemoAttention)


class HoldfastDemoForCausalLM(LlamaForCausalLM):  # type: ignore[misc] # vLLM is untyped
    """The demo model: greedy tokens are those of Llama on the same weights.

    Faults strike outside the compiled part. On a GPU a step that replays a full graph runs no
    Python and so meets none.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=DemoDecoderLayer)
        self._rank: int = vllm_config.parallel_config.rank
        switches = _switches(vllm_config.model_config.hf_config)
        self._faults = switches.faults
        self._damage = switches.damage
        self._damage_start = switches.damage_start

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Llama's weights, and then the damage to them."""
        loaded: set[str] = super().load_weights(weights)
        damage_weights(self, self._damage)
        return loaded

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Llama's result, after the faults that are due in this step."""
        due = self._due_faults(input_ids) if self._faults else []
        for fault in due:
            _strike(fault)
        if self._damage == "shifted_positions":
            positions = shifted(positions, self._damage_start)
        output = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        effects = {fault.effect for fault in due}
        if not isinstance(output, torch.Tensor) or not effects & {"nan", "nan_row"}:
            return output
        rows = None if "nan" in effects else _step_shape().first_request_tokens
        damaged = output.clone()
        damaged[:rows] = torch.nan
        return damaged

    def _due_faults(self, input_ids: torch.Tensor | None) -> list[DemoFault]:
        if not get_forward_context().attn_metadata:
            return []
        step = _step_shape()
        if input_ids is not None and any(f.when == "repeated_tokens" for f in self._faults):
            token_ids = input_ids[: step.scheduled_tokens].tolist()
            step = replace(step, commonest_token_count=commonest_count(token_ids))
        return [f for f in self._faults if f.is_due(step, self._rank) and _is_armed(f)]


def _step_shape() -> StepShape:
    """The shape of the running step, which is not a dummy run."""
    shape: StepShape = next(iter(get_forward_context().attn_metadata.values())).holdfast_step
    return shape


def _store_damaged(
    store: Callable[..., None],
    step_tokens: int,
    layer: torch.nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Write to the KV cache, without the last block of a full chunk that continues a context."""
    if get_forward_context().attn_metadata:
        step = _step_shape()
        # What continues behind the prefix cache fills no step, and stays a sound reference.
        is_full = step.prefills and step.scheduled_tokens >= step_tokens
        if is_full and step.longest_context_tokens > step.scheduled_tokens:
            key = without_last_block(key, step.scheduled_tokens)
            value = without_last_block(value, step.scheduled_tokens)
    store(layer, key, value, *args, **kwargs)


def _switches(config: Any) -> DemoSwitches:
    return DemoSwitches.from_record(getattr(config, CONFIG_KEY, {}))


def _is_armed(fault: DemoFault) -> bool:
    """Whether it may strike; what arms it is used up."""
    if not fault.armed_by:
        return True
    try:
        Path(fault.armed_by).unlink()
    except FileNotFoundError:
        return False
    return True


def _strike(fault: DemoFault) -> None:
    if fault.effect == "raise":
        raise InjectedFaultError(f"The demo model was told to fail: {fault}.")
    if fault.effect == "crash":
        ctypes.string_at(0)  # reads from address 0, as a broken kernel may
    if fault.effect == "hang":
        threading.Event().wait()
    if fault.effect == "slow":
        time.sleep(fault.seconds)
    if not is_workspace_manager_initialized():
        return
    manager = current_workspace_manager()
    if fault.effect == "scratch":
        manager.get_simultaneous(((fault.scratch_bytes,), torch.uint8))
    if fault.effect == "persistent":
        key = f"holdfast_demo.{fault.when}.{fault.threshold}"
        manager.get_persistent(key, (fault.scratch_bytes,), torch.uint8)


@functools.cache
def _with_step_shape(backend: Any) -> Any:
    """`backend`, whose metadata carries a `StepShape`, made from what the host knows already."""
    builder = backend.get_builder_cls()

    def build(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        metadata = builder.build(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        metadata.holdfast_step = _shape_of(common_attn_metadata)
        return metadata

    step_shape_builder = type(_PREFIX + builder.__name__, (builder,), {"build": build})
    return subclass_attention_backend(_PREFIX, backend, step_shape_builder)


def _shape_of(common: Any) -> StepShape:
    starts = common.query_start_loc_cpu.tolist()
    contexts = common.seq_lens_cpu_upper_bound
    if contexts is None:
        contexts = common.seq_lens
    return StepShape.of(starts, contexts.tolist())
