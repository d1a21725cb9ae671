"""A plan, and its layouts: JSON, a table for a terminal, aligned text for anything else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter

from rich.console import Console
from rich.table import Table

from holdfast.workspace.plan import MIB
from holdfast.workspace.reservers import Undetermined

FIRST_START = "measured at first start"
_HEADINGS = ("rank", "ubatch", "lane", "term", "asked by", "size", "KV-cache tokens")


@dataclass(frozen=True, slots=True)
class TermCost:
    """One term of a reservation, and what it costs."""

    source: str
    asked_by: str
    needed_bytes: int
    kv_tokens: int | None


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The reservation of one slot, and every term that was considered."""

    ubatch: int
    lane: int
    size_bytes: int
    kv_tokens: int | None
    terms: tuple[TermCost, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The plan of one rank of an engine."""

    rank: int
    layers: int
    kv_bytes_per_token: int | None
    slots: tuple[SlotPlan, ...]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The result of `holdfast plan`; None for what it does not know."""

    model: str
    architectures: tuple[str, ...]
    device: str | None
    max_model_len: int
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    headroom: float
    data_parallel_size: int
    kv_cache: str
    ranks: tuple[RankPlan, ...]
    measured_at_first_start: tuple[Undetermined, ...]
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def lines(self) -> Iterator[str]:
        """Yield the report as lines of aligned text."""
        yield from self._head()
        rows = [_HEADINGS, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        for row in rows:
            yield "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            ).rstrip()
        yield from self._tail()

    def print_table(self, console: Console) -> None:
        """Print the report with a table, for a terminal."""
        table = Table(*_HEADINGS)
        for row in self._rows():
            table.add_row(*row)
        for line in self._head():
            console.print(line, markup=False, highlight=False)
        console.print(table)
        for line in self._tail():
            console.print(line, markup=False, highlight=False)

    def _head(self) -> Iterator[str]:
        yield f"model: {self.model} ({', '.join(self.architectures) or 'no architecture named'})"
        yield f"device: {self.device or 'unknown, name it with --device'}"
        tokens, sequences = _known(self.max_num_batched_tokens), _known(self.max_num_seqs)
        yield f"max_model_len: {self.max_model_len}"
        yield f"max_num_batched_tokens: {tokens}, max_num_seqs: {sequences}"
        yield f"KV cache: {self.kv_cache}"
        if self.data_parallel_size > 1:
            yield f"Each of {self.data_parallel_size} data-parallel engines reserves the same."

    def _rows(self) -> Iterator[tuple[str, ...]]:
        known = "largest known" if self.measured_at_first_start else "largest"
        for ranks, slots in self._equal_ranks():
            for slot in slots:
                place = (ranks, str(slot.ubatch), str(slot.lane))
                for term in slot.terms:
                    size = _size(term.needed_bytes)
                    yield (*place, term.source, term.asked_by, size, _known(term.kv_tokens))
                for unmeasured in self.measured_at_first_start:
                    yield (*place, "declared", unmeasured.asked_by, FIRST_START, "")
                size = _size(slot.size_bytes)
                basis = f"{known} + {self.headroom:.0%}"
                yield (*place, "reserved", basis, size, _known(slot.kv_tokens))

    def _equal_ranks(self) -> Iterator[tuple[str, tuple[SlotPlan, ...]]]:
        for slots, ranks in groupby(self.ranks, key=attrgetter("slots")):
            yield _range(rank.rank for rank in ranks), slots

    def _tail(self) -> Iterator[str]:
        for unmeasured in self.measured_at_first_start:
            yield f"{FIRST_START}: {unmeasured.asked_by}: {unmeasured.reason}."
        yield from self.notes


def _range(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f} MiB"


def _known(number: int | None) -> str:
    return "unknown" if number is None else str(number)
