"""Files that a worker writes in each of its steps: mapped, and in memory where that is possible.

What is mapped from a disk is write-protected whenever the kernel writes it back, and the next store
waits for the journal of the file system: for seconds where models are downloaded or a KV cache is
offloaded. Files of a tmpfs are never written back. So the file is in /dev/shm, and a link to it
stands at its path; where nothing can be made there, as in a container that may not write or has no
room, it is at its path itself.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SYSTEMD = Path("/run/systemd/system")
"""There where systemd runs, see sd_booted(3)."""
_LARGEST_SYSTEM_UID = 999

logger = logging.getLogger("vllm.holdfast")


@contextmanager
def new_mapping(path: Path, size_bytes: int, shared: Path | None) -> Iterator[mmap.mmap]:
    """A new file of `size_bytes`, all of it allocated and 0, which is at `path` when left.

    `shared` is what its name begins with in shared memory; with None it stays out of that. Who
    still maps a file that was at `path` before keeps its content.

    Raises:
        OSError: there is no room for it, or it cannot be made.
    """
    temporary = path.with_suffix(f".{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    mapping = None
    if shared is not None:
        mapping = _mapping_in_memory(temporary, path.name, shared, size_bytes)
    if mapping is None:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        mapping = _mapping(descriptor, size_bytes)
    yield mapping
    temporary.replace(path)


def is_shared_memory_kept() -> bool:
    """Whether nobody removes what this user has in /dev/shm.

    logind does when he logs out, but of system users (`RemoveIPC`, logind.conf(5)).
    """
    return os.geteuid() <= _LARGEST_SYSTEM_UID or not _SYSTEMD.exists()


def _mapping_in_memory(link: Path, name: str, shared: Path, size_bytes: int) -> mmap.mmap | None:
    try:
        descriptor, target = tempfile.mkstemp(f"-{name}", f"{shared.name}-", shared.parent)
        try:
            mapping = _mapping(descriptor, size_bytes)
            link.symlink_to(target)
        except OSError:
            Path(target).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.info("cannot keep %s in %s: %s", name, shared.parent, error)
        return None
    return mapping


def _mapping(descriptor: int, size_bytes: int) -> mmap.mmap:
    with os.fdopen(descriptor, "r+b") as file:
        # Not a file with holes: where there is no room later, a store would be a SIGBUS.
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        return mmap.mmap(file.fileno(), size_bytes)
