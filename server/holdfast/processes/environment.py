"""Sets the environment of new processes, and knows which of its variables bind them for life.

Native libraries read some variables once, when a process starts or imports, and vLLM's CPU workers
need them: OpenMP binds its threads while it is loaded, the loader preloads libraries, and torch's
inductor is configured while it is imported. No running process can adopt them later, so a worker
can be forked only from a process that was started with the same ones. They are known once a worker
has started, and kept for the next start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast.atomic_files import read_record, write_atomically

logger = logging.getLogger(__name__)

PRELOAD = "LD_PRELOAD"
THREADS = "OMP_NUM_THREADS"
_OPENMP = ("OMP_", "GOMP_", "KMP_")
_INDUCTOR = "TORCHINDUCTOR_CPP_DYNAMIC_THREADS"
"""vLLM's CPU platform sets it (0.32), and inductor's cache keys contain it."""
LAST_NAME = "native-last.json"
"""The file of the last worker of any command line, beside the files of each."""
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_ ,:{}()=\[\]-]{1,4096}")


def add_own_programs(environment: MutableMapping[str, str]) -> None:
    """Append the directory of this Python to PATH, where pip has put ninja.

    FlashInfer's compiler runs `ninja` by its name, and vLLM leaves FlashInfer out if there is none
    (`vllm.utils.flashinfer.has_flashinfer`, 0.32). A service manager does not activate an
    environment.
    """
    places = (environment.get("PATH") or os.defpath).split(os.pathsep)
    own = str(Path(sys.executable).parent)
    if own not in places:
        environment["PATH"] = os.pathsep.join([*places, own])


@contextmanager
def overridden(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` in the environment of this process while entered."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def native_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that a running process cannot adopt."""
    return {
        name: value for name, value in environment.items() if name == PRELOAD or _is_plain(name)
    }


def _is_plain(name: str) -> bool:
    """Whether it is a native variable whose value does not name code."""
    return name == _INDUCTOR or name.startswith(_OPENMP)


def can_adopt(wanted: Mapping[str, str], started_with: Mapping[str, str]) -> bool:
    """Whether a process that was started with one environment can continue with another.

    The number of threads can be set later, unless threads are bound to CPUs.
    """
    after, before = native_variables(wanted), native_variables(started_with)
    if {*after, *before} <= {PRELOAD, THREADS}:
        after.pop(THREADS, None)
        before.pop(THREADS, None)
    return after == before


def adopt(variables: Mapping[str, str], allowed_cpus: set[int]) -> None:
    """Adopt what the process that asked for this one has changed since the server started."""
    threads_before = os.environ.get(THREADS)
    os.environ.clear()
    os.environ.update(variables)
    os.sched_setaffinity(0, allowed_cpus)
    tempfile.tempdir = None  # read again from the environment
    threads = os.environ.get(THREADS)
    if threads and threads != threads_before:
        import torch  # noqa: PLC0415 - the front end imports this module before it has torch

        # A spawned process reads the variable when it imports torch.
        torch.set_num_threads(int(threads))


class NativeVariables:
    """The native variables that the workers of this command line start with, kept across starts.

    For a new command line, those of the last one are the guess, as they are mostly the same.
    Without a directory they are kept only in this process.
    """

    def __init__(self, directory: Path | None, arguments: Sequence[str]) -> None:
        name = hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:32]
        names = (f"native-{name}.json", LAST_NAME)
        self._paths = [directory / name for name in names] if directory else []
        found = (variables for path in self._paths if (variables := _read(path)) is not None)
        self.known: Mapping[str, str] = next(found, {})
        """Empty if nothing is known. After a wrong guess, workers are spawned, which is slower."""

    def remember(self, pid: int) -> None:
        """Keep the variables of the worker `pid`; none if its environment cannot be read."""
        self.known = native_variables(_environment_of(pid))
        try:
            for path in self._paths:
                if _read(path) != self.known:
                    write_atomically(path, json.dumps(self.known))
        except OSError as error:
            logger.debug("cannot save the environment that native libraries read: %s", error)


def _environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it cannot be read."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    named = (pair.decode(errors="surrogateescape").partition("=") for pair in pairs if pair)
    return {name: value for name, _, value in named}


def _read(path: Path) -> dict[str, str] | None:
    """Return the variables in a file; None if it cannot be read or trusted."""
    try:
        record = read_record(path)
        return dict(record) if all(_is_trusted(*item) for item in record.items()) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _is_trusted(name: object, value: object) -> bool:
    """Whether a file may set this variable: some decide what code a process loads."""
    if not isinstance(name, str) or not isinstance(value, str):
        return False
    if name != PRELOAD:
        return _is_plain(name) and bool(_PLAIN_VALUE.fullmatch(value))
    return all(_is_installed(Path(part)) for part in value.split(":"))


def _is_installed(library: Path) -> bool:
    """Whether a library is among the installed packages, as torch's OpenMP is."""
    import sysconfig  # noqa: PLC0415 - only when something was kept

    packages = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    return library.is_file() and any(library.resolve().is_relative_to(p) for p in packages)
