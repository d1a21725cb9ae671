"""Reads the file of a rank, while its worker writes and after it is dead; never asks the engine."""

from __future__ import annotations

import os
import zlib
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.atomic_files import files_with_suffix
from holdfast.records import EngineStep, RankReport, RankStats
from holdfast.workspace.stats.layout import (
    COPIES,
    FILE_BYTES,
    HEADER,
    LAYOUT,
    MAGIC,
    PULSE_BYTES,
    PULSES_OFFSET,
    RECENT_STEPS,
    REPORTS_OFFSET,
    RING_OFFSET,
    RING_STEPS,
    STEP_BYTES,
    Pulse,
    report_offset,
    unpacked_pulse,
    unpacked_step,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_READ_ATTEMPTS = 1000
"""An attempt takes microseconds and fails only if `COPIES` writes happen meanwhile; a thousand in a
row do not."""
_REPORTED = tuple(field.name for field in fields(RankReport))


class _Moment(NamedTuple):
    """What the file says of one moment."""

    pulse: Pulse
    report: bytes
    steps: tuple[EngineStep, ...]


def read_stats(path: Path, *, reads_steps: bool = True) -> RankStats | None:
    """Return the record in `path`; None if there is no whole file of this layout.

    Without the recent steps it costs a tenth.
    """
    try:
        with path.open("rb", buffering=0) as file:
            moment = _newest(file.fileno(), reads_steps=reads_steps)
    except OSError:
        return None
    return None if moment is None else _rank_stats(moment)


def read_all(directory: Path, *, reads_steps: bool = True) -> tuple[RankStats, ...]:
    """Return the records of every rank that has written one, ordered by engine and rank."""
    found = (
        read_stats(path, reads_steps=reads_steps) for path in files_with_suffix(".stats", directory)
    )
    return tuple(sorted((s for s in found if s), key=lambda s: (s.engine, s.rank)))


def _newest(descriptor: int, *, reads_steps: bool) -> _Moment | None:
    if os.fstat(descriptor).st_size < FILE_BYTES:
        return None
    for _ in range(_READ_ATTEMPTS):
        start = os.pread(descriptor, REPORTS_OFFSET, 0)
        if HEADER.unpack_from(start) != (MAGIC, LAYOUT):
            return None
        # The second where the newest is not whole yet: it may be visible before its report.
        for pulse in _pulses(start)[:2]:
            report = os.pread(
                descriptor, pulse.report.size_bytes, report_offset(pulse.report.number)
            )
            if zlib.crc32(report) != pulse.report.checksum:
                continue
            steps = _recent_steps(descriptor, pulse.counts.steps) if reads_steps else ()
            if not reads_steps or len(steps) == min(pulse.counts.steps, RECENT_STEPS):
                return _Moment(pulse, report, steps)
    return None


def _pulses(start: bytes) -> list[Pulse]:
    """Return the pulses that are whole, the newest first."""
    offsets = range(PULSES_OFFSET, PULSES_OFFSET + COPIES * PULSE_BYTES, PULSE_BYTES)
    found = (unpacked_pulse(start[offset : offset + PULSE_BYTES]) for offset in offsets)
    return sorted(filter(None, found), reverse=True)


def _recent_steps(descriptor: int, newest: int) -> tuple[EngineStep, ...]:
    """Return those of the newest steps that are whole, the oldest first."""
    ring = os.pread(descriptor, RING_STEPS * STEP_BYTES, RING_OFFSET)
    places = range(0, len(ring), STEP_BYTES)
    found = (unpacked_step(ring[place : place + STEP_BYTES]) for place in places)
    oldest = max(1, newest - RECENT_STEPS + 1)
    steps = (step for step in found if step is not None and oldest <= step.index <= newest)
    return tuple(sorted(steps, key=lambda step: step.index))


def _rank_stats(moment: _Moment) -> RankStats | None:
    try:
        report = _report_type().validate_json(moment.report)
    except ValueError:  # another version of Holdfast wrote it
        return None
    counts = moment.pulse.counts
    return RankStats(
        **{name: getattr(report, name) for name in _REPORTED},
        steps=counts.steps,
        scheduled_tokens=counts.scheduled_tokens,
        running_step_started_seconds=counts.running_step_started_seconds or None,
        last_step_ended_seconds=counts.last_step_ended_seconds or None,
        recent_steps=moment.steps,
    )


@cache
def _report_type() -> TypeAdapter[RankReport]:
    # Not at the top: the GPU kit, which reads no reports, runs where only torch is installed.
    from pydantic import TypeAdapter  # noqa: PLC0415 - as above

    return TypeAdapter(RankReport)
