"""Reads the stacks of the engine's processes, for the log and to recognise a compiler.

A step that waits for a compiler takes minutes, but is not a stall.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

from holdfast.worker.lifetime import STACKS_SIGNAL, stacks_path

_COMPILER = re.compile(
    r"(?:.+-)?(?:gcc|g\+\+|cc|c\+\+|clang|clang\+\+|cpp|as|ld|lld|ld\.\w+)(?:-[\d.]+)?"
    r"|cc1(?:plus)?|collect2|lto1|ninja|nvcc|nvrtc_compile|cicc|cudafe\+\+|ptxas|fatbinary|nvlink"
    r"|hipcc|rustc"
)
"""The tools that extensions of torch and FlashInfer, DeepGEMM, Humming, Triton and inductor run."""
_IN_PROCESS = re.compile(
    r"\b(?:triton/(?:compiler/code_generator|backends/\w+/compiler)\.py"
    r"|cutlass/base_dsl/compiler\.py|tilelang/engine/"
    r"|torch/_inductor/(?:graph|scheduler|lowering|codegen/(?!multi_kernel)))"
    r"|\bcompile \(triton/compiler/compiler\.py"
    r"|\btriton/compiler/compiler\.py\", line \d+ in compile\b"
)
"""Frames of a thread that compiles in its own process, for example with Triton's LLVM.

The same libraries launch kernels from other files or, as Triton does, from other functions of the
same file, so a hanging kernel is not taken for a compiler.
"""


def is_compiling(processes: Iterable[psutil.Process]) -> bool:
    """Whether one of `processes` is a compiler, an assembler, a linker or a driver of these."""
    return any(_COMPILER.fullmatch(_name(process)) for process in processes)


def is_compiling_in_process(stacks: str) -> bool:
    """Whether a thread in these stacks, in the format of `stacks_of`, is in a compiler."""
    return bool(_IN_PROCESS.search(stacks))


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except (psutil.Error, OSError):
        return ""


DEADLINE_SECONDS = 10.0
_SIGNAL_DEADLINE_SECONDS = 2.0
_POLL_SECONDS = 0.1


async def stacks_of(processes: Iterable[psutil.Process], directory: Path) -> str:
    """Return the stacks of all `processes` of a generation within `DEADLINE_SECONDS`; never raise.

    py-spy reads them, even of a stopped process, if it is installed and has the permission.
    Otherwise a signal asks each process to write them into `directory`.
    """
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            found = await asyncio.gather(*(_section(process, directory) for process in processes))
    except TimeoutError:
        return f"The processes did not report their stacks within {DEADLINE_SECONDS:.0f} s."
    return "\n\n".join(found)


async def _section(process: psutil.Process, directory: Path) -> str:
    stacks = await _py_spy_stacks(process.pid) or await _own_stacks(process.pid, directory)
    return f"{_title(process)}\n{stacks or 'No stack: the process does not answer.'}"


def _title(process: psutil.Process) -> str:
    try:
        command, state = " ".join(process.cmdline()).strip(), process.status()
    except psutil.Error:
        return f"Process {process.pid} has ended."
    except OSError:  # too many open files
        return f"Process {process.pid}"
    return f"Process {process.pid} ({state}): {command[:80]}"


async def _py_spy_stacks(pid: int) -> str:
    """Read the stacks with py-spy, without stopping the process; empty if that fails."""
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if tool is None:
        return ""
    try:
        spy = await asyncio.create_subprocess_exec(
            tool,
            "dump",
            "--nonblocking",
            "--pid",
            str(pid),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ""
    try:
        printed, _ = await spy.communicate()
    except asyncio.CancelledError:
        spy.kill()
        raise
    return printed.decode(errors="replace").strip() if spy.returncode == 0 else ""


async def _own_stacks(pid: int, directory: Path) -> str:
    """Have the process write its stacks; empty if it does not handle the signal in time."""
    path = stacks_path(directory, pid)
    try:
        size_bytes = path.stat().st_size
        os.kill(pid, STACKS_SIGNAL)
    except OSError:
        return ""
    deadline = asyncio.get_running_loop().time() + _SIGNAL_DEADLINE_SECONDS
    written = ""
    while asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
        try:
            before, written = written, path.read_text(errors="replace")[size_bytes:]
        except OSError:  # too many open files
            return ""
        if written and written == before:
            break
    return written.strip()
