"""The file of a rank's stats: where everything is in it, and how a reader knows that it is whole.

    header     what kind of file it is
    pulses     what every step changes: counts, times, and which report belongs to them
    reports    what changes seldom, each as JSON: `records.RankReport`, field by field
    ring       the newest steps

Of pulses and reports there are several copies, which take turns. A pulse and a step carry a
checksum of their own, and a pulse that of its report; what does not match its checksum does not
count. So it does not matter in which order the stores of a write become visible: a processor such
as ARM's may reorder them, and Python has no barrier. A reader sees all of a write or nothing of it,
except for one torn write in four billion that matches its checksum by chance.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.records import EngineStep, RankReport

LAYOUT = 4
"""Changes with what follows; a file of another layout is not read."""
MAGIC = 0x484F4C44
MAX_SLOTS = 8
MAX_CALLERS = 16
RECENT_STEPS = 1024
NAME_BYTES = 120
"""The maximum of a caller's name in a report."""
TEXT_BYTES = 2000
"""The maximum of a reason or an error in a report."""

COPIES = 8
RING_STEPS = RECENT_STEPS + COPIES
"""More than are read: a step that is written while they are read is never among them."""
REPORT_BYTES = 16 * 1024
"""Room for a report. The longest names and texts in every place fill at most three quarters."""

HEADER = struct.Struct("=qq")
"""The magic number and the layout."""
_CHECKSUM = struct.Struct("=q")
_PULSE = struct.Struct("=qqqqqqdd")
_STEP = struct.Struct("=qqqdd")
PULSE_BYTES = _PULSE.size + _CHECKSUM.size
STEP_BYTES = _STEP.size + _CHECKSUM.size

PULSES_OFFSET = HEADER.size
REPORTS_OFFSET = PULSES_OFFSET + COPIES * PULSE_BYTES
RING_OFFSET = REPORTS_OFFSET + COPIES * REPORT_BYTES
FILE_BYTES = RING_OFFSET + RING_STEPS * STEP_BYTES


class ReportPlace(NamedTuple):
    """Which report is the newest: its number, its size, and the checksum of its JSON."""

    number: int = 0
    size_bytes: int = 0
    checksum: int = 0


class StepCounts(NamedTuple):
    """What every step changes; a time of 0 is unknown."""

    steps: int = 0
    scheduled_tokens: int = 0
    running_step_started_seconds: float = 0.0
    last_step_ended_seconds: float = 0.0


class Pulse(NamedTuple):
    """What one write shows, by the number of the write."""

    write: int
    report: ReportPlace
    counts: StepCounts


def packed_pulse(write: int, report: ReportPlace, counts: StepCounts) -> bytes:
    """Return the bytes of a pulse, with their checksum."""
    return _with_checksum(_PULSE.pack(write, *report, *counts))


def unpacked_pulse(content: bytes) -> Pulse | None:
    """Return the pulse of these bytes; None if it is not whole."""
    if (fields := _checked(content)) is None:
        return None
    write, number, size_bytes, checksum, *counts = _PULSE.unpack(fields)
    return Pulse(write, ReportPlace(number, size_bytes, checksum), StepCounts(*counts))


def encoded_report(report: RankReport) -> bytes:
    """Return the JSON of a report. NumPy's integers, with which layers compute, are numbers too."""
    # Not pydantic, which validates it: the GPU kit writes reports where only torch is installed.
    return _json(report)


def packed_step(
    index: int, scheduled_tokens: int, requests: int, started_seconds: float, seconds: float
) -> bytes:
    """Return the bytes of a step, with their checksum."""
    fields = _STEP.pack(index, scheduled_tokens, requests, started_seconds, seconds)
    return _with_checksum(fields)


def unpacked_step(content: bytes) -> EngineStep | None:
    """Return the step of these bytes; None if it is not whole."""
    fields = _checked(content)
    return None if fields is None else EngineStep(*_STEP.unpack(fields))


def pulse_offset(write: int) -> int:
    """Where the pulse of this write is."""
    return PULSES_OFFSET + write % COPIES * PULSE_BYTES


def report_offset(number: int) -> int:
    """Where the report with this number is."""
    return REPORTS_OFFSET + number % COPIES * REPORT_BYTES


def step_offset(index: int) -> int:
    """Where the step with this index is."""
    return RING_OFFSET + index % RING_STEPS * STEP_BYTES


def stats_path(directory: Path, engine: int, rank: int) -> Path:
    """Where the rank keeps its file."""
    return directory / f"engine-{engine}-rank-{rank}.stats"


def cut_text(text: str, max_bytes: int) -> str:
    """Return the text, cut so that its JSON, escapes included, takes at most `max_bytes`."""
    kept = text[:max_bytes].encode("utf-8", "replace").decode()
    while (size_bytes := len(_json(kept))) > max_bytes:
        kept = kept[: len(kept) * max_bytes // size_bytes]
    return kept


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> dict[str, object] | int:
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return int(value)


def _with_checksum(fields: bytes) -> bytes:
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


def _checked(content: bytes) -> bytes | None:
    fields, checksum = content[: -_CHECKSUM.size], content[-_CHECKSUM.size :]
    return fields if checksum == _CHECKSUM.pack(zlib.crc32(fields)) else None
