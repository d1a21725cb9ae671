"""Variables that are read once, when a process starts or imports: vLLM's CPU workers need them.

OpenMP binds its threads by them while it is loaded, the loader preloads what is named, and torch's
inductor is configured while it is imported, so that no process can take them over later. A worker
can be forked only from a process that was started with the same ones. They are known when a worker
was started once, and kept for the next start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.atomic_files import read_record, write_atomically

logger = logging.getLogger(__name__)

PRELOAD = "LD_PRELOAD"
THREADS = "OMP_NUM_THREADS"
_OPENMP = ("OMP_", "GOMP_", "KMP_")
_INDUCTOR = "TORCHINDUCTOR_CPP_DYNAMIC_THREADS"
"""vLLM's CPU platform sets it (0.32). It is in the key of what was compiled, too."""
LAST_NAME = "native-last.json"
"""Beside the files of the command lines: what the last worker of any was started with."""
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_ ,:{}()=\[\]-]{1,4096}")


def native_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of an environment that cannot be taken over by a process that runs already."""
    return {
        name: value for name, value in environment.items() if name == PRELOAD or _is_plain(name)
    }


def _is_plain(name: str) -> bool:
    """Whether it is one of those whose value names no code."""
    return name == _INDUCTOR or name.startswith(_OPENMP)


def can_take_over(wanted: Mapping[str, str], started_with: Mapping[str, str]) -> bool:
    """Whether a process that was started with one environment may go on with another.

    A number of threads can be set later too, unless threads are bound.
    """
    there, here = native_variables(wanted), native_variables(started_with)
    if {*there, *here} <= {PRELOAD, THREADS}:
        there.pop(THREADS, None)
        here.pop(THREADS, None)
    return there == here


class NativeVariables:
    """What the first worker of this command line was started with, kept over starts.

    Of a command line that is new it is guessed: that of the last one is most often the same.
    Without a directory it is known as long as this process lives.
    """

    def __init__(self, directory: Path | None, arguments: Sequence[str]) -> None:
        name = hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:32]
        names = (f"native-{name}.json", LAST_NAME)
        self._paths = [directory / name for name in names] if directory else []
        found = (variables for path in self._paths if (variables := _read(path)) is not None)
        self._known: Mapping[str, str] = next(found, {})

    @property
    def known(self) -> Mapping[str, str]:
        """Empty where nothing is known; a wrong guess costs the time of a spawned worker."""
        return self._known

    def remember(self, pid: int) -> None:
        """Keep those of a worker; nothing is kept of one whose environment cannot be read."""
        self._known = native_variables(_environment_of(pid))
        try:
            for path in self._paths:
                if _read(path) != self._known:
                    write_atomically(path, json.dumps(self._known))
        except OSError as error:
            logger.debug("cannot save the environment that native libraries read: %s", error)


def _environment_of(pid: int) -> dict[str, str]:
    """What a process was started with."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    named = (pair.decode(errors="surrogateescape").partition("=") for pair in pairs if pair)
    return {name: value for name, _, value in named}


def _read(path: Path) -> dict[str, str] | None:
    """What a file says; None if there is none, or none that may be believed."""
    try:
        record = read_record(path)
        return dict(record) if all(_is_harmless(*item) for item in record.items()) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _is_harmless(name: object, value: object) -> bool:
    """Whether a file may say this: it decides what code a process loads."""
    if not isinstance(name, str) or not isinstance(value, str):
        return False
    if name != PRELOAD:
        return _is_plain(name) and bool(_PLAIN_VALUE.fullmatch(value))
    return all(_is_installed(Path(part)) for part in value.split(":"))


def _is_installed(library: Path) -> bool:
    """Whether it lies where the packages of this environment do, torch's for one."""
    import sysconfig  # noqa: PLC0415 - only when something was kept

    packages = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    return library.is_file() and any(library.resolve().is_relative_to(p) for p in packages)
