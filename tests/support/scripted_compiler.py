"""A compiler of grammars that does what a test tells it to."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

from holdfast.worker import lifetime

LEFT: list[bytes] = []
"""What grammars have left behind in this process."""


def make() -> Any:
    return obey


def just_forked() -> Any:
    """Leave the workers as they are in their first moments: not yet bound to their parent."""
    lifetime.die_with_parent = lambda parent_pid=None: None  # noqa: ARG005 - the name of the original
    return obey


def without_processes() -> Any:
    """Let most forks fail, as where a container has as many processes as it may have."""
    fork, outcomes = os.fork, cycle([True, False, False, False])

    def fork_sometimes() -> int:
        if not next(outcomes):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    os.fork = fork_sometimes
    return obey


def obey(grammar: Mapping[str, Any]) -> dict[str, Any]:
    """Do as the grammar says: crash, sleep, spin, work, grow (by a number of MiB) or refuse."""
    what, _, argument = str(grammar.get("regex", "")).partition(" ")
    match what:
        case "crash":
            os.kill(os.getpid(), int(argument))
        case "sleep":
            time.sleep(float(argument))
        case "spin":
            while True:
                pass
        case "work":
            until_seconds = time.process_time() + float(argument)
            while time.process_time() < until_seconds:
                pass
        case "grow":
            mebibytes = int(argument or sys.maxsize)
            LEFT.extend(b"x" * (1 << 20) for _ in range(mebibytes))
        case "refuse" | "abandon":
            return {"error": argument if what == "refuse" else _abandoned(float(argument))}
        case "environment" | "policy" | "files" | "timer":
            return {"backend": _told(what, argument), "was_auto": False, "changed": {}}
    changed = {"grammar": "x" * int(argument)} if what == "change" else {}
    return {"backend": str(os.getpid()), "was_auto": True, "changed": changed}


def _abandoned(seconds: float) -> str:
    """Leave a thread behind; return the pid."""
    threading.Thread(target=time.sleep, args=(seconds,), daemon=True).start()
    return str(os.getpid())


def _told(what: str, argument: str) -> str:
    """What this process has."""
    match what:
        case "environment":
            return os.environ.get(argument, "")
        case "policy":
            return str(os.sched_getscheduler(0))
        case "timer":
            return str(signal.getitimer(signal.ITIMER_PROF)[0])
        case _:
            return _files()


def _files() -> str:
    """What is open, by name."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder itself, gone by now
            found.append(str(link.readlink()).partition(":")[0])
    return " ".join(sorted(found))
