"""What is patched in vLLM where its EngineCores run. `compat` is for the front end, and larger."""

from __future__ import annotations

import importlib
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.executor import multiproc_executor

from holdfast.patches import fits


def fork_workers(forking: Any) -> None:
    """Have this EngineCore start its workers in the context `forking`.

    `get_mp_context` is bound in `vllm.v1.executor.multiproc_executor` (0.32, 0.33).
    """
    if not fits("patches.engine_core.fork_workers"):
        return
    original = multiproc_executor.get_mp_context

    def forking_context() -> Any:
        original()  # prepares the environment of what is started
        return forking

    multiproc_executor.get_mp_context = forking_context


def import_engine() -> None:
    """Import what an EngineCore and the platform's workers run, but no plugin.

    Nothing of it initialises a device where vLLM finds its GPUs by NVML (0.32, 0.33).
    """
    for name in (
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.structured_output",
        "vllm.v1.worker.worker_base",
        _worker_module(),
    ):
        importlib.import_module(name)


def _worker_module() -> str:
    """Where the class of the platform's workers is, as its `check_and_update_config` names it."""
    return f"vllm.v1.worker.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker"
