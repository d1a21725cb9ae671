"""One mmap file per rank: written by its worker alone, read by anyone, also after its death.

The file holds several copies of the record. A write fills the oldest and then shows it with one
aligned store, so that a reader sees all of a write or nothing of it, wherever the writer was
killed. Reading never calls into the engine. Knows neither vLLM nor torch.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, Protocol, Self

from holdfast.records import (
    GROWTH_PHASES,
    MEMORY_KINDS,
    REJECTION_KINDS,
    START_PHASES,
    EngineStep,
    GrowthPhase,
    MemoryKind,
    RankStats,
    Rejection,
    SlotStats,
    StartPhase,
)

LAYOUT = 2
"""Changes with the structures below; a file of another layout is not read."""
MAGIC = 0x484F4C44
MAX_SLOTS = 8
MAX_CALLERS = 16
RECENT_STEPS = 1024
_NAME_BYTES = 120
_TEXT_BYTES = 2000
_UNKNOWN = -1
_COPIES = 8
_READ_ATTEMPTS = 1000
"""One takes microseconds and is in vain if `_COPIES` writes fall into it; so many never are."""
_Parameters = ParamSpec("_Parameters")


class _Slot(ctypes.Structure):
    _fields_ = (
        ("ubatch", ctypes.c_int64),
        ("lane", ctypes.c_int64),
        ("size_bytes", ctypes.c_int64),
        ("reserved_bytes", ctypes.c_int64),
        ("high_water_bytes", ctypes.c_int64),
        ("high_water_caller", ctypes.c_char * _NAME_BYTES),
    )


class _Caller(ctypes.Structure):
    _fields_ = (("needed_bytes", ctypes.c_int64), ("name", ctypes.c_char * _NAME_BYTES))


class _Step(ctypes.Structure):
    _fields_ = (
        ("index", ctypes.c_int64),
        ("scheduled_tokens", ctypes.c_int64),
        ("requests", ctypes.c_int64),
        ("started_seconds", ctypes.c_double),
        ("duration_seconds", ctypes.c_double),
    )


class _Record(ctypes.Structure):
    _fields_ = (
        ("engine", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("generation", ctypes.c_int64),
        ("pid", ctypes.c_int64),
        ("slot_count", ctypes.c_int64),
        ("slots", _Slot * MAX_SLOTS),
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
        ("rejection_caller", ctypes.c_char * _NAME_BYTES),
        ("rejection_reason", ctypes.c_char * _TEXT_BYTES),
        ("caller_count", ctypes.c_int64),
        ("callers", _Caller * MAX_CALLERS),
        ("memory", ctypes.c_int64 * len(MEMORY_KINDS)),
        ("phases", ctypes.c_double * len(START_PHASES)),
        ("steps", ctypes.c_int64),
        ("scheduled_tokens", ctypes.c_int64),
        ("running_step_started_seconds", ctypes.c_double),
        ("last_step_ended_seconds", ctypes.c_double),
        ("fatal_error", ctypes.c_char * _TEXT_BYTES),
    )


class _Header(ctypes.Structure):
    _fields_ = (
        ("magic", ctypes.c_int64),
        ("layout", ctypes.c_int64),
        ("writes", ctypes.c_int64),
    )


class _Ring(ctypes.Structure):
    # More than are shown: a step that is written while they are read is never among them.
    _fields_ = (("steps", _Step * (RECENT_STEPS + _COPIES)),)


class _File(ctypes.Structure):
    _fields_ = (("header", _Header), ("records", _Record * _COPIES), ("ring", _Ring))


def stats_path(directory: Path, engine: int, rank: int) -> Path:
    """Where the rank keeps its file."""
    return directory / f"engine-{engine}-rank-{rank}.stats"


class StatsSink(Protocol):
    """What a workspace manager tells; `StatsWriter` says what each call means, and keeps it."""

    def slot_count(self, count: int) -> None:
        """Say how many slots there are."""

    def slot(self, index: int, *, ubatch: int, lane: int, size_bytes: int) -> None:
        """Write the identity and the current size of a slot."""

    def reserved(self, index: int, size_bytes: int) -> None:
        """Write what was reserved for a slot."""

    def high_water(self, index: int, needed_bytes: int, caller: str) -> None:
        """Write the largest need of a slot and who had it."""

    def caller(self, name: str, needed_bytes: int) -> None:
        """Keep the largest need of a caller."""

    def growth(self, phase: GrowthPhase) -> None:
        """Count one growth."""

    def rejection(self, rejection: Rejection) -> None:
        """Count a refusal and keep who asked."""

    def holdings(self, *, retired_bytes: int, persistent_bytes: int) -> None:
        """Write what is held beside the current buffers."""

    def lock(self, *, is_sealed: bool, is_locked: bool) -> None:
        """Write how far the manager is closed to change."""


def _whole(
    write: Callable[Concatenate[StatsWriter, _Parameters], None],
) -> Callable[Concatenate[StatsWriter, _Parameters], None]:
    """`write`, whose changes of the record all appear in the file at once."""

    @functools.wraps(write)
    def shown_at_once(
        self: StatsWriter, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> None:
        with self._writing:
            write(self, *args, **kwargs)
            self._show()

    return shown_at_once


class StatsWriter:
    """The one writer of a rank's file. Closing it leaves the file to its readers."""

    def __init__(self, directory: Path, *, engine: int, rank: int, generation: int) -> None:
        self.path = stats_path(directory, engine, rank)
        # A new inode: a reader that still maps the file of an earlier worker keeps its content.
        temporary = self.path.with_suffix(f".{os.getpid()}.new")
        with temporary.open("w+b") as file:
            # Not a file with holes: a disk that fills up later would end the worker with SIGBUS.
            os.posix_fallocate(file.fileno(), 0, ctypes.sizeof(_File))
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_File))
        self._file = _File.from_buffer(self._map)
        self._record = _Record()
        self._writing = threading.Lock()  # ubatches run in threads of their own
        for index in range(len(MEMORY_KINDS)):
            self._record.memory[index] = _UNKNOWN
        self._record.rejection_kind = _UNKNOWN
        self._record.lamport_bytes = _UNKNOWN
        self._record.engine = engine
        self._record.rank = rank
        self._record.generation = generation
        self._record.pid = os.getpid()
        self._show()
        self._file.header.layout = LAYOUT
        self._file.header.magic = MAGIC
        temporary.replace(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; writing after this is an error."""
        del self._file
        self._map.close()

    def _show(self) -> None:
        writes = self._file.header.writes + 1
        self._file.records[writes % _COPIES] = self._record
        self._file.header.writes = writes

    @_whole
    def phase(self, name: StartPhase) -> None:
        """Note that a phase of the start begins now."""
        self._record.phases[START_PHASES.index(name)] = time.monotonic()

    @_whole
    def slot_count(self, count: int) -> None:
        """Say how many slots there are; at most `MAX_SLOTS`."""
        self._record.slot_count = count

    @_whole
    def slot(self, index: int, *, ubatch: int, lane: int, size_bytes: int) -> None:
        """Write the identity and the current size of a slot."""
        slot = self._record.slots[index]
        slot.ubatch = ubatch
        slot.lane = lane
        slot.size_bytes = size_bytes

    @_whole
    def reserved(self, index: int, size_bytes: int) -> None:
        """Write what was reserved for a slot before the KV cache was sized."""
        self._record.slots[index].reserved_bytes = size_bytes

    @_whole
    def high_water(self, index: int, needed_bytes: int, caller: str) -> None:
        """Write the largest need of a slot and who had it; it never falls, whose ever it is."""
        slot = self._record.slots[index]
        if needed_bytes < slot.high_water_bytes:
            return
        slot.high_water_caller = _encoded(caller, _NAME_BYTES)
        slot.high_water_bytes = needed_bytes

    @_whole
    def caller(self, name: str, needed_bytes: int) -> None:
        """Keep the largest need of a caller; beyond `MAX_CALLERS` the smallest makes room."""
        record = self._record
        encoded = _encoded(name, _NAME_BYTES)
        known = record.callers[: record.caller_count]
        for entry in known:
            if entry.name == encoded:
                entry.needed_bytes = max(entry.needed_bytes, needed_bytes)
                return
        if record.caller_count < MAX_CALLERS:
            entry = record.callers[record.caller_count]
            entry.name, entry.needed_bytes = encoded, needed_bytes
            record.caller_count += 1
            return
        smallest = min(known, key=lambda entry: entry.needed_bytes)
        if smallest.needed_bytes < needed_bytes:
            smallest.name, smallest.needed_bytes = encoded, needed_bytes

    @_whole
    def growth(self, phase: GrowthPhase) -> None:
        """Count one growth."""
        self._record.growths[GROWTH_PHASES.index(phase)] += 1

    @_whole
    def rejection(self, rejection: Rejection) -> None:
        """Count a refusal and keep who asked, before it is raised."""
        record = self._record
        record.rejection_caller = _encoded(rejection.caller, _NAME_BYTES)
        record.rejection_reason = _encoded(rejection.reason, _TEXT_BYTES)
        record.rejection_needed_bytes = rejection.needed_bytes
        record.rejection_held_bytes = rejection.held_bytes
        record.rejection_kind = REJECTION_KINDS.index(rejection.kind)
        record.rejections[REJECTION_KINDS.index(rejection.kind)] += 1

    @_whole
    def holdings(self, *, retired_bytes: int, persistent_bytes: int) -> None:
        """Write what is held beside the current buffers."""
        self._record.retired_bytes = retired_bytes
        self._record.persistent_bytes = persistent_bytes

    @_whole
    def lamport(self, size_bytes: int) -> None:
        """Write the size of the Lamport all-reduce workspace."""
        self._record.lamport_bytes = size_bytes

    @_whole
    def lock(self, *, is_sealed: bool, is_locked: bool) -> None:
        """Write how far the manager is closed to change."""
        self._record.is_sealed = is_sealed
        self._record.is_locked = is_locked

    @_whole
    def unified_memory(self, *, is_unified: bool) -> None:
        """Write whether the device shares its memory with the host."""
        self._record.is_unified_memory = is_unified

    @_whole
    def memory(self, kind: MemoryKind, size_bytes: int) -> None:
        """Write one measured line of the memory ledger."""
        self._record.memory[MEMORY_KINDS.index(kind)] = size_bytes

    @_whole
    def step_started(self) -> None:
        """Note that a step runs."""
        self._record.running_step_started_seconds = time.monotonic()

    @_whole
    def step_ended(self, *, scheduled_tokens: int, requests: int) -> None:
        """Note that the running step is over, and what it was."""
        record = self._record
        started, now = record.running_step_started_seconds, time.monotonic()
        index = record.steps + 1
        step = self._file.ring.steps[index % (RECENT_STEPS + _COPIES)]
        step.scheduled_tokens = scheduled_tokens
        step.requests = requests
        step.started_seconds = started
        step.duration_seconds = now - started
        step.index = index
        record.scheduled_tokens += scheduled_tokens
        record.steps = index
        record.last_step_ended_seconds = now
        record.running_step_started_seconds = 0.0

    @_whole
    def fatal_error(self, cause: str) -> None:
        """Keep why the rank is lost; the first cause stands."""
        if not self._record.fatal_error:
            self._record.fatal_error = _encoded(cause, _TEXT_BYTES)


def _encoded(text: str, size_bytes: int) -> bytes:
    return text.encode("utf-8", "replace")[: size_bytes - 1]


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


def _shown(descriptor: int, *, with_steps: bool) -> tuple[_Record, tuple[EngineStep, ...]] | None:
    """The record and the steps as they were at one moment."""
    if os.fstat(descriptor).st_size < ctypes.sizeof(_File):
        return None
    for _ in range(_READ_ATTEMPTS):
        header = _Header.from_buffer_copy(_part(descriptor, 0, _Header))
        if header.magic != MAGIC or header.layout != LAYOUT:
            return None
        place = _File.records.offset + header.writes % _COPIES * ctypes.sizeof(_Record)
        content = _part(descriptor, place, _Record)
        steps = _part(descriptor, _File.ring.offset, _Ring) if with_steps else b""
        now = _Header.from_buffer_copy(_part(descriptor, 0, _Header))
        # Only the write after these would fill the copy that was read.
        if now.writes - header.writes < _COPIES - 1:
            record = _Record.from_buffer_copy(content)
            return record, _recent_steps(steps, record.steps) if steps else ()
    return None


def _part(descriptor: int, offset: int, kind: type[ctypes.Structure]) -> bytes:
    return os.pread(descriptor, ctypes.sizeof(kind), offset)


def read_all(directory: Path, *, with_steps: bool = True) -> tuple[RankStats, ...]:
    """The records of every rank that has written one, ordered by engine and rank."""
    found = (read_stats(path, with_steps=with_steps) for path in directory.glob("*.stats"))
    return tuple(sorted((s for s in found if s), key=lambda s: (s.engine, s.rank)))


def _rank_stats(record: _Record, recent_steps: tuple[EngineStep, ...]) -> RankStats:
    return RankStats(
        engine=record.engine,
        rank=record.rank,
        generation=record.generation,
        pid=record.pid,
        slots=tuple(_slot_stats(slot) for slot in record.slots[: record.slot_count]),
        retired_bytes=record.retired_bytes,
        persistent_bytes=record.persistent_bytes,
        lamport_bytes=None if record.lamport_bytes == _UNKNOWN else record.lamport_bytes,
        is_locked=bool(record.is_locked),
        is_sealed=bool(record.is_sealed),
        growths=dict(zip(GROWTH_PHASES, record.growths, strict=True)),
        rejections=dict(zip(REJECTION_KINDS, record.rejections, strict=True)),
        last_rejection=_last_rejection(record),
        callers={_decoded(c.name): c.needed_bytes for c in record.callers[: record.caller_count]},
        memory={k: v for k, v in zip(MEMORY_KINDS, record.memory, strict=True) if v != _UNKNOWN},
        phases={k: v for k, v in zip(START_PHASES, record.phases, strict=True) if v},
        steps=record.steps,
        scheduled_tokens=record.scheduled_tokens,
        running_step_started_seconds=record.running_step_started_seconds or None,
        last_step_ended_seconds=record.last_step_ended_seconds or None,
        recent_steps=recent_steps,
        fatal_error=_decoded(record.fatal_error),
        is_unified_memory=bool(record.is_unified_memory),
    )


def _slot_stats(slot: _Slot) -> SlotStats:
    return SlotStats(
        ubatch=slot.ubatch,
        lane=slot.lane,
        size_bytes=slot.size_bytes,
        reserved_bytes=slot.reserved_bytes,
        high_water_bytes=slot.high_water_bytes,
        high_water_caller=_decoded(slot.high_water_caller),
    )


def _last_rejection(record: _Record) -> Rejection | None:
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
    steps = (
        EngineStep(s.index, s.scheduled_tokens, s.requests, s.started_seconds, s.duration_seconds)
        for s in _Ring.from_buffer_copy(content).steps
        if max(0, newest - RECENT_STEPS) < s.index <= newest
    )
    return tuple(sorted(steps, key=lambda step: step.index))


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")
