"""What has the GPU's driver complained about since this machine started?

A driver that once ran out of memory, or lost a GPU, often fails the next engine, until the machine
is started again.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.doctor.findings import Finding, HazardName, ok, warning
from holdfast.nodes.facts import DRIVER_VERSION
from holdfast.verify.answers import excerpt

READ_SECONDS = 5.0
MAX_LOG_BYTES = 64 * 1024 * 1024
"""More than the kernel keeps; an endless file is not read further."""
_RECORD_BYTES = 64 * 1024
_KERNEL_LOG = "dev/kmsg"
_KEPT_LINES = 3
_COMPLAINT = re.compile(
    r"NVRM:.*(?:Xid|error|fail|fallen off|mismatch|out of memory|NV_ERR_)", re.IGNORECASE
)
"""The other lines of the driver say that it was loaded."""
_REMEDY = "run `dmesg | grep -E 'NVRM|Xid'` on the host, as root."


@dataclass(frozen=True, slots=True)
class DriverLog:
    """What the kernel's log says about the driver."""

    complaints: int = 0
    last: tuple[str, ...] = ()
    """The last few of them."""
    problem: str = ""
    """Why the log cannot be read; empty if it was."""


def read_driver_log(
    root: Path = Path("/"), deadline_seconds: float = READ_SECONDS
) -> DriverLog | None:
    """Read the kernel's log; None if no driver of NVIDIA's is loaded."""
    if not (root / DRIVER_VERSION.relative_to("/")).exists():
        return None
    complaints, last = 0, deque[str](maxlen=_KEPT_LINES)
    try:
        for line in _lines(root / _KERNEL_LOG, time.monotonic() + deadline_seconds):
            if _COMPLAINT.search(line):
                complaints += 1
                last.append(excerpt(line.partition(";")[2] or line))
    except OSError as error:
        return DriverLog(problem=error.strerror or str(error))
    return DriverLog(complaints, tuple(last))


def check_driver_log(log: DriverLog | None) -> Iterator[Finding]:
    """Yield what the driver has complained about, if there is a driver."""
    name: HazardName = "driver-log"
    if log is None:
        return
    if log.problem:
        yield warning(name, f"the kernel's log cannot be read: {log.problem}.", _REMEDY)
    elif log.complaints:
        yield warning(
            name,
            f"the GPU's driver has logged {log.complaints} errors since the machine started, the "
            f"last of them: {' | '.join(log.last)}",
            "look an Xid up in https://docs.nvidia.com/deploy/xid-errors/, and restart this "
            "machine before the next start, unless the driver complained only while loading.",
        )
    else:
        yield ok(name, "the GPU's driver has not complained")


def _lines(path: Path, deadline_seconds: float) -> Iterator[str]:
    """Yield the lines of the log until its end, the deadline or the limit in bytes.

    Raises:
        OSError: it cannot be read.
    """
    log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    rest, left_bytes = b"", MAX_LOG_BYTES
    try:
        while left_bytes > 0 and time.monotonic() < deadline_seconds:
            try:
                data = os.read(log, _RECORD_BYTES)
            except BlockingIOError:  # the end of the device
                break
            except BrokenPipeError:  # the kernel has overwritten the next record
                continue
            if not data:  # the end of a file
                break
            left_bytes -= len(data)
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
    finally:
        os.close(log)
