"""What the fork server imports, so that the processes it forks have it: see `forkserver`.

Imported for its effects, by that one process. None of this loads a plugin or initialises a device:
both belong to the processes that are forked.
"""

from __future__ import annotations

import gc
import importlib
import os
from contextlib import suppress
from pathlib import Path

import psutil

from holdfast.processes import exit_codes, forkserver
from holdfast.worker import lifetime

STARTED_WITH = dict(os.environ)
"""What native libraries have read, in this process and in those it forks."""

# Not told if `multiprocessing` itself found the last server dead, a moment ago.
parent_pid = os.environ.get(lifetime.PARENT_VARIABLE)
lifetime.tie(int(parent_pid) if parent_pid else None)
os.register_at_fork(after_in_child=lifetime.tie)
lifetime.outlive_terminal()

if directory := os.environ.get(exit_codes.DIRECTORY_VARIABLE):
    exit_codes.note_in(Path(directory))

# An import takes seconds, in which the parent may end, so that this stands below.
importlib.import_module("holdfast.patches.engine_core").import_engine()

with suppress(ImportError):  # which vLLM does without, too
    # It finds its place beside the environment that the process was started with; what is forked
    # has another, and would keep this title.
    importlib.import_module("setproctitle").setproctitle("holdfast::forkserver")


def has_spoilt_forks() -> bool:
    """Whether no process that is forked from this one can use CUDA.

    Importing vLLM has Triton ask torch whether there is a GPU, and torch asks NVML. Where that does
    not know, for MIG by UUID and on boards without NVML, torch initialises CUDA's driver (2.13,
    `torch.cuda.device_count`). Its note of that is made for children, so that a child is asked. One
    that does not answer by the deadline cannot be used either.
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


if directory and has_spoilt_forks():
    forkserver.note_spoilt(Path(directory))
    raise SystemExit

gc.collect()
# A collection in a child would write to every page that it shares with this process.
gc.freeze()
