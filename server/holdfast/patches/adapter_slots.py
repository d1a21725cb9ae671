"""Makes a pinned LoRA adapter the last one to lose its slot, in place of one that never does.

vLLM's scheduler forms steps with up to `--max-loras` adapters and knows nothing of pins, but its
worker evicts no pinned adapter (0.32, 0.33). With every slot pinned, a step with another adapter
raises; with one pinned, a step with `--max-loras` others evicts one of its own and raises, too.
Both end the engine.
"""

from __future__ import annotations

from typing import Any

from holdfast.patches.patch import original, replace

_PINNED = "holdfast_pinned"


def yield_pinned_slots() -> None:
    """Have a step evict pinned adapters of this worker if it needs their slots, and no others.

    Calling it again changes nothing.
    """
    # Importing this module is cheap: PATCHES is read where vLLM is not imported yet.
    from vllm.lora.model_manager import LRUCacheLoRAModelManager  # noqa: PLC0415 - as above
    from vllm.lora.worker_manager import (  # noqa: PLC0415 - as above
        LRUCacheWorkerLoRAManager,
        WorkerLoRAManager,
    )

    apply_as_vllm = original(LRUCacheWorkerLoRAManager, "_apply_adapters")
    remove_as_vllm = original(WorkerLoRAManager, "remove_adapter")

    def apply(worker: Any, requests: Any) -> None:
        use_pinned(worker._adapter_manager)  # noqa: SLF001 - vLLM gives it no other name
        apply_as_vllm(worker, requests)

    def remove(worker: Any, lora_id: int) -> bool:
        _pinned_in(worker._adapter_manager).discard(lora_id)  # noqa: SLF001 - as above
        return bool(remove_as_vllm(worker, lora_id))

    def pin(manager: Any, lora_id: int) -> bool:
        pinned = _pinned_in(manager)
        if lora_id in pinned:  # a step may have taken its slot
            return True
        if lora_id not in manager.list_adapters():
            raise ValueError(f"adapter {lora_id} is not loaded")
        if len(pinned) >= manager.lora_slots:
            raise RuntimeError(f"{len(pinned)} adapters are pinned already, one for each slot")
        use_pinned(manager)
        manager.activate_adapter(lora_id)
        pinned.add(lora_id)
        return True

    replace(LRUCacheWorkerLoRAManager, "_apply_adapters", apply)
    replace(WorkerLoRAManager, "remove_adapter", remove)
    replace(LRUCacheLoRAModelManager, "pin_adapter", pin)


def use_pinned(manager: Any) -> None:
    """Make the pinned adapters those that were used last, so that others are evicted first."""
    for lora_id in sorted(_pinned_in(manager)):
        manager._registered_adapters.touch(lora_id)  # noqa: SLF001 - vLLM gives it no other name
        manager._active_adapters.touch(lora_id)  # noqa: SLF001 - as above


def _pinned_in(manager: Any) -> set[int]:
    """Return the set of IDs of the adapters that are pinned, loaded or not."""
    pinned: set[int] = vars(manager).setdefault(_PINNED, set())
    return pinned
