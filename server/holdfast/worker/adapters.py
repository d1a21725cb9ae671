"""Loads LoRA adapters into a worker, for the front end."""

from __future__ import annotations

from typing import Any

from holdfast.patches.adapter_slots import use_pinned


def load(worker: Any, request: Any) -> None:
    """Have a worker load an adapter, which evicts a pinned one only if all slots are pinned."""
    loras = getattr(worker.model_runner, "lora_manager", None)
    if loras is not None:  # otherwise LoRA is off, as vLLM says
        use_pinned(loras._adapter_manager)  # noqa: SLF001 - vLLM gives it no other name
    worker.add_lora(request)
