"""Runs other people's programs that are installed here: lm-eval, guidellm and aiperf.

They are the user's own and belong to no extra, so they are not confined as `other_tools` are. They
download nothing and report nothing to anybody. The key reaches them in their environment alone,
where no list of processes shows it. What they write is bounded, and they end with their check.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from holdfast.verify.answers import excerpt
from holdfast.verify.other_tools import last_line, tail_of
from holdfast.verify.redaction import redacted
from holdfast.verify.trial import InconclusiveError, SkippedError, Trial

_MAX_BYTES = 64 * 1024 * 1024
"""The maximum of a program's results."""
_END_SECONDS = 10.0
_POLL_SECONDS = 0.2
_VARIABLES = {
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
_DIE_WITH_PARENT = (
    sys.executable,
    *("-I", "-S", "-c"),
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])",
)
"""Has Linux kill the program when this process is killed and can no longer do so itself."""


@dataclass(frozen=True, slots=True)
class OtherProgram:
    """A program, by the name of its command."""

    name: str
    remedy: str
    """How it is installed."""
    results: str
    """The JSON file that it writes, as a pattern below its output directory."""
    complaint: str = ""
    """What the line has that says why it failed; empty if that is its last line."""
    key_variable: str = "OPENAI_API_KEY"
    """Where it looks for the key."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What it has in its environment beside what all of them have; an empty one is unset."""


def path_of(program: OtherProgram) -> str | None:
    """Where the program is, on PATH or beside our Python; None if it is not installed."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(program.name) or shutil.which(program.name, path=beside)


async def results_of(
    program: OtherProgram, trial: Trial, arguments: Callable[[Path], Sequence[str]]
) -> Mapping[str, Any]:
    """The results of a program that is told a directory to write them to, which is then removed.

    None of its processes runs any more when this returns, raises or is cancelled.

    Raises:
        SkippedError: it is not installed, or would have the address's password in its arguments.
        InconclusiveError: it fails, or writes no results that can be read.
    """
    path = path_of(program)
    if path is None:
        raise SkippedError(f"{program.name} is not installed", program.remedy)
    if trial.server.url != trial.target.url:
        raise SkippedError(
            f"{program.name} takes no user, password or query in the address",
            "give the address without them, and a key with --api-key-file",
        )
    with TemporaryDirectory(prefix="holdfast-verify-", ignore_cleanup_errors=True) as scratch:
        directory = Path(scratch)
        command = [path, *arguments(directory)]
        await _run(program, command, _environment(program, trial, directory), trial.target.secrets)
        return _read(program, directory)


async def _run(
    program: OtherProgram,
    command: Sequence[str],
    environment: Mapping[str, str],
    secrets: Sequence[str],
) -> None:
    """Wait for the end of the command.

    Raises:
        InconclusiveError: it ends with another code than 0; the text has the last line of it.
    """
    launcher = _DIE_WITH_PARENT if sys.platform.startswith("linux") else ()
    process = await asyncio.create_subprocess_exec(
        *(*launcher, *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    reading = asyncio.create_task(tail_of(process.stdout))
    children = set[psutil.Process]()
    try:
        # `wait` would also wait for any process that has the pipe.
        while process.returncode is None:
            children |= _children(process.pid)
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        _kill(process.pid, children | _children(process.pid))
        await asyncio.wait({reading}, timeout=_END_SECONDS)
        reading.cancel()  # a process that was not found may hold the pipe
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_SECONDS)
    if process.returncode:
        said = b"" if reading.cancelled() or not reading.done() else reading.result()
        last = redacted(_why(program, said), secrets)
        raise InconclusiveError(f"{program.name} ended with {process.returncode}: {excerpt(last)}")


def _why(program: OtherProgram, said: bytes) -> str:
    """The last line that says why it failed."""
    _, *whole = said.decode("utf-8", "replace").splitlines() or [""]  # the first one may be cut
    complaints = [line for line in whole if program.complaint and program.complaint in line]
    return complaints[-1] if complaints else last_line(said)


def _children(pid: int) -> set[psutil.Process]:
    """The children of the process, and theirs; none when it has ended."""
    try:
        return {*psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def _kill(pid: int, children: Iterable[psutil.Process]) -> None:
    """Kill the group of the process, and children that have left it, also if it has ended."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def _environment(program: OtherProgram, trial: Trial, directory: Path) -> Mapping[str, str]:
    """This process's environment without another server's key, and what keeps a program at home."""
    own = {program.key_variable: trial.target.api_key}
    changed = {**_VARIABLES, **program.variables, **own}
    given = {**os.environ, **changed, "TMPDIR": str(directory)}
    return {name: value for name, value in given.items() if value or name not in changed}


def _read(program: OtherProgram, directory: Path) -> Mapping[str, Any]:
    """Raise InconclusiveError if there is no JSON object."""
    for path in directory.glob(program.results):
        if path.stat().st_size <= _MAX_BYTES:
            with suppress(ValueError, RecursionError):
                found = json.loads(path.read_bytes())
                if isinstance(found, dict):
                    return found
    raise InconclusiveError(f"{program.name} wrote no results that can be read")
