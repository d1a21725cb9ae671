"""How large is each workspace, and why? Pure arithmetic on bytes; knows neither vLLM nor torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

MIB = 1024 * 1024
RESERVE_GRANULE_BYTES = 2 * MIB
"""Segments of the CUDA caching allocator are multiples of 2 MiB, so less would be wasted anyway."""
GROWTH_LIMIT_ABOVE_LARGEST_SLOT_BYTES = 256 * MIB

GrowthPolicy = Literal["deny", "alongside"]
Slot = tuple[int, int]
"""(ubatch, lane)."""
TARGET_LANE = 0
"""Where the model itself asks. Drafts of DSpark ask in a lane of their own, other drafts here."""


@dataclass(frozen=True, slots=True)
class WorkspaceSpec:
    """What the front end tells the workers of one engine generation, as a JSON file.

    The path of the file travels in the environment variable `SPEC_VARIABLE`; without it the plugin
    does nothing, so that a plain `vllm serve` beside Holdfast stays plain.
    """

    stats_directory: str
    generation: int
    floor_bytes: int
    headroom: float
    growth: GrowthPolicy
    growth_limit_bytes: int | None
    learned: tuple[tuple[int, int, int], ...] = ()
    """(ubatch, lane, bytes) of an earlier run under the same fingerprint."""

    def write(self, path: Path) -> None:
        """Write the spec to `path`, readable by this user alone."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        record = json.loads(path.read_text())
        record["learned"] = tuple((u, lane, size) for u, lane, size in record["learned"])
        return cls(**record)

    def learned_bytes(self, slot: Slot) -> int:
        """What an earlier run needed in `slot`; 0 if nothing is known."""
        return next((size for u, lane, size in self.learned if (u, lane) == slot), 0)


SPEC_VARIABLE = "HOLDFAST_WORKSPACE_SPEC"


@dataclass(frozen=True, slots=True)
class Term:
    """One reason for a reservation: who asked for how much."""

    source: Literal["floor", "learned", "declared"]
    asked_by: str
    needed_bytes: int
    lanes: tuple[int, ...] = (TARGET_LANE,)
    """Where a declared need arises. A floor holds in each slot, and what was learned in its own."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The size of one slot and every term that was weighed."""

    slot: Slot
    terms: tuple[Term, ...]
    size_bytes: int


def round_up(size_bytes: int, granule_bytes: int) -> int:
    """The smallest multiple of `granule_bytes` that is not below `size_bytes`."""
    return -(-size_bytes // granule_bytes) * granule_bytes


def reserve(slot: Slot, terms: Iterable[Term], headroom: float) -> Reservation:
    """Size = max(terms) x (1 + headroom), rounded up to 2 MiB; nothing asked, nothing reserved.

    Floor, learned and declared are bounds of the same need, so the largest holds, not their sum.
    """
    weighed = tuple(terms)
    needed = max((term.needed_bytes for term in weighed), default=0)
    return Reservation(slot, weighed, round_up(int(needed * (1 + headroom)), RESERVE_GRANULE_BYTES))


def growth_limit_bytes(given_bytes: int | None, slot_sizes: Mapping[Slot, int]) -> int:
    """The most a rank may hold above its size at the lock: the given, or largest slot + 256 MiB."""
    if given_bytes is not None:
        return given_bytes
    return max(slot_sizes.values(), default=0) + GROWTH_LIMIT_ABOVE_LARGEST_SLOT_BYTES


def plan_reservations(
    spec: WorkspaceSpec, slots: Iterable[Slot], declared: Iterable[Term]
) -> tuple[Reservation, ...]:
    """The reservation of each slot: what the user, an earlier run and the reservers ask for.

    A declared term holds for every ubatch of its lanes. That all ranks reserve the same is up to
    the caller.
    """
    terms = tuple(declared)
    return tuple(
        reserve(slot, (*_floor(spec), *_learned(spec, slot), *terms_of(slot, terms)), spec.headroom)
        for slot in slots
    )


def terms_of(slot: Slot, declared: Iterable[Term]) -> tuple[Term, ...]:
    """Those that arise in the lane of `slot`."""
    _, lane = slot
    return tuple(term for term in declared if lane in term.lanes)


def _floor(spec: WorkspaceSpec) -> tuple[Term, ...]:
    return (Term("floor", "--workspace-reserve", spec.floor_bytes),) if spec.floor_bytes else ()


def _learned(spec: WorkspaceSpec, slot: Slot) -> tuple[Term, ...]:
    needed_bytes = spec.learned_bytes(slot)
    return (Term("learned", "an earlier run", needed_bytes),) if needed_bytes else ()
