"""Writes the file of a rank: its worker alone does, and readers have it even after its death."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from holdfast.records import RankReport
from holdfast.workspace.stats.layout import (
    FILE_BYTES,
    HEADER,
    LAYOUT,
    MAGIC,
    REPORT_BYTES,
    TEXT_BYTES,
    ReportPlace,
    StepCounts,
    cut_text,
    encoded_report,
    packed_pulse,
    packed_step,
    pulse_offset,
    report_offset,
    stats_path,
    step_offset,
)
from holdfast.workspace.stats.mapped_files import new_mapping


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
        """Make the file; `shared` says where in memory, see `mapped_files`.

        Raises:
            OSError: there is not enough room for it.
        """
        self.path = stats_path(directory, engine, rank)
        self._writing = threading.Lock()  # ubatches run in threads of their own
        self._writes = 0
        # Each is replaced as a whole: a signal may raise between any two lines.
        self._place = ReportPlace()
        self._counts = StepCounts()
        with new_mapping(self.path, FILE_BYTES, shared) as self._map:
            self._map[: HEADER.size] = HEADER.pack(MAGIC, LAYOUT)
            self._write_report(
                RankReport(engine=engine, rank=rank, generation=generation, pid=os.getpid())
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; writing after this is an error."""
        self._map.close()

    def update(self, change: Callable[[RankReport], RankReport]) -> None:
        """Replace the report by what `change` makes of it; readers see all of it at once.

        `change` makes no other call of this writer. A text of any length must pass `cut_text`.

        Raises:
            ValueError: there is no room for the report; the old one stays.
        """
        with self._writing:
            changed = change(self._report)
            if changed != self._report:
                self._write_report(changed)

    def fatal_error(self, cause: str) -> None:
        """Keep why the rank is lost; the first cause stands."""
        self.update(
            lambda report: (
                report
                if report.fatal_error
                else replace(report, fatal_error=cut_text(cause, TEXT_BYTES))
            )
        )

    def step_started(self) -> None:
        """Note that a step was launched; while another runs, it waits for that."""
        if self._counts.running_step_started_seconds:
            return
        with self._writing:
            steps, scheduled_tokens, _, ended = self._counts
            self._counts = StepCounts(steps, scheduled_tokens, time.monotonic(), ended)
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
            steps, tokens, started, _ = self._counts
            ended = max(started, time.monotonic() if ended_seconds is None else ended_seconds)
            index = steps + 1
            step = packed_step(index, scheduled_tokens, requests, started, ended - started)
            self._put(step_offset(index), step)
            running = ended if is_next_running else 0.0
            self._counts = StepCounts(index, tokens + scheduled_tokens, running, ended)
            self._show()

    def _write_report(self, report: RankReport) -> None:
        content = encoded_report(report)
        if len(content) > REPORT_BYTES:
            raise ValueError(f"the report of a rank takes {len(content)} of {REPORT_BYTES} bytes")
        number = self._place.number + 1
        self._put(report_offset(number), content)
        self._report = report
        self._place = ReportPlace(number, len(content), zlib.crc32(content))
        self._show()

    def _show(self) -> None:
        write = self._writes + 1
        self._put(pulse_offset(write), packed_pulse(write, self._place, self._counts))
        self._writes = write

    def _put(self, offset: int, content: bytes) -> None:
        self._map[offset : offset + len(content)] = content
