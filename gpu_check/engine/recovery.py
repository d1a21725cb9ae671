"""Is a killed engine replaced, with the same answers, and does its memory come back?"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_check.engine import device_memory
from gpu_check.engine.growth import short_answers
from gpu_check.engine.servers import POLL_SECONDS
from gpu_check.engine.subjects import Engine
from gpu_check.records import CheckFailedError, CheckSkippedError, Measured

_RECOVERY_SECONDS = 150.0
_RETURN_SECONDS = 30.0
_MARGIN_BYTES = 64 << 20
"""By which two readings of the same state differ: the driver's own."""


def check(engine: Engine) -> Sequence[Measured]:
    """SIGKILL to the engine; the next one says what the killed one said."""
    server = engine.server
    before = short_answers(engine)
    engine.note_memory("first engine")
    generation = server.status()["engine"]["generation"]
    killed = server.cores()
    if not killed:
        raise CheckFailedError("no process of the engine was found")
    began_seconds = time.monotonic()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    server.until(
        lambda: (
            server.status()["engine"]["generation"] > generation and server.answers_200("/readyz")
        ),
        "ready after its engine was killed",
        _RECOVERY_SECONDS * engine.patience,
    )
    seconds = time.monotonic() - began_seconds
    after = short_answers(engine)
    engine.note_memory("second engine")
    if before != after:
        raise CheckFailedError(f"the killed engine said {before}, the next one {after}")
    left = [pid for pid in killed if Path(f"/proc/{pid}").exists()]
    if left:
        raise CheckFailedError(f"processes of the killed engine are left: {left}")
    return [
        Measured("ready again after", round(seconds, 1), "s"),
        Measured("answers that are the same", len(after)),
    ]


def memory_returned(engine: Engine) -> Sequence[Measured]:
    """The second engine found the memory of the first free, and the stop left none in use."""
    readings = engine.readings
    if not readings.keys() >= {"before", "first engine", "second engine"}:
        raise CheckSkippedError("no engine was replaced while the device's memory was watched")
    if any(device.is_integrated for device in engine.errand.machine.devices):
        raise CheckSkippedError("the device shares the host's memory, whose page cache is in use")
    code = engine.server.stop()
    if code:
        raise CheckFailedError(f"the server ended with {code} when it was asked to stop")
    deadline_seconds = time.monotonic() + _RETURN_SECONDS
    readings["after"] = device_memory.used_bytes()
    while _is_more(readings, "after", "before") and time.monotonic() < deadline_seconds:
        time.sleep(POLL_SECONDS)
        readings["after"] = device_memory.used_bytes()
    for later, earlier in (("second engine", "first engine"), ("after", "before")):
        if _is_more(readings, later, earlier):
            more_bytes = readings[later] - readings[earlier]
            raise CheckFailedError(
                f"{later}: {more_bytes} bytes more are in use than {earlier}; does something else "
                "run on the device?"
            )
    return [Measured(f"in use, {moment}", size, "bytes") for moment, size in readings.items()]


def _is_more(readings: dict[str, int], later: str, earlier: str) -> bool:
    return readings[later] > readings[earlier] + _MARGIN_BYTES
