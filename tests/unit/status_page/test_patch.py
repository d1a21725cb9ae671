"""A change says what differs, and nothing else."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.status_page.patch import difference, merged

NAMES = st.sampled_from("abcd")
LEAVES = st.one_of(st.booleans(), st.integers(0, 3), st.text(max_size=2))
VALUES = st.recursive(
    st.one_of(LEAVES, st.lists(LEAVES, max_size=2)),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


@given(DOCUMENTS, DOCUMENTS)
def test_a_patch_makes_the_new_document_of_the_old(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    """Whatever was added, changed or removed, at any depth."""
    before = repr((old, new))
    assert merged(old, difference(old, new)) == new
    assert repr((old, new)) == before


@given(DOCUMENTS)
def test_equal_documents_have_no_difference(document: dict[str, Any]) -> None:
    """Whether or not they are the same object."""
    assert difference(document, dict(document)) == {}


def test_only_what_changed_is_in_the_patch() -> None:
    """A member that has gone is null, and the others of its map are not repeated."""
    old = {"a": {"b": 1, "c": [1, 2], "d": 3}, "e": 4}
    new = {"a": {"b": 2, "c": [1, 2]}, "e": 4, "f": {}}
    assert difference(old, new) == {"a": {"b": 2, "d": None}, "f": {}}


def test_read_only_maps_are_maps() -> None:
    """What the history keeps is not copied for each viewer."""
    old = {"events": {"1": MappingProxyType({"kind": "state"})}}
    new = {"events": {"1": MappingProxyType({"kind": "state", "reason": "x"})}}
    assert difference(old, new) == {"events": {"1": {"reason": "x"}}}


def test_a_patch_of_another_program_is_applied_as_the_standard_has_it() -> None:
    """RFC 7396: an object replaces what is none, and its own nulls are left out."""
    assert merged({"a": "b"}, {"a": {"c": None, "d": {"e": None, "f": 1}}}) == {
        "a": {"d": {"f": 1}}
    }
    assert merged({"a": {"b": 1}}, {"a": [None]}) == {"a": [None]}
