"""Runs programs that a model wrote, which may do anything: see `confined` for what they can do."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from pathlib import Path

from holdfast.verify.answers import excerpt
from holdfast.verify.checks.skill import confined

_DEADLINE_SECONDS = 60.0
"""By the clock."""
_CPU_SECONDS = 10
"""Of the processor, for a program that computes."""
_CODES = range(100, 200)
_SCRIPT = Path(confined.__file__)


async def passes(program: str) -> bool:
    """Whether the program gets to its last line, in time and without an error.

    A program that ends itself early does not. Whatever it leaves running is killed.
    """
    code = secrets.choice(_CODES)
    ended, _ = await _run(f"{program}\n\nimport os\nos._exit({code})\n")
    return ended == code


async def obstacle() -> str:
    """Why no program can be run here; empty if one can."""
    if not sys.platform.startswith("linux"):
        return "only Linux can confine a program"
    ended, said = await _run("raise SystemExit(42)")
    return "" if ended == 42 else excerpt(said) or f"a program that does nothing ends with {ended}"


async def _run(program: str) -> tuple[int | None, str]:
    """The exit code, None if there was none in time, and what stopped it before it began."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-S", str(_SCRIPT), str(_CPU_SECONDS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={},  # it has nothing to read there, such as a key
        cwd="/",
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_DEADLINE_SECONDS):
            _, said = await process.communicate(program.encode("utf-8", "replace"))
        return process.returncode, said.decode("utf-8", "replace")
    except TimeoutError:
        return None, ""
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
