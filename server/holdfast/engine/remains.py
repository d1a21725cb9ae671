"""What processes that are killed leave behind, and nobody else's.

vLLM's rings take 400 MiB of /dev/shm an engine (apparent size), which count against a container's
at the next start. With `--ipc=host` that directory has neighbours, so only what is known to be ours
is removed: what our processes mapped, and what bears the name that `workspace.shared_names` gives.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from holdfast.workspace.shared_names import name_prefix

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's, not chosen
_RENDEZVOUS = "vllm_dist_"


def remove(directory: Path) -> None:
    """Remove the directory of a generation, and what is named after it in shared memory.

    Call it when no process of it runs.
    """
    unlink(_named(directory))
    shutil.rmtree(directory, ignore_errors=True)


def shared_memory(processes: Iterable[psutil.Process]) -> frozenset[Path]:
    """The files of /dev/shm that `processes` map now."""
    return frozenset(path for process in processes for path in _mapped(process))


def unlink(paths: Iterable[Path]) -> None:
    """Remove files; those that are gone are no error."""
    for path in paths:
        path.unlink(missing_ok=True)


def _mapped(process: psutil.Process) -> Iterator[Path]:
    try:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, found, name = line.partition(f" {SHARED_MEMORY}/")
        if found and not name.endswith(" (deleted)"):
            yield SHARED_MEMORY / name


def _named(directory: Path) -> Iterator[Path]:
    prefix = name_prefix(directory)
    yield from SHARED_MEMORY.glob(f"{prefix}*")
    yield from SHARED_MEMORY.glob(f"sem.{prefix}*")
    # The file by which ranks meet has a UUID, after which the CPU backend names its memory.
    for meeting in directory.glob(f"{_RENDEZVOUS}*"):
        yield from SHARED_MEMORY.glob(f"*{meeting.name}*")
