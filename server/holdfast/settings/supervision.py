"""What happens when the engine dies, hangs, grows old, or takes the memory of its host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.settings.flag import (
    boolean,
    choice,
    count,
    flag,
    memory_marks,
    positive_seconds,
    seconds,
)
from holdfast.settings.recycling import RecycleLimits, recycle_limits

GuardMode = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class SupervisionSettings:
    """What happens when the engine dies or hangs, and how the server ends."""

    max_engine_restarts: int = flag(
        "--max-engine-restarts",
        count,
        3,
        "N",
        "maximum restarts of the engine within `--restart-window`; at the next death, exit with "
        "code 5. Deaths caused by requests, by a lack of host memory, or by the loss of another "
        "node never end the server: beyond N it waits for minutes before each further start. With "
        "0, any death ends the server",
    )
    restart_window_seconds: float = flag(
        "--restart-window",
        positive_seconds,
        1800.0,
        "SECONDS",
        "time over which `--max-engine-restarts` counts",
        shown="1800",
    )
    hold_timeout_seconds: float = flag(
        "--hold-timeout",
        seconds,
        60.0,
        "SECONDS",
        "during a recovery, hold new requests if READY is expected within this time, otherwise "
        "answer 503; 0 holds none",
        shown="60",
    )
    continues_streams: bool = flag(
        "--continue-streams",
        boolean,
        default=True,
        metavar="on|off",
        meaning="when the engine dies, the next engine continues the streams that had begun; with "
        "`off`, they end with an error",
        shown="on",
        choices=("on", "off"),
    )
    stall_timeout_seconds: float = flag(
        "--stall-timeout",
        positive_seconds,
        120.0,
        "SECONDS",
        "restart an engine that has requests but finishes no step for longer than both this "
        "time and three times the probe's slowest step",
        shown="120",
    )
    drain_timeout_seconds: float = flag(
        "--drain-timeout",
        seconds,
        45.0,
        "SECONDS",
        "time for running requests to finish after SIGTERM, or before the engine is restarted, "
        "proven again or put to sleep on request",
        shown="45",
    )
    recycle_after: RecycleLimits = flag(
        "--recycle-after",
        recycle_limits,
        RecycleLimits(),
        "LIMIT,...",
        "restart the engine as planned once it has served this long (`24h`), holds this much host "
        "memory (`8GiB`) or was given this many requests (`100000requests`), whichever comes first",
        shown="none",
    )
    recycle_within_seconds: float = flag(
        "--recycle-within",
        seconds,
        600.0,
        "SECONDS",
        "before a planned restart, wait at most this long for 10 s without a request",
        shown="600",
    )


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What happens when the host runs out of memory."""

    guard: GuardMode = choice(
        "--host-memory-guard",
        ("auto", "on", "off"),
        "auto",
        "make long prompts wait, then abort them, and finally replace the engine, before the host "
        "runs out of memory: `auto` does so where the device shares the host's memory, as on GB10 "
        "and on the CPU",
    )
    marks: tuple[int, int, int] | None = flag(
        "--host-memory-marks",
        memory_marks,
        None,
        "SIZE,SIZE,SIZE",
        "three thresholds for the available memory of the host or container: below the first, "
        "long prompts wait; below the second, they are aborted; below the third, the engine is "
        "replaced; 0 disables a threshold",
        shown="4%, 2% and 1% of the total, at most 4GiB, 2GiB and 1GiB",
    )

    def guards_engine(self, *, is_unified_memory: bool) -> bool:
        """Return whether the guard protects the host from an engine on such a device."""
        return self.guard == "on" or (self.guard == "auto" and is_unified_memory)
