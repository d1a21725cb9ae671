"""The GPUs that a machine may seem to have, and the driver that answers for them."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

GIB = 1024**3
MIG_UUID = "MIG-377e0049-554c-540b-93c6-d0976f8426cb"


@dataclass(frozen=True, slots=True)
class Board:
    """One kind of GPU, and how many of it a machine has."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    count: int = 1
    is_integrated: bool = False
    """Whether its memory is the host's; NVML tells nothing of it then."""
    has_nvml: bool = True
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES, if it is set."""


BOARDS = {
    "h100": Board("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, count=4),
    "h200": Board("NVIDIA H200", (9, 0), 140 * GIB, count=2),
    "gb10": Board("NVIDIA GB10", (12, 1), 130669424640, is_integrated=True),
    "rtxpro6000": Board("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 96 * GIB),
    "mig": Board("NVIDIA H100 80GB HBM3", (9, 0), 40 * GIB, visible_devices=MIG_UUID),
    "jetson": Board("Orin", (8, 7), 60 * GIB, is_integrated=True, has_nvml=False),
}
"""`mig` is a part of an H100 that is named by its UUID; of `jetson` NVML knows nothing."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request for something that only an initialised driver can tell or do."""

    name: str
    places: tuple[str, ...]
    """The innermost functions that led to it, as `file:line`."""


@dataclass(slots=True)
class Driver:
    """What the driver of a fake GPU says, and what was asked of it. It may be changed at any time.

    Like torch, it is unusable in a process that was forked after it was initialised.
    """

    board: Board
    free_bytes: int
    """What cudaMemGetInfo says of every device."""
    host_available_bytes: int
    """What the kernel says, on a board whose memory is the host's."""
    calls: list[Call] = field(default_factory=list)
    is_in_bad_fork: bool = False

    def initialise(self, name: str) -> None:
        """Note a call that initialises the driver, or raise torch's error if it cannot."""
        if self.is_in_bad_fork:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        self.calls.append(Call(name, _places()))

    def forked(self) -> None:
        """A child has only what its parent had not begun."""
        self.is_in_bad_fork = self.is_in_bad_fork or bool(self.calls)


def _places() -> tuple[str, ...]:
    """Where it was asked for, from the inside out, without the fake and the import machinery."""
    skipped = (__file__, "fake_platform.py", "importlib")
    return tuple(
        f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}"
        for frame in reversed(traceback.extract_stack())
        if not any(part in frame.filename for part in skipped)
    )[:6]
