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

from holdfast.engine import exit_codes
from holdfast.workspace import leash

STARTED_WITH = dict(os.environ)
"""What native libraries have read, in this process and in those it forks."""

# Not told if `multiprocessing` itself found the last server dead, a moment ago.
parent_pid = os.environ.get(leash.PARENT_VARIABLE)
leash.tie(int(parent_pid) if parent_pid else None)
os.register_at_fork(after_in_child=leash.tie)
leash.outlive_terminal()

if directory := os.environ.get(exit_codes.DIRECTORY_VARIABLE):
    exit_codes.note_in(Path(directory))

# An import takes seconds, in which the parent may end, so that this stands below.
importlib.import_module("holdfast.engine.core_compat").import_engine()

with suppress(ImportError):  # which vLLM does without, too
    # It finds its place beside the environment that the process was started with; what is forked
    # has another, and would keep this title.
    importlib.import_module("setproctitle").setproctitle("holdfast::forkserver")

gc.collect()
# A collection in a child would write to every page that it shares with this process.
gc.freeze()
