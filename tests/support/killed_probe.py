"""Kills a probe in the middle of an attempt, as when the machine goes down."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import os, signal, sys
from pathlib import Path
from holdfast.probe.journal import ProbeJournal

journal = ProbeJournal(Path(sys.argv[1]), sys.argv[2])
attempt = getattr(journal, sys.argv[3])
*ended, last = map(int, sys.argv[4:])
for size in ended:
    with attempt(size):
        pass
with attempt(last):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_during_last(
    directory: Path, fingerprint: str, *sizes: int, attempt: str = "attempt"
) -> None:
    """Attempt the sizes in a separate process, which is killed during the last."""
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(directory), fingerprint, attempt, *map(str, sizes)],
        timeout=60,
        check=False,
    )
    assert run.returncode == -signal.SIGKILL
