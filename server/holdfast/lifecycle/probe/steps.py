"""The steps by name, and to which engines each does not apply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

from holdfast.lifecycle.probe.batches import batch_sweep, full_batch
from holdfast.lifecycle.probe.bench import Bench
from holdfast.lifecycle.probe.contexts import (
    context_sweep,
    first_token,
    full_context,
    prefix_continuation,
)
from holdfast.lifecycle.probe.decodes import mixed, widest_decode
from holdfast.lifecycle.probe.finding import Finding
from holdfast.lifecycle.probe.firsts import first_adapter, first_image
from holdfast.lifecycle.probe.sizes import hears_alone, is_pooling
from holdfast.records import EngineFacts, StepName

Step = Callable[[Bench], Awaitable[Finding]]

STEPS: Mapping[StepName, Step] = MappingProxyType(
    {
        "first_token": first_token,
        "context_sweep": context_sweep,
        "full_context": full_context,
        "prefix_continuation": prefix_continuation,
        "batch_sweep": batch_sweep,
        "full_batch": full_batch,
        "widest_decode": widest_decode,
        "mixed": mixed,
        "first_image": first_image,
        "first_adapter": first_adapter,
    }
)

_SERVED_TASKS = frozenset({"generate", "embed", "classify", "token_classify", "token_embed"})
_COMPOSED: frozenset[StepName] = frozenset({"batch_sweep", "full_batch"})
_DECODING: frozenset[StepName] = frozenset({"prefix_continuation", "widest_decode", "mixed"})


def why_not(step: StepName, facts: EngineFacts) -> str:
    """Why the step does not apply to the engine; empty if it does."""
    if step == "first_token" and hears_alone(facts):
        return ""
    pools = is_pooling(facts)
    is_scattered = pools and facts.data_parallel_size > 1
    rules = (
        (facts.is_encoder_decoder, "an encoder-decoder model accepts no prompt of bare tokens"),
        (not facts.tasks & _SERVED_TASKS, "the model supports no task with a prompt of tokens"),
        (pools and step in _DECODING, "a pooling model does not decode"),
        (is_scattered and step in _COMPOSED, "pooling requests cannot choose their engine"),
        (step == "prefix_continuation" and not facts.has_prefix_caching, "prefix caching is off"),
        (step == "mixed" and facts.max_num_seqs < 2, "the engine runs one request at a time"),
        (step == "first_image" and not facts.largest_image, "the model accepts no images"),
        (step == "first_image" and pools, "a pooling model does not answer chats"),
        (step == "first_image" and not facts.has_chat_template, "there is no chat template"),
        (step == "first_adapter" and not facts.has_lora, "LoRA is off"),
    )
    return next((reason for applies, reason in rules if applies), "")
