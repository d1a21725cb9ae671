"""Files that a worker writes in each of its steps: mapped, and in memory where possible.

The kernel write-protects a page mapped from a disk whenever it writes it back, and the next store
waits for the journal of the file system: for seconds while models are downloaded or a KV cache is
offloaded. Files of a tmpfs are never written back. So the file is in /dev/shm, with a link to it at
its path. If /dev/shm is full or read-only, the file itself is at its path.
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
"""It exists where systemd runs, see sd_booted(3)."""
_MAX_SYSTEM_UID = 999

logger = logging.getLogger("vllm.holdfast")


@contextmanager
def new_mapping(path: Path, size_bytes: int, shared: Path | None) -> Iterator[mmap.mmap]:
    """Map a new file of `size_bytes`, allocated in full and zeroed, which is at `path` on leaving.

    `shared` is the beginning of its path in shared memory; None keeps it out of that. A process
    that maps an earlier file at `path` keeps that content.

    Raises:
        OSError: the file cannot be created, or there is not enough room for it.
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
    """Return whether this user's files stay in /dev/shm.

    At logout, logind removes those of users other than system users (`RemoveIPC`, logind.conf(5)).
    """
    return os.geteuid() <= _MAX_SYSTEM_UID or not _SYSTEMD.exists()


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
        # A store into a hole of a sparse file would be a SIGBUS once there is no room.
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        return mmap.mmap(file.fileno(), size_bytes)
