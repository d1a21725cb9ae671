"""The `vllm.general_plugins` entry point: vLLM loads it in every process before a worker exists.

Without `HOLDFAST_WORKSPACE_SPEC` it changes nothing, so a plain `vllm serve` in the same
environment stays plain. With it, this process uses Holdfast's workspace manager, and each worker is
followed from its device to its lock, and through every later step.

The follower is kept on vLLM's own wrapper object, so that this module's only state lives and dies
with the worker it describes.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.patches import check, fits
from holdfast.patches.worker import keep_seeds, take_plain_functions
from holdfast.worker import lifetime, rpc
from holdfast.worker.builds import keep_builds
from holdfast.worker.crash_records import note_termination, record_causes
from holdfast.worker.ipc_names import shared_path, use_names_of
from holdfast.worker.lifetime import offer_stacks
from holdfast.workspace.plan import SPEC_VARIABLE, GrowthPolicy, WorkspaceSpec
from holdfast.workspace.stats.mapped_files import is_shared_memory_kept

_ATTRIBUTE = "_holdfast"

logger = logging.getLogger("vllm.holdfast")


def register() -> None:
    """Install Holdfast's workspace manager and follow this process's workers, if asked to.

    Raises:
        OSError, ValueError: the spec cannot be read; the process that loads the plugin ends, since
            an engine without its reservation must not start.
        EngineStartError: vLLM lacks something to be changed; the process ends for the same reason.
    """
    path = os.environ.get(SPEC_VARIABLE)
    if not path:
        return
    lifetime.end_if_orphan()
    lifetime.tie_spawned()
    if multiprocessing.parent_process() is not None:  # otherwise it is the front end, which drains
        lifetime.outlive_terminal()
    spec = WorkspaceSpec.read(Path(path))
    use_names_of(Path(spec.stats_directory))
    record_causes(Path(spec.stats_directory))
    offer_stacks(Path(spec.stats_directory), os.getpid())
    if multiprocessing.current_process().name.startswith("EngineCore"):
        note_termination(Path(spec.stats_directory))
    # Otherwise vLLM logs two lines for each engine step that the probe composes.
    logging.getLogger("vllm.v1.core.sched.scheduler").addFilter(_is_no_pause)
    _install(spec)


def _is_no_pause(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("setting pause state")


def _install(spec: WorkspaceSpec) -> None:
    from vllm.platforms import current_platform  # noqa: PLC0415 - as below
    from vllm.v1.worker import workspace  # noqa: PLC0415 - vLLM loads this module
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415 - as above

    from holdfast.workspace.manager import WorkspaceManager  # noqa: PLC0415 - imports vLLM

    check("engine")
    # `init_workspace_manager` looks the class up at call time, so this reaches every caller.
    workspace.WorkspaceManager = WorkspaceManager
    if not hasattr(WorkerWrapperBase, _ATTRIBUTE):
        setattr(WorkerWrapperBase, _ATTRIBUTE, None)
        if fits("patches.worker.take_plain_functions"):
            take_plain_functions()
        if current_platform.is_cuda() and fits("worker.builds.keep_builds"):
            keep_builds(Path(spec.stats_directory))
        WorkerWrapperBase.init_device = _following(WorkerWrapperBase.init_device, spec)
        WorkerWrapperBase.execute_model = _measured(WorkerWrapperBase.execute_model)
        WorkerWrapperBase.holdfast_set_growth = _set_growth
        WorkerWrapperBase.holdfast_call = rpc.call


def _following(init_device: Callable[[Any], None], spec: WorkspaceSpec) -> Callable[[Any], None]:
    """Wrap `WorkerWrapperBase.init_device`, the first moment with a worker and its rank."""

    def followed(wrapper: Any) -> None:
        from holdfast.worker.hooks import WorkerFollower  # noqa: PLC0415 - imports vLLM

        check("worker")
        directory = Path(spec.stats_directory)
        shared = shared_path(directory) if is_shared_memory_kept() else None
        follower = WorkerFollower(wrapper.worker, wrapper.vllm_config, spec, shared=shared)
        setattr(wrapper, _ATTRIBUTE, follower)
        with follower.device_initialised():
            init_device(wrapper)
        keep_seeds(wrapper.worker.model_runner)

    return followed


def _measured(execute_model: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap `WorkerWrapperBase.execute_model`, which runs one engine step of this rank."""

    def measured(wrapper: Any, scheduler_output: Any) -> Any:
        follower = getattr(wrapper, _ATTRIBUTE)
        if follower is None:
            return execute_model(wrapper, scheduler_output)
        return follower.step(scheduler_output, lambda: execute_model(wrapper, scheduler_output))

    return measured


def _set_growth(wrapper: Any, policy: GrowthPolicy) -> dict[str, str]:
    """Serve the front end's `collective_rpc` for growth; must not raise, see `worker.rpc`."""
    follower = getattr(wrapper, _ATTRIBUTE)
    if follower is None:
        return {"error": "the workspace plugin does not observe this rank"}
    follower.set_growth(policy)
    return {"growth": policy}
