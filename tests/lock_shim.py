"""vLLM's own workspace manager on the CPU, created and locked in a worker as on a GPU.

vLLM creates no manager on the CPU. `install` puts this module where the processes of an engine find
it as a `vllm.general_plugins` entry point; `register` runs there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PLUGIN_NAME = "holdfast_lock_shim"
WARMED_VARIABLE = "HOLDFAST_LOCK_SHIM_WARMED_BYTES"
WARMED_BYTES = 64 * 1024
"""What the warm-up leaves behind: vLLM's own runs one prefill of a few tokens. The demo model takes
1 KiB for each token of the context, so a short prompt is answered and a long one is not."""


def install(directory: Path, warmed_bytes: int = WARMED_BYTES) -> Mapping[str, str]:
    """Make an importable distribution of this module; return the environment that activates it.

    Of Holdfast's own plugins only the demo model is loaded, so that the manager is vLLM's.
    """
    information = directory / f"{PLUGIN_NAME}-1.dist-info"
    information.mkdir(parents=True)
    shutil.copy(__file__, directory / f"{PLUGIN_NAME}.py")
    metadata = f"Metadata-Version: 2.1\nName: {PLUGIN_NAME}\nVersion: 1\n"
    (information / "METADATA").write_text(metadata)
    entry_points = f"[vllm.general_plugins]\n{PLUGIN_NAME} = {PLUGIN_NAME}:register\n"
    (information / "entry_points.txt").write_text(entry_points)
    search_path = [str(directory), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        "VLLM_PLUGINS": f"holdfast_demo,{PLUGIN_NAME}",
        WARMED_VARIABLE: str(warmed_bytes),
    }


def register() -> None:
    """Wrap the worker: manager before its device is ready, lock after its warm-up."""
    import torch
    from vllm.v1.worker import workspace
    from vllm.v1.worker.worker_base import WorkerWrapperBase

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
