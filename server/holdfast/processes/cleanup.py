"""Removes what killed processes leave behind, and nothing that belongs to others.

vLLM's rings take 400 MiB of /dev/shm an engine (apparent size), which count against a container's
at the next start. With `--ipc=host` that directory has neighbours, some of which share memory with
our engines, so only what is known to be ours is removed: what bears the name that
`workspace.shared_names` gives, and what our processes map under a name that only its makers use.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from holdfast.worker.ipc_names import SHARED_MEMORY, name_prefix

MOST_ENGINES = 1000
"""Of one server, whose names are looked for; an engine takes seconds to start."""
_RENDEZVOUS = "vllm_dist_"
_OWN_NAMES = re.compile(rf"(?:sem\.)?hf[a-z2-7]{{7}}|nccl-|torch_\d|{_RENDEZVOUS}")
"""Ours; NCCL's between the ranks of one group, torch's between its processes, the CPU backend's.

What a connector to a cache of others maps has other names.
"""


def remove(directory: Path) -> None:
    """Remove the directory of a generation, and what is named after it in shared memory.

    Call it when none of its processes runs.
    """
    unlink(_named(directory))
    shutil.rmtree(directory, ignore_errors=True)


def shared_memory(processes: Iterable[psutil.Process]) -> frozenset[Path]:
    """The files of /dev/shm that `processes` map now, and that they alone can have made."""
    mapped = (path for process in processes for path in _mapped(process))
    return frozenset(path for path in mapped if _OWN_NAMES.match(path.name))


def unlink(paths: Iterable[Path]) -> None:
    """Remove files; one that is gone is not an error."""
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
    """The shared memory of every engine that had its directory below this one."""
    prefixes = {name_prefix(directory / str(number)) for number in range(1, MOST_ENGINES + 1)}
    length = len(name_prefix(directory))
    for pattern in ("hf*", "sem.hf*"):
        for path in SHARED_MEMORY.glob(pattern):
            if path.name.removeprefix("sem.")[:length] in prefixes:
                yield path


def _named(directory: Path) -> Iterator[Path]:
    prefix = name_prefix(directory)
    yield from SHARED_MEMORY.glob(f"{prefix}*")
    yield from SHARED_MEMORY.glob(f"sem.{prefix}*")
    yield from named_after_meetings(directory)


def named_after_meetings(directory: Path) -> Iterator[Path]:
    """What the CPU backend named after the files of an engine by which its ranks met."""
    for meeting in directory.glob(f"{_RENDEZVOUS}*"):
        yield from SHARED_MEMORY.glob(f"*{meeting.name}*")
