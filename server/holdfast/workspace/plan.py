"""How large is each workspace, and why? Arithmetic on bytes, which knows neither vLLM nor torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

MIB = 1024 * 1024
RESERVE_GRANULE_BYTES = 2 * MIB
"""Segments of the CUDA caching allocator are multiples of 2 MiB, so the rest would be wasted."""
GROWTH_LIMIT_ABOVE_LARGEST_SLOT_BYTES = 256 * MIB

GrowthPolicy = Literal["deny", "alongside"]
Slot = tuple[int, int]
"""(ubatch, lane)."""
TARGET_LANE = 0
"""The lane of the model itself. Drafts of DSpark have a lane of their own, others use this."""


@dataclass(frozen=True, slots=True)
class WorkspaceSpec:
    """What the front end passes to the workers of one engine generation, as a JSON file.

    The environment variable `SPEC_VARIABLE` holds its path. Without it the plugin does nothing, so
    that `vllm serve` on the same machine stays as it is.
    """

    stats_directory: str
    generation: int
    floor_bytes: int
    headroom: float
    growth: GrowthPolicy
    growth_limit_bytes: int | None
    learned: tuple[tuple[int, int, int], ...] = ()
    """(ubatch, lane, bytes) of an earlier run with the same fingerprint."""
    grammar_seconds: float = 60.0
    """How long an EngineCore may compile one grammar."""
    kept_host_bytes: int = 0
    """What a rank on unified memory must leave to its host, or the memory guard acts; 0 if it is
    off. Each node sets its own."""

    def write(self, path: Path) -> None:
        """Write the spec to `path`, readable only by this user."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        record = json.loads(path.read_text())
        record["learned"] = tuple((u, lane, size) for u, lane, size in record["learned"])
        return cls(**record)

    def learned_bytes(self, slot: Slot) -> int:
        """Return what an earlier run needed in `slot`; 0 if nothing is known."""
        return next((size for u, lane, size in self.learned if (u, lane) == slot), 0)


SPEC_VARIABLE = "HOLDFAST_WORKSPACE_SPEC"


@dataclass(frozen=True, slots=True)
class Term:
    """One reason for a reservation: what needs how much."""

    source: Literal["floor", "learned", "declared"]
    asked_by: str
    needed_bytes: int
    lanes: tuple[int, ...] = (TARGET_LANE,)
    """Where a declared need arises. A floor applies to every slot, a learned need to its own."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The size of one slot, and every term that was considered."""

    slot: Slot
    terms: tuple[Term, ...]
    size_bytes: int


def round_up(size_bytes: int, granule_bytes: int) -> int:
    """Return the smallest multiple of `granule_bytes` that is at least `size_bytes`."""
    return -(-size_bytes // granule_bytes) * granule_bytes


def reserve(slot: Slot, terms: Iterable[Term], headroom: float) -> Reservation:
    """Return max(terms) x (1 + headroom), rounded up to 2 MiB; 0 bytes without a term.

    Floor, learned and declared terms are bounds of the same need, so the largest counts, not their
    sum.
    """
    weighed = tuple(terms)
    needed = max((term.needed_bytes for term in weighed), default=0)
    return Reservation(slot, weighed, round_up(int(needed * (1 + headroom)), RESERVE_GRANULE_BYTES))


def growth_limit_bytes(given_bytes: int | None, slot_sizes: Mapping[Slot, int]) -> int:
    """Return how much a rank may add after the lock: as given, or what its ubatches may need.

    That is the largest slot + 256 MiB for each ubatch: they run the same layers, so they outgrow
    their slots in the same step, and a refusal to one of them ends the rank.
    """
    if given_bytes is not None:
        return given_bytes
    ubatches = len({ubatch for ubatch, _ in slot_sizes})
    return ubatches * (max(slot_sizes.values()) + GROWTH_LIMIT_ABOVE_LARGEST_SLOT_BYTES)


def plan_reservations(
    spec: WorkspaceSpec, slots: Iterable[Slot], declared: Iterable[Term]
) -> tuple[Reservation, ...]:
    """Return the reservation of each slot: what the user, an earlier run or the reservers need.

    A declared term applies to every ubatch of its lanes. The caller makes all ranks reserve the
    same.
    """
    terms = tuple(declared)
    return tuple(
        reserve(slot, (*_floor(spec), *_learned(spec, slot), *terms_of(slot, terms)), spec.headroom)
        for slot in slots
    )


def terms_of(slot: Slot, declared: Iterable[Term]) -> tuple[Term, ...]:
    """Return the terms that arise in the lane of `slot`."""
    _, lane = slot
    return tuple(term for term in declared if lane in term.lanes)


def _floor(spec: WorkspaceSpec) -> tuple[Term, ...]:
    return (Term("floor", "--workspace-reserve", spec.floor_bytes),) if spec.floor_bytes else ()


def _learned(spec: WorkspaceSpec, slot: Slot) -> tuple[Term, ...]:
    needed_bytes = spec.learned_bytes(slot)
    return (Term("learned", "an earlier run", needed_bytes),) if needed_bytes else ()
