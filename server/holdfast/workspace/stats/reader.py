"""Reads the file of a rank, while its worker writes and after it is dead; never asks the engine."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

from holdfast.atomic_files import files_with_suffix
from holdfast.records import (
    GROWTH_PHASES,
    MEMORY_KINDS,
    REJECTION_KINDS,
    START_PHASES,
    EngineStep,
    RankStats,
    Rejection,
    SlotStats,
)
from holdfast.workspace.stats.layout import (
    COPIES,
    LAYOUT,
    MAGIC,
    RECENT_STEPS,
    REST_BYTES,
    STEP_FIELDS,
    UNKNOWN,
    Copy,
    Header,
    Record,
    Ring,
    Slot,
    StatsFile,
    Step,
    copy_checksum,
    rest_checksum,
    step_checksum,
)

_CHECKSUM = struct.Struct("=q")
_READ_ATTEMPTS = 1000
"""One takes microseconds and is in vain if `COPIES` writes fall into it; so many never are."""


def read_stats(path: Path, *, with_steps: bool = True) -> RankStats | None:
    """The record in `path`; None if there is no whole file of this layout.

    Without the recent steps it costs a tenth.
    """
    try:
        with path.open("rb", buffering=0) as file:
            found = _shown(file.fileno(), with_steps=with_steps)
    except OSError:
        return None
    return _rank_stats(*found) if found else None


def _shown(descriptor: int, *, with_steps: bool) -> tuple[Record, tuple[EngineStep, ...]] | None:
    """The record and the steps as they were at one moment."""
    if os.fstat(descriptor).st_size < ctypes.sizeof(StatsFile):
        return None
    for _ in range(_READ_ATTEMPTS):
        header = Header.from_buffer_copy(_part(descriptor, 0, Header))
        if header.magic != MAGIC or header.layout != LAYOUT:
            return None
        # The one before, where the newest is not whole yet: its number may be visible first.
        for write in (header.writes, header.writes - 1):
            record = _record(descriptor, write)
            if record is None:
                continue
            if not with_steps:
                return record, ()
            steps = _recent_steps(_part(descriptor, StatsFile.ring.offset, Ring), record.steps)
            if len(steps) == min(record.steps, RECENT_STEPS):
                return record, steps
    return None


def _record(descriptor: int, write: int) -> Record | None:
    """What this write showed; None if its copy is not whole, or has served another since."""
    place = StatsFile.copies.offset + write % COPIES * ctypes.sizeof(Copy)
    content = _part(descriptor, place, Copy)
    copy = Copy.from_buffer_copy(content)
    rest = rest_checksum(content[:REST_BYTES])
    checksum = copy_checksum(rest, content[REST_BYTES : ctypes.sizeof(Record)], write)
    return copy.record if (copy.write, copy.checksum) == (write, checksum) else None


def _part(descriptor: int, offset: int, kind: type[ctypes.Structure]) -> bytes:
    return os.pread(descriptor, ctypes.sizeof(kind), offset)


def read_all(directory: Path, *, with_steps: bool = True) -> tuple[RankStats, ...]:
    """The records of every rank that has written one, ordered by engine and rank."""
    found = (
        read_stats(path, with_steps=with_steps) for path in files_with_suffix(".stats", directory)
    )
    return tuple(sorted((s for s in found if s), key=lambda s: (s.engine, s.rank)))


def _rank_stats(record: Record, recent_steps: tuple[EngineStep, ...]) -> RankStats:
    return RankStats(
        engine=record.engine,
        rank=record.rank,
        generation=record.generation,
        pid=record.pid,
        slots=tuple(_slot_stats(slot) for slot in record.slots[: record.slot_count]),
        retired_bytes=record.retired_bytes,
        persistent_bytes=record.persistent_bytes,
        lamport_bytes=None if record.lamport_bytes == UNKNOWN else record.lamport_bytes,
        is_locked=bool(record.is_locked),
        is_sealed=bool(record.is_sealed),
        growths=dict(zip(GROWTH_PHASES, record.growths, strict=True)),
        rejections=dict(zip(REJECTION_KINDS, record.rejections, strict=True)),
        last_rejection=_last_rejection(record),
        callers={_decoded(c.name): c.needed_bytes for c in record.callers[: record.caller_count]},
        memory={k: v for k, v in zip(MEMORY_KINDS, record.memory, strict=True) if v != UNKNOWN},
        phases={k: v for k, v in zip(START_PHASES, record.phases, strict=True) if v},
        steps=record.steps,
        scheduled_tokens=record.scheduled_tokens,
        running_step_started_seconds=record.running_step_started_seconds or None,
        last_step_ended_seconds=record.last_step_ended_seconds or None,
        recent_steps=recent_steps,
        fatal_error=_decoded(record.fatal_error),
        is_unified_memory=bool(record.is_unified_memory),
    )


def _slot_stats(slot: Slot) -> SlotStats:
    return SlotStats(
        ubatch=slot.ubatch,
        lane=slot.lane,
        size_bytes=slot.size_bytes,
        reserved_bytes=slot.reserved_bytes,
        high_water_bytes=slot.high_water_bytes,
        high_water_caller=_decoded(slot.high_water_caller),
    )


def _last_rejection(record: Record) -> Rejection | None:
    if record.rejection_kind not in range(len(REJECTION_KINDS)):  # none, or a corrupt file
        return None
    return Rejection(
        kind=REJECTION_KINDS[record.rejection_kind],
        caller=_decoded(record.rejection_caller),
        needed_bytes=record.rejection_needed_bytes,
        held_bytes=record.rejection_held_bytes,
        reason=_decoded(record.rejection_reason),
    )


def _recent_steps(content: bytes, newest: int) -> tuple[EngineStep, ...]:
    """Those of the newest steps that are whole."""
    steps = []
    for place in range(0, len(content), ctypes.sizeof(Step)):
        index, *others = STEP_FIELDS.unpack_from(content, place)
        if max(0, newest - RECENT_STEPS) < index <= newest:
            fields = content[place : place + STEP_FIELDS.size]
            (checksum,) = _CHECKSUM.unpack_from(content, place + STEP_FIELDS.size)
            if checksum == step_checksum(fields):
                steps.append(EngineStep(index, *others))
    return tuple(sorted(steps, key=lambda step: step.index))


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")
