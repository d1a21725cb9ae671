"""How many bytes of the first device are in use, by any process?

Asked in a process of its own, which takes a context of the same size each time: the process of a
check must hold nothing of the device, and not every driver tells it otherwise.
"""

from __future__ import annotations

import subprocess
import sys

_READ_SECONDS = 60.0
_PROGRAM = """
import torch
free, total = torch.cuda.mem_get_info(0)
print(total - free)
"""


def used_bytes() -> int:
    """What the driver says, with the context of the asking process.

    Raises:
        subprocess.SubprocessError: the driver did not answer.
    """
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=_READ_SECONDS
    )
    return int(done.stdout)
