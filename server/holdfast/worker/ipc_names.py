"""Names shared memory and semaphores after the engine that they belong to.

`multiprocessing` gives them random names, so nothing tells which engine left them.
"""

from __future__ import annotations

import base64
import hashlib
from multiprocessing import process, shared_memory
from pathlib import Path

from holdfast.patches import fits

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's, not chosen
_TOKEN_CHARACTERS = 7
"""`multiprocessing` allows 14 with the slash, and needs 4 itself."""


def name_prefix(directory: Path) -> str:
    """Return the prefix of one generation's names in /dev/shm; 35 bits of its directory."""
    digest = hashlib.sha256(str(directory).encode()).digest()
    return "hf" + base64.b32encode(digest).decode().lower()[:_TOKEN_CHARACTERS]


def shared_path(directory: Path) -> Path:
    """Return the prefix of the paths of one generation's files in shared memory."""
    return SHARED_MEMORY / name_prefix(directory)


def name_ipc_after(directory: Path) -> None:
    """Name after `directory` what this process and its children create from now on."""
    prefix = "/" + name_prefix(directory)
    # Neither is public. Read at each use in CPython 3.11 to 3.14; elsewhere names stay random.
    if fits("worker.ipc_names.name_ipc_after"):
        shared_memory._SHM_NAME_PREFIX = prefix  # type: ignore[attr-defined]  # noqa: SLF001 - as above
    process.current_process()._config["semprefix"] = prefix  # type: ignore[attr-defined]  # noqa: SLF001 - as above
