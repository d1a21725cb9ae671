"""Prepares the fork server, which imports this module, for the processes that it forks.

Only that process imports it, for its effects; see `forkserver`. It loads no plugin and initialises
no device: both belong to the forked processes.
"""

from __future__ import annotations

import gc
import importlib
import os
from contextlib import suppress
from pathlib import Path

import psutil

from holdfast.patches.engine import import_engine
from holdfast.processes import exits, forkserver, imports
from holdfast.worker import lifetime

STARTED_WITH = dict(os.environ)
"""The environment that native libraries have read, in this process and in those that it forks."""

# Unset if `multiprocessing` itself has just found the last server dead.
parent_pid = os.environ.get(lifetime.PARENT_VARIABLE)
lifetime.die_with_parent(int(parent_pid) if parent_pid else None)
os.register_at_fork(after_in_child=lifetime.die_with_parent)
lifetime.ignore_hangup()
lifetime.leave_group()

# This takes seconds, in which the parent may end.
with imports.uncollected():
    import_engine()
lifetime.end_at_once_on_crashes()

with suppress(ImportError):  # it is optional for vLLM, too
    # It stores the title beside the environment that the process was started with. A forked process
    # has another environment, so it could not find that place, and would keep this title.
    importlib.import_module("setproctitle").setproctitle("holdfast::forkserver")


def are_forks_unsafe() -> bool:
    """Whether processes that are forked from this one cannot use CUDA.

    When vLLM is imported, Triton asks torch for GPUs, and torch asks NVML. If NVML cannot tell, as
    with MIG by UUID and on boards without NVML, torch initialises CUDA's driver (2.13,
    `torch.cuda.device_count`). Only a child can see torch's flag for that, so a child is asked. If
    it does not answer by the deadline, forks are unsafe, too.
    """
    pid = os.fork()
    if not pid:
        torch = importlib.import_module("torch")
        os._exit(int(torch.cuda._is_in_bad_fork()))  # noqa: SLF001 - as vLLM asks, too
    child = psutil.Process(pid)
    try:
        return child.wait(forkserver.CHILD_DEADLINE_SECONDS) != 0
    except psutil.TimeoutExpired:
        child.kill()
        return True


if directory := os.environ.get(exits.DIRECTORY_VARIABLE):
    if are_forks_unsafe():
        forkserver.record_unsafe_forks(Path(directory))
        raise SystemExit
    # Not before: the child that was asked belongs to no engine.
    exits.record_exit_codes(Path(directory))

gc.collect()
# Otherwise a collection in a child would write to every page that it shares with this process.
gc.freeze()
