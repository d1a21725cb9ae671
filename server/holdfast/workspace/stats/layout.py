"""The file of a rank's stats: where everything lies in it, and how a reader knows it is whole.

The file holds several copies of the record, each with the number of its write and a checksum over
both, and a ring of steps, each with a checksum of its own. A copy or a step counts only if its
checksum fits. So it does not matter in which order the stores of a write become visible: a
processor like ARM's may reorder them, and Python has no barrier. A reader sees all of a write or
nothing of it, but for one torn write in four thousand million that has the checksum by chance.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import zlib
from pathlib import Path

from holdfast.records import GROWTH_PHASES, MEMORY_KINDS, REJECTION_KINDS, START_PHASES

LAYOUT = 3
"""Changes with the structures below; a file of another layout is not read."""
MAGIC = 0x484F4C44
MAX_SLOTS = 8
MAX_CALLERS = 16
RECENT_STEPS = 1024
NAME_BYTES = 120
TEXT_BYTES = 2000
UNKNOWN = -1
COPIES = 8
RING_STEPS = RECENT_STEPS + COPIES
"""More than are shown: a step that is written while they are read is never among them."""
STEP_FIELDS = struct.Struct("=qqqdd")
Content = bytes | ctypes.Array[ctypes.c_char]


class Slot(ctypes.Structure):
    """One workspace."""

    _fields_ = (
        ("ubatch", ctypes.c_int64),
        ("lane", ctypes.c_int64),
        ("size_bytes", ctypes.c_int64),
        ("reserved_bytes", ctypes.c_int64),
        ("high_water_bytes", ctypes.c_int64),
        ("high_water_caller", ctypes.c_char * NAME_BYTES),
    )


class Caller(ctypes.Structure):
    """The largest need of a caller."""

    _fields_ = (("needed_bytes", ctypes.c_int64), ("name", ctypes.c_char * NAME_BYTES))


class Step(ctypes.Structure):
    """One finished step: the fields of `STEP_FIELDS`, and their checksum."""

    _fields_ = (
        ("index", ctypes.c_int64),
        ("scheduled_tokens", ctypes.c_int64),
        ("requests", ctypes.c_int64),
        ("started_seconds", ctypes.c_double),
        ("duration_seconds", ctypes.c_double),
        ("checksum", ctypes.c_int64),
    )


class Record(ctypes.Structure):
    """Everything but the steps, as it was at one moment."""

    _fields_ = (
        ("engine", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("generation", ctypes.c_int64),
        ("pid", ctypes.c_int64),
        ("slot_count", ctypes.c_int64),
        ("slots", Slot * MAX_SLOTS),
        ("retired_bytes", ctypes.c_int64),
        ("persistent_bytes", ctypes.c_int64),
        ("lamport_bytes", ctypes.c_int64),
        ("is_locked", ctypes.c_int64),
        ("is_sealed", ctypes.c_int64),
        ("is_unified_memory", ctypes.c_int64),
        ("growths", ctypes.c_int64 * len(GROWTH_PHASES)),
        ("rejections", ctypes.c_int64 * len(REJECTION_KINDS)),
        ("rejection_kind", ctypes.c_int64),
        ("rejection_needed_bytes", ctypes.c_int64),
        ("rejection_held_bytes", ctypes.c_int64),
        ("rejection_caller", ctypes.c_char * NAME_BYTES),
        ("rejection_reason", ctypes.c_char * TEXT_BYTES),
        ("caller_count", ctypes.c_int64),
        ("callers", Caller * MAX_CALLERS),
        ("memory", ctypes.c_int64 * len(MEMORY_KINDS)),
        ("phases", ctypes.c_double * len(START_PHASES)),
        ("fatal_error", ctypes.c_char * TEXT_BYTES),
        # From here on what every step changes, the rest seldom does.
        ("steps", ctypes.c_int64),
        ("scheduled_tokens", ctypes.c_int64),
        ("running_step_started_seconds", ctypes.c_double),
        ("last_step_ended_seconds", ctypes.c_double),
    )


REST_BYTES = Record.steps.offset
"""The part of a record before the counts of steps."""


class Header(ctypes.Structure):
    """What kind of file it is, and how many writes were shown."""

    _fields_ = (
        ("magic", ctypes.c_int64),
        ("layout", ctypes.c_int64),
        ("writes", ctypes.c_int64),
    )


class Copy(ctypes.Structure):
    """What was shown by one write."""

    _fields_ = (("record", Record), ("write", ctypes.c_int64), ("checksum", ctypes.c_int64))


class Ring(ctypes.Structure):
    """The newest steps, each at its index modulo the size."""

    _fields_ = (("steps", Step * RING_STEPS),)


class StatsFile(ctypes.Structure):
    """The whole file."""

    _fields_ = (("header", Header), ("copies", Copy * COPIES), ("ring", Ring))


def stats_path(directory: Path, engine: int, rank: int) -> Path:
    """Where the rank keeps its file."""
    return directory / f"engine-{engine}-rank-{rank}.stats"


def rest_checksum(rest: Content) -> int:
    """Of the bytes of a record before the counts of steps, which take most of the time."""
    return zlib.crc32(rest)


def copy_checksum(checksum_of_rest: int, step_counts: Content, write: int) -> int:
    """Of a whole record, and of the write that shows it."""
    number = (write & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, sys.byteorder)
    return zlib.crc32(number, zlib.crc32(step_counts, checksum_of_rest))


def step_checksum(fields: bytes) -> int:
    """Of the packed fields of a step."""
    return zlib.crc32(fields)
