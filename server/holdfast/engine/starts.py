"""Will a start ever end? vLLM waits ten minutes for a process that is stopped or gone (0.32)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil

from holdfast.engine import processes

CORE = "EngineCore"
"""In the title of every process that the front end waits for."""
GONE_SECONDS = 15.0
"""Longer than vLLM takes to see for itself that a core has ended, where it looks."""
LOOK_SECONDS = 1.0


async def until_stuck(
    family: Callable[[], frozenset[psutil.Process]], stopped_seconds: float
) -> str:
    """Return, with the reason, when a start cannot go on.

    That is when a process of it has been stopped for `stopped_seconds`, or when a core that was
    there has been gone for `GONE_SECONDS` and nobody took notice.
    """
    stopped_since: dict[int, float] = {}
    cores: set[psutil.Process] = set()
    gone_since: float | None = None
    while True:
        now = asyncio.get_running_loop().time()
        living = await asyncio.to_thread(family)
        stopped_since = {pid: stopped_since.get(pid, now) for pid in processes.stopped(living)}
        for pid, since in stopped_since.items():
            if now - since >= stopped_seconds:
                return f"process {pid} was stopped by a signal for {now - since:.0f} s"
        cores |= {process for process in living if _is_core(process)}
        is_one_gone = any(not processes.is_alive(core) for core in cores)
        gone_since = (gone_since or now) if is_one_gone else None
        if gone_since is not None and now - gone_since >= GONE_SECONDS:
            return "EngineCore ended without a message"
        await asyncio.sleep(LOOK_SECONDS)


def _is_core(process: psutil.Process) -> bool:
    try:
        return CORE in " ".join(process.cmdline())
    except psutil.Error:
        return False
