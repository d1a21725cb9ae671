"""Removes what killed processes leave behind, and nothing that belongs to others.

vLLM's rings take 400 MiB of /dev/shm per engine (apparent size), which count against a container's
limit at the next start. With `--ipc=host`, other containers use that directory too, and some share
memory with our engines. So only files that are known to be ours are removed: those with a name from
`worker.ipc_names`, and those that our processes map under a name that only their creators use.
A file of the first kind lists the latter, since nothing else tells whose they were. It lies beside
them, because a container that restarts may keep its shared memory and lose its other files.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from holdfast.atomic_files import left_by_dead_process, write_atomically
from holdfast.worker.ipc_names import SHARED_MEMORY, name_prefix

MAX_ENGINES = 1000
"""The engines of one server whose names are searched for; each takes seconds to start."""
_RENDEZVOUS = "vllm_dist_"
_OWN_NAMES = re.compile(
    rf"(?:sem\.)?hf[a-z2-7]{{7}}|nccl-|torch_\d|vllm_(?:offload|ec)_|{_RENDEZVOUS}"
)
"""Names of ours, of NCCL's and torch's between their processes, of vLLM's caches of KV and of media
(0.32), which may be as large as the host's memory, and of the CPU backend's.

The segments that a connector maps from another program's cache have other names.
"""
_LIST_SUFFIX = ".mapped"
"""What the name of an engine's list ends with, after the prefix of the engine's names."""


def remove(directory: Path) -> None:
    """Remove the directory of a generation, and the shared memory that is known to be its own.

    Call it when none of its processes runs any more.
    """
    unlink(_named(directory))
    shutil.rmtree(directory, ignore_errors=True)


def record_shared_memory(directory: Path, processes: Iterable[psutil.Process]) -> None:
    """List what `shared_memory` finds, under the name of the generation in `directory`."""
    path = SHARED_MEMORY / f"{name_prefix(directory)}{_LIST_SUFFIX}"
    known = frozenset(_listed(path))
    if new := shared_memory(processes) - known:
        names = sorted(one.name for one in new | known)
        with suppress(OSError):  # it may be full
            write_atomically(path, json.dumps(names))


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
        if found and "/" not in name and not name.endswith(" (deleted)"):
            yield SHARED_MEMORY / name


def named_after_engines(directory: Path) -> Iterator[Path]:
    """Yield the shared memory of every engine whose directory was below this one.

    It has the names of those engines, or is listed in a file that has.
    """
    prefixes = {name_prefix(directory / str(number)) for number in range(1, MAX_ENGINES + 1)}
    length = len(name_prefix(directory))
    for pattern in ("hf*", "sem.hf*"):
        for path in SHARED_MEMORY.glob(pattern):
            if path.name.removeprefix("sem.")[:length] in prefixes:
                yield from _listed(path)
                yield path


def _named(directory: Path) -> Iterator[Path]:
    prefix = name_prefix(directory)
    for path in SHARED_MEMORY.glob(f"{prefix}*"):
        yield from _listed(path)
        yield path
    yield from SHARED_MEMORY.glob(f"sem.{prefix}*")
    yield from met_in(directory)


def met_in(directory: Path) -> Iterator[Path]:
    """Yield what the CPU backend named after the rendezvous files in an engine's directory."""
    for rendezvous in directory.glob(f"{_RENDEZVOUS}*"):
        yield from SHARED_MEMORY.glob(f"*{rendezvous.name}*")


def _listed(path: Path) -> Iterator[Path]:
    """Yield what a list of this user says; nothing if `path` is another file.

    Every user can write to shared memory, so a name counts only if its kind is our own.
    """
    if path.suffix != _LIST_SUFFIX:
        return
    with suppress(OSError), left_by_dead_process(path) as names:
        for name in names if isinstance(names, list) else ():
            if isinstance(name, str) and "/" not in name and _OWN_NAMES.match(name):
                yield SHARED_MEMORY / name
