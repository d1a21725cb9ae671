"""Writes the file of a rank: its worker alone does, and readers have it also after its death."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, Self

from holdfast.records import (
    GROWTH_PHASES,
    MEMORY_KINDS,
    REJECTION_KINDS,
    START_PHASES,
    GrowthPhase,
    MemoryKind,
    Rejection,
    StartPhase,
)
from holdfast.workspace.stats.layout import (
    COPIES,
    LAYOUT,
    MAGIC,
    MAX_CALLERS,
    NAME_BYTES,
    REST_BYTES,
    RING_STEPS,
    STEP_FIELDS,
    TEXT_BYTES,
    UNKNOWN,
    Record,
    StatsFile,
    copy_checksum,
    rest_checksum,
    stats_path,
    step_checksum,
)
from holdfast.workspace.stats.mapped_files import new_mapping

_Parameters = ParamSpec("_Parameters")


def _whole(
    write: Callable[Concatenate[StatsWriter, _Parameters], None],
) -> Callable[Concatenate[StatsWriter, _Parameters], None]:
    """`write`, whose changes of the record all appear in the file at once.

    Not for steps, which change the counts of steps alone: each step would pay for a checksum of
    all the rest.
    """

    @functools.wraps(write)
    def shown_at_once(
        self: StatsWriter, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> None:
        with self._writing:
            write(self, *args, **kwargs)
            self._rest_checksum = rest_checksum(self._rest)
            self._show()

    return shown_at_once


class StatsWriter:
    """The one writer of a rank's file. Closing it leaves the file to its readers."""

    def __init__(
        self,
        directory: Path,
        *,
        engine: int,
        rank: int,
        generation: int,
        shared: Path | None = None,
    ) -> None:
        """Make the file; `shared` says where in memory, see `mapped`.

        Raises:
            OSError: there is no room for it.
        """
        self.path = stats_path(directory, engine, rank)
        with new_mapping(self.path, ctypes.sizeof(StatsFile), shared) as self._map:
            self._fill(engine=engine, rank=rank, generation=generation)

    def _fill(self, *, engine: int, rank: int, generation: int) -> None:
        self._file = StatsFile.from_buffer(self._map)
        self._record = Record()
        self._rest = (ctypes.c_char * REST_BYTES).from_buffer(self._record)
        counts_bytes = ctypes.sizeof(Record) - REST_BYTES
        self._step_counts = (ctypes.c_char * counts_bytes).from_buffer(self._record, REST_BYTES)
        self._writing = threading.Lock()  # ubatches run in threads of their own
        for index in range(len(MEMORY_KINDS)):
            self._record.memory[index] = UNKNOWN
        self._record.rejection_kind = UNKNOWN
        self._record.lamport_bytes = UNKNOWN
        self._record.engine = engine
        self._record.rank = rank
        self._record.generation = generation
        self._record.pid = os.getpid()
        self._rest_checksum = rest_checksum(self._rest)
        self._show()
        self._file.header.layout = LAYOUT
        self._file.header.magic = MAGIC

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; writing after this is an error."""
        del self._file
        self._map.close()

    def _show(self) -> None:
        write = self._file.header.writes + 1
        copy = self._file.copies[write % COPIES]
        copy.record = self._record
        copy.write = write
        copy.checksum = copy_checksum(self._rest_checksum, self._step_counts, write)
        self._file.header.writes = write

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
        slot.high_water_caller = _encoded(caller, NAME_BYTES)
        slot.high_water_bytes = needed_bytes

    @_whole
    def caller(self, name: str, needed_bytes: int) -> None:
        """Keep the largest need of a caller; beyond `MAX_CALLERS` the smallest makes room."""
        record = self._record
        encoded = _encoded(name, NAME_BYTES)
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
        record.rejection_caller = _encoded(rejection.caller, NAME_BYTES)
        record.rejection_reason = _encoded(rejection.reason, TEXT_BYTES)
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

    def step_started(self) -> None:
        """Note that a step was launched; while another runs, it waits for that."""
        if self._record.running_step_started_seconds:
            return
        with self._writing:
            self._record.running_step_started_seconds = time.monotonic()
            self._show()

    def step_ended(
        self,
        *,
        scheduled_tokens: int,
        requests: int,
        ended_seconds: float | None = None,
        is_next_running: bool = False,
    ) -> None:
        """Note that the running step is over, and what it was.

        `ended_seconds` is when, unless it is now; `is_next_running` whether another was launched.
        """
        with self._writing:
            record = self._record
            started = record.running_step_started_seconds
            ended = max(started, time.monotonic() if ended_seconds is None else ended_seconds)
            index = record.steps + 1
            step = self._file.ring.steps[index % RING_STEPS]
            fields = STEP_FIELDS.pack(index, scheduled_tokens, requests, started, ended - started)
            ctypes.memmove(ctypes.addressof(step), fields, len(fields))
            step.checksum = step_checksum(fields)
            record.scheduled_tokens += scheduled_tokens
            record.steps = index
            record.last_step_ended_seconds = ended
            record.running_step_started_seconds = ended if is_next_running else 0.0
            self._show()

    @_whole
    def fatal_error(self, cause: str) -> None:
        """Keep why the rank is lost; the first cause stands."""
        if not self._record.fatal_error:
            self._record.fatal_error = _encoded(cause, TEXT_BYTES)


def _encoded(text: str, size_bytes: int) -> bytes:
    return text.encode("utf-8", "replace")[: size_bytes - 1]
