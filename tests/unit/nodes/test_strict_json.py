"""What another machine sent becomes a record, or one error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.nodes.strict_json import as_record, parsed, written
from holdfast.records import Death, RankStats, Suspect
from holdfast.workspace.plan import WorkspaceSpec
from sample_status import a_rank


@dataclass(frozen=True, slots=True)
class Inner:
    number: int


@dataclass(frozen=True, slots=True)
class Outer:
    text: str
    count: int
    seconds: float
    flag: bool
    word: Literal["one", "two"]
    pair: tuple[int, str]
    inners: tuple[Inner, ...]
    sizes: Mapping[str, int]
    limit: int | None = None


RECORD = Outer("a", 1, 0.5, True, "one", (1, "b"), (Inner(1), Inner(2)), {"c": 3})
FIELDS: dict[str, Any] = json.loads(written(RECORD))


def test_a_record_is_read_as_it_was_written() -> None:
    """Nested records, tuples and mappings too."""
    assert as_record(Outer, parsed(written(RECORD))) == RECORD


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        (RankStats, a_rank(rank=1, steps=5)),
        (Death, Death("worker_exit", "killed", suspects=(Suspect("r", 5, is_prefill=True),))),
        (WorkspaceSpec, WorkspaceSpec("", 1, 0, 0.1, "deny", None, ((0, 1, 2),))),
    ],
)
def test_the_records_of_the_engine_are_read_as_they_were_written(kind: Any, record: Any) -> None:
    """Those that cross between nodes, with everything that they contain."""
    assert as_record(kind, parsed(written(record))) == record


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", 1),
        ("text", None),
        ("text", "\ud800"),
        ("count", True),
        ("count", 1.0),
        ("count", "1"),
        ("count", 1 << 63),
        ("count", -(1 << 63) - 1),
        ("seconds", "0.5"),
        ("seconds", True),
        ("seconds", math.inf),
        ("flag", 1),
        ("flag", "true"),
        ("word", "three"),
        ("word", 1),
        ("pair", [1]),
        ("pair", [1, "b", 2]),
        ("pair", "ab"),
        ("inners", [{"number": 1, "other": 2}]),
        ("inners", [{}]),
        ("inners", [[1]]),
        ("inners", {}),
        ("sizes", []),
        ("sizes", {"c": "3"}),
        ("limit", "none"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    """Nothing is converted."""
    with pytest.raises(ValueError, match=r"type|fields|length|object"):
        as_record(Outer, FIELDS | {name: value})


def test_a_whole_number_may_be_written_for_a_float() -> None:
    """JSON of other writers has one kind of number."""
    record = as_record(Outer, FIELDS | {"seconds": 2})
    assert (type(record.seconds), record.seconds) == (float, 2.0)


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field_is_refused(name: str) -> None:
    """One with a default too."""
    with pytest.raises(ValueError, match="unexpected fields"):
        as_record(Outer, {key: value for key, value in FIELDS.items() if key != name})


def test_an_unknown_field_is_refused() -> None:
    """It would mean something to its sender."""
    with pytest.raises(ValueError, match="unexpected fields"):
        as_record(Outer, FIELDS | {"more": 1})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"nul",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1, "a": 2}',
        b"\xff\xfe",
        b'{"a": 1} x',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"1" * 5000,
    ],
)
def test_what_is_not_plain_json_is_refused(text: bytes) -> None:
    """With one kind of error."""
    with pytest.raises(ValueError, match=r"."):
        parsed(text)


def test_a_number_that_is_not_finite_is_not_written() -> None:
    """The sender finds out, not the receiver."""
    with pytest.raises(ValueError, match=r"."):
        written(Outer("a", 1, math.nan, True, "one", (1, "b"), (), {}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(changes=st.dictionaries(st.sampled_from([*FIELDS, "more"]), JSON))
def test_whatever_a_field_holds_there_is_a_record_or_a_value_error(
    changes: dict[str, Any],
) -> None:
    """Nothing else is raised."""
    try:
        record = as_record(Outer, FIELDS | changes)
    except ValueError:
        return
    assert isinstance(record, Outer)
