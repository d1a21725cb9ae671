"""The `vllm.general_plugins` entry point: vLLM loads it in every process before a worker exists.

Without `HOLDFAST_WORKSPACE_SPEC` it changes nothing, so a `vllm serve` in the same environment is
unaffected. With it, this process uses Holdfast's workspace manager, and each worker is
followed from its device to its lock, and through every later step.

The hooks are kept on vLLM's own wrapper object, so that this module's only state lives and dies
with the worker it describes.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.patches import check
from holdfast.patches.adapter_slots import yield_pinned_slots
from holdfast.patches.continued import keep_sent_tokens, resume_answers
from holdfast.patches.engine import (
    accept_plain_functions,
    find_weight_cache,
    keep_builds,
    mark_nan_rows,
    read_notifications,
    withhold_unused_seeds,
)
from holdfast.patches.grammars import bound_grammars
from holdfast.patches.media_cache import keep_media_in_front_end
from holdfast.patches.thinking_budgets import count_sent_thoughts
from holdfast.worker import lifetime, rpc
from holdfast.worker.crash_records import record_causes, record_termination
from holdfast.worker.ipc_names import name_ipc_after, shared_path
from holdfast.workspace.plan import SPEC_VARIABLE, WorkspaceSpec
from holdfast.workspace.stats.mapped_files import is_shared_memory_kept

logger = logging.getLogger("vllm.holdfast")


def register() -> None:
    """Install Holdfast's workspace manager and the hooks of this process's workers, if asked to.

    Raises:
        OSError, ValueError: the spec cannot be read; the process that loads the plugin ends, since
            an engine without its reservation must not start.
        EngineStartError: vLLM lacks something to be changed; the process ends for the same reason.
    """
    path = os.environ.get(SPEC_VARIABLE)
    if not path:
        return
    lifetime.end_if_orphan()
    lifetime.make_spawned_die_with_parent()
    if multiprocessing.parent_process() is not None:  # otherwise it is the front end, which drains
        lifetime.ignore_hangup()
        lifetime.leave_group()
    spec = WorkspaceSpec.read(Path(path))
    name_ipc_after(Path(spec.stats_directory))
    record_causes(Path(spec.stats_directory))
    lifetime.write_stacks_on_signal(Path(spec.stats_directory), os.getpid())
    lifetime.end_at_once_on_crashes()
    if multiprocessing.current_process().name.startswith("EngineCore"):
        record_termination(Path(spec.stats_directory))
    # Otherwise vLLM logs two lines for each engine step that the probe composes.
    logging.getLogger("vllm.v1.core.sched.scheduler").addFilter(_is_not_about_pausing)
    _install(spec)


def _is_not_about_pausing(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("setting pause state")


def _install(spec: WorkspaceSpec) -> None:
    from vllm.platforms import current_platform  # noqa: PLC0415 - as below
    from vllm.v1.worker import workspace  # noqa: PLC0415 - vLLM loads this module
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415 - as above

    from holdfast.patches.log_lines import escape_controls  # noqa: PLC0415 - imports vLLM
    from holdfast.workspace.manager import WorkspaceManager  # noqa: PLC0415 - imports vLLM

    check("engine")
    escape_controls()
    # `init_workspace_manager` looks the class up at call time, so this reaches every caller.
    workspace.WorkspaceManager = WorkspaceManager
    if not hasattr(WorkerWrapperBase, "holdfast_hooks"):
        WorkerWrapperBase.holdfast_hooks = None
        accept_plain_functions()
        read_notifications()
        resume_answers()
        keep_media_in_front_end()
        bound_grammars(spec.grammar_seconds)
        if current_platform.is_cuda():
            keep_builds(Path(spec.stats_directory))
        WorkerWrapperBase.init_device = _with_hooks(WorkerWrapperBase.init_device, spec)
        WorkerWrapperBase.execute_model = _with_tracked_steps(WorkerWrapperBase.execute_model)
        WorkerWrapperBase.holdfast_set_growth = rpc.set_growth
        WorkerWrapperBase.holdfast_call = rpc.call


def _with_hooks(init_device: Callable[[Any], None], spec: WorkspaceSpec) -> Callable[[Any], None]:
    """Wrap `WorkerWrapperBase.init_device`, the first moment with a worker and its rank."""

    def hooked(wrapper: Any) -> None:
        from holdfast.worker.hooks import WorkerHooks  # noqa: PLC0415 - imports vLLM

        check("worker")
        find_weight_cache()
        mark_nan_rows(wrapper.vllm_config)
        if wrapper.vllm_config.lora_config is not None:
            yield_pinned_slots()
        directory = Path(spec.stats_directory)
        shared = shared_path(directory) if is_shared_memory_kept() else None
        hooks = WorkerHooks(wrapper.worker, wrapper.vllm_config, spec, shared=shared)
        wrapper.holdfast_hooks = hooks
        with hooks.device_initialised():
            init_device(wrapper)
        withhold_unused_seeds(wrapper.worker.model_runner)
        keep_sent_tokens(wrapper.vllm_config)
        count_sent_thoughts(wrapper.vllm_config)

    return hooked


def _with_tracked_steps(execute_model: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap `WorkerWrapperBase.execute_model`, which runs one engine step of this rank."""

    def tracked(wrapper: Any, scheduler_output: Any) -> Any:
        hooks = wrapper.holdfast_hooks
        if hooks is None:
            return execute_model(wrapper, scheduler_output)
        return hooks.step(scheduler_output, lambda: execute_model(wrapper, scheduler_output))

    return tracked
