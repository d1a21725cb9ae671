"""Loads LoRA adapters into a worker, for the front end."""

from __future__ import annotations

from typing import Any

from holdfast.patches.adapter_slots import use_pinned


def load(worker: Any, request: Any) -> None:
    """Have a worker load an adapter. It evicts a pinned one only if all slots are pinned.

    If that fails, whatever vLLM raises, the worker still has the adapter of that ID that it had.
    vLLM evicts that one after it has read the files, but before the weights are in their slot.
    """
    loras = getattr(worker.model_runner, "lora_manager", None)
    if loras is None:  # LoRA is off, as vLLM says itself
        worker.add_lora(request)
        return
    manager, lora_id = loras._adapter_manager, request.lora_int_id  # noqa: SLF001 - vLLM gives it no other name
    use_pinned(manager)
    earlier = manager.get_adapter(lora_id)
    try:
        worker.add_lora(request)
    except BaseException:
        if manager.get_adapter(lora_id) is not earlier:
            manager.remove_adapter(lora_id)
            if earlier is not None:
                _put_back(manager, earlier)
        raise


def _put_back(manager: Any, adapter: Any) -> None:
    # Not by `add_adapter`, which would prepare its weights a second time.
    manager._registered_adapters[adapter.id] = adapter  # noqa: SLF001 - as above
    manager.activate_adapter(adapter.id)
