"""vLLM's own workspace manager on the CPU, created and locked in a worker as on a GPU.

vLLM creates none on the CPU, so that its failure could not be shown there. A plug-in that does
nothing unless it is named in VLLM_PLUGINS together with the variable below.
"""

from __future__ import annotations

import os
from typing import Any

WARMED_VARIABLE = "HOLDFAST_GPU_CHECK_WARMED_BYTES"
"""What the warm-up leaves behind: on a GPU that is one prefill of a few tokens."""


def register() -> None:
    """Wrap the worker: manager before its device is ready, lock after its warm-up."""
    if WARMED_VARIABLE not in os.environ:
        return
    import torch  # noqa: PLC0415 - in a worker alone
    from vllm.v1.worker import workspace  # noqa: PLC0415 - as above
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415 - as above

    init_device = WorkerWrapperBase.init_device
    warmed_bytes = int(os.environ[WARMED_VARIABLE])

    def init_device_with_manager(wrapper: Any) -> None:
        workspace.init_workspace_manager(torch.device("cpu"))
        init_device(wrapper)
        warm_up = wrapper.worker.compile_or_warm_up_model

        def warm_up_and_lock() -> Any:
            times = warm_up()
            manager = workspace.current_workspace_manager()
            manager.get_simultaneous(((warmed_bytes,), torch.uint8))
            workspace.lock_workspace()
            return times

        wrapper.worker.compile_or_warm_up_model = warm_up_and_lock

    WorkerWrapperBase.init_device = init_device_with_manager
