"""How large does a workspace become? The arithmetic of reservations."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from holdfast.workspace.growth import DENIED, GrowthRule
from holdfast.workspace.plan import (
    MIB,
    RESERVE_GRANULE_BYTES,
    Term,
    WorkspaceSpec,
    growth_limit_bytes,
    plan_reservations,
    reserve,
    round_up,
)

NEEDS = st.integers(min_value=0, max_value=1 << 40)
HEADROOMS = st.floats(min_value=0, max_value=1)


def spec(
    *, floor_bytes: int = 0, headroom: float = 0.0, learned: tuple[tuple[int, int, int], ...] = ()
) -> WorkspaceSpec:
    return WorkspaceSpec(
        stats_directory="stats",
        generation=1,
        floor_bytes=floor_bytes,
        headroom=headroom,
        growth="alongside",
        growth_limit_bytes=None,
        learned=learned,
    )


def declared(needed_bytes: int) -> Term:
    return Term("declared", "test", needed_bytes)


@given(size_bytes=NEEDS, granule_bytes=st.integers(1, 1 << 30))
def test_rounding_up_finds_the_next_multiple(size_bytes: int, granule_bytes: int) -> None:
    """The result is a multiple, not below the size, and less than a granule above it."""
    rounded = round_up(size_bytes, granule_bytes)
    assert rounded % granule_bytes == 0
    assert size_bytes <= rounded < size_bytes + granule_bytes


@given(needs=st.lists(NEEDS, max_size=5), headroom=HEADROOMS)
def test_a_reservation_covers_every_term(needs: list[int], headroom: float) -> None:
    """It is a multiple of 2 MiB that holds the largest need, whatever the headroom."""
    size_bytes = reserve((0, 0), map(declared, needs), headroom).size_bytes
    assert size_bytes >= max(needs, default=0)
    assert size_bytes % RESERVE_GRANULE_BYTES == 0


@given(need=NEEDS, more=NEEDS, headroom=HEADROOMS)
def test_a_reservation_is_monotone(need: int, more: int, headroom: float) -> None:
    """A larger need or a further term never reserves less."""
    small = reserve((0, 0), [declared(need)], headroom).size_bytes
    assert reserve((0, 0), [declared(need + more)], headroom).size_bytes >= small
    assert reserve((0, 0), [declared(need), declared(more)], headroom).size_bytes >= small


@given(need=NEEDS)
def test_a_reservation_is_no_blanket(need: int) -> None:
    """With the default headroom it stays within 1.1 x need + 2 MiB."""
    size_bytes = reserve((0, 0), [declared(need)], 0.10).size_bytes
    assert size_bytes <= Fraction(11, 10) * need + 2 * MIB


def test_nothing_asked_is_nothing_reserved() -> None:
    """Without a term, or with empty ones, a slot gets no memory."""
    assert reserve((0, 0), [], 0.10).size_bytes == 0
    assert reserve((0, 0), [declared(0)], 0.10).size_bytes == 0


def test_a_plan_weighs_floor_learned_and_declared_for_each_slot() -> None:
    """Each slot gets the largest of its terms, and names all of them."""
    given_spec = spec(floor_bytes=3 * MIB, learned=((0, 1, 9 * MIB),))
    both = Term("declared", "test", 5 * MIB, lanes=(0, 1))
    first, second = plan_reservations(given_spec, [(0, 0), (0, 1)], iter([both]))
    assert (first.slot, first.size_bytes) == ((0, 0), 6 * MIB)
    assert [term.source for term in first.terms] == ["floor", "declared"]
    assert (second.slot, second.size_bytes) == ((0, 1), 10 * MIB)
    assert [term.source for term in second.terms] == ["floor", "learned", "declared"]


def test_a_declared_term_holds_for_every_ubatch_of_its_lanes() -> None:
    """It applies only to the lane of the model, unless it names others."""
    slots = [(0, 0), (0, 1), (1, 0), (1, 1)]
    of_the_draft = Term("declared", "draft", 2 * MIB, lanes=(1,))
    planned = plan_reservations(spec(), slots, [declared(4 * MIB), of_the_draft])
    assert [one.size_bytes for one in planned] == [4 * MIB, 2 * MIB, 4 * MIB, 2 * MIB]


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    """Workers read what the front end wrote, and other users cannot."""
    path = tmp_path / "spec.json"
    written = spec(floor_bytes=7, headroom=0.25, learned=((1, 0, 42), (0, 0, 1)))
    written.write(path)
    assert WorkspaceSpec.read(path) == written
    assert path.stat().st_mode & 0o077 == 0
    assert WorkspaceSpec.read(path).learned_bytes((1, 0)) == 42
    assert WorkspaceSpec.read(path).learned_bytes((1, 1)) == 0


def test_the_growth_limit_is_given_or_the_largest_slot_and_256_mib_per_ubatch() -> None:
    """A limit of zero is a limit."""
    assert growth_limit_bytes(0, {(0, 0): MIB}) == 0
    assert growth_limit_bytes(None, {(0, 0): MIB, (0, 1): 3 * MIB}) == 259 * MIB
    assert growth_limit_bytes(None, {(0, 0): MIB, (1, 0): MIB}) == 514 * MIB


def test_deny_is_the_first_reason() -> None:
    """Under `deny` neither a capture nor the limit matters."""
    assert (
        GrowthRule().reason_against(0, is_locked=True, is_sealed=True, is_capturing=True) == DENIED
    )


@given(
    limit_bytes=NEEDS, locked_bytes=NEEDS, grown_bytes=NEEDS, required_bytes=st.integers(1, 1 << 40)
)
def test_a_growth_that_is_granted_stays_within_the_limit(
    limit_bytes: int, locked_bytes: int, grown_bytes: int, required_bytes: int
) -> None:
    """Once sealed, what is granted and then rounded up never exceeds the limit."""
    rule = GrowthRule("alongside", limit_bytes, locked_bytes)
    held_bytes = locked_bytes + grown_bytes
    reason = rule.reason_against(
        held_bytes + required_bytes, is_locked=True, is_sealed=True, is_capturing=False
    )
    assert bool(reason) == (grown_bytes + required_bytes > limit_bytes)
    size_bytes = rule.size_bytes(required_bytes, held_bytes, is_limited=True)
    assert size_bytes >= required_bytes
    assert reason or grown_bytes + size_bytes <= limit_bytes
