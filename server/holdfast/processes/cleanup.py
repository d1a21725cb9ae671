"""Removes what killed processes leave behind, and nothing that belongs to others.

vLLM's rings take 400 MiB of /dev/shm per engine (apparent size), which count against a container's
limit at the next start. With `--ipc=host`, other containers use that directory too, and some share
memory with our engines. So only files that are known to be ours are removed: those with a name from
`worker.ipc_names`, and those that our processes map under a name that only their creators use.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from holdfast.worker.ipc_names import SHARED_MEMORY, name_prefix

MAX_ENGINES = 1000
"""The engines of one server whose names are searched for; each takes seconds to start."""
_RENDEZVOUS = "vllm_dist_"
_OWN_NAMES = re.compile(rf"(?:sem\.)?hf[a-z2-7]{{7}}|nccl-|torch_\d|{_RENDEZVOUS}")
"""Names of ours, of NCCL's and torch's between their processes, and of the CPU backend's.

The segments that a connector maps from another program's cache have other names.
"""


def remove(directory: Path) -> None:
    """Remove the directory of a generation, and the shared memory that is named after it.

    Call it when none of its processes runs any more.
    """
    unlink(_named(directory))
    shutil.rmtree(directory, ignore_errors=True)


def shared_memory(processes: Iterable[psutil.Process]) -> frozenset[Path]:
    """Return the files of /dev/shm that `processes` map now and that only they can have made."""
    mapped = (path for process in processes for path in _mapped(process))
    return frozenset(path for path in mapped if _OWN_NAMES.match(path.name))


def unlink(paths: Iterable[Path]) -> None:
    """Remove files; a missing file is not an error."""
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


def named_after_engines(directory: Path) -> Iterator[Path]:
    """Yield the shared memory of every engine whose directory was below this one."""
    prefixes = {name_prefix(directory / str(number)) for number in range(1, MAX_ENGINES + 1)}
    length = len(name_prefix(directory))
    for pattern in ("hf*", "sem.hf*"):
        for path in SHARED_MEMORY.glob(pattern):
            if path.name.removeprefix("sem.")[:length] in prefixes:
                yield path


def _named(directory: Path) -> Iterator[Path]:
    prefix = name_prefix(directory)
    yield from SHARED_MEMORY.glob(f"{prefix}*")
    yield from SHARED_MEMORY.glob(f"sem.{prefix}*")
    yield from named_after_rendezvous(directory)


def named_after_rendezvous(directory: Path) -> Iterator[Path]:
    """Yield the shared memory that the CPU backend named after an engine's rendezvous files."""
    for rendezvous in directory.glob(f"{_RENDEZVOUS}*"):
        yield from SHARED_MEMORY.glob(f"*{rendezvous.name}*")
