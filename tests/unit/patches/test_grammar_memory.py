"""When grammars take too much memory together, the largest end, and usual ones never notice."""

from __future__ import annotations

import gc

import pytest

from holdfast.patches.grammar_memory import NO_ROOM, GrammarMemory, most_grammar_bytes

MIB = 1 << 20


class Held:
    """A grammar of some size."""

    def __init__(self, name: str, compiled_mib: int, grown_mib: int = 0) -> None:
        self.compiled_as = name
        self.compiled_bytes = compiled_mib * MIB
        self.grown_bytes = grown_mib * MIB
        self.reason = ""

    def drop(self, reason: str) -> None:
        self.reason = reason


def dropped(*grammars: Held) -> list[str]:
    """Those that are given up of these, when they come in this order."""
    memory = GrammarMemory(100 * MIB)
    for one in grammars:
        memory.hold(one)
    assert {one.reason for one in grammars} <= {"", NO_ROOM}
    return [one.compiled_as for one in grammars if one.reason]


def test_what_fits_stays() -> None:
    """Up to the last byte."""
    assert dropped(Held("a", 50), Held("b", 50)) == []


@pytest.mark.parametrize(
    "large", [Held("large", 60), Held("large", 1, 59)], ids=["compiled", "grown"]
)
def test_the_largest_goes_first(large: Held) -> None:
    """Whichever came last, and whether it was compiled so or has grown."""
    usual = [Held(f"usual {number}", 1) for number in range(50)]
    assert dropped(*usual[:25], large, *usual[25:]) == ["large"]


def test_what_several_share_counts_once() -> None:
    """An application sends the same schema with each request."""
    assert dropped(*(Held("shared", 40) for _ in range(100)), Held("b", 60)) == []


def test_what_several_share_goes_with_the_last() -> None:
    """Dropping one of them frees nothing."""
    assert dropped(*(Held("shared", 60) for _ in range(3)), Held("b", 50)) == ["shared"] * 3


def test_what_has_ended_takes_no_room() -> None:
    """It is counted while something holds it."""
    memory = GrammarMemory(100 * MIB)
    memory.hold(Held("ended", 80))
    gc.collect()
    last = Held("last", 80)
    memory.hold(last)
    assert not last.reason


def test_what_grows_makes_room() -> None:
    """Between two steps, a little at a time."""
    memory = GrammarMemory(100 * MIB)
    growing, usual = Held("growing", 1), Held("usual", 1)
    memory.hold(growing)
    memory.hold(usual)
    for grown_mib in range(200):
        growing.grown_bytes = grown_mib * MIB
        memory.grew(MIB)
    assert (growing.reason, usual.reason) == (NO_ROOM, "")


def test_a_larger_vocabulary_may_take_more() -> None:
    """Each mask has a bit for each token."""
    assert most_grammar_bytes(32_000) == 64 * MIB + 32_000 * 5 * 1024
    assert most_grammar_bytes(200_000) == pytest.approx(1 << 30, rel=0.1)
