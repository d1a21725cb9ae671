"""Removes what killed processes leave behind, and nothing that belongs to others.

vLLM's rings take 400 MiB of /dev/shm per engine (apparent size), which count against a container's
limit at the next start. With `--ipc=host`, other containers use that directory too, and some share
memory with our engines. So only files that are known to be ours are removed: those with a name from
`worker.ipc_names`, and those that our processes map under a name that only their creators use.
The directory of an engine lists the latter, since nothing else tells whose they were.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

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
_LIST = "shared-memory"
"""The file in an engine's directory."""


def remove(directory: Path) -> None:
    """Remove the directory of a generation, and the shared memory that is known to be its own.

    Call it when none of its processes runs any more.
    """
    unlink(_named(directory))
    shutil.rmtree(directory, ignore_errors=True)


def record_shared_memory(directory: Path, processes: Iterable[psutil.Process]) -> None:
    """List what `shared_memory` finds in the directory of a generation."""
    if new := shared_memory(processes).difference(_recorded(directory)):
        lines = [f"{path.relative_to(SHARED_MEMORY)}\n" for path in sorted(new)]
        with suppress(OSError), (directory / _LIST).open("a") as file:  # it may be full, or gone
            file.writelines(lines)


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
    yield from known_from(directory)


def known_from(directory: Path) -> Iterator[Path]:
    """Yield the shared memory that only the files in an engine's directory tell to be its own.

    That is what is listed there, and what the CPU backend named after its rendezvous files.
    """
    yield from _recorded(directory)
    for rendezvous in directory.glob(f"{_RENDEZVOUS}*"):
        yield from SHARED_MEMORY.glob(f"*{rendezvous.name}*")


def _recorded(directory: Path) -> Iterator[Path]:
    with suppress(OSError):
        for line in (directory / _LIST).read_text().splitlines():
            yield SHARED_MEMORY / line
