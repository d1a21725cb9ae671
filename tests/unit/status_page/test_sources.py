"""What several sources say of the same requests becomes one table."""

from __future__ import annotations

from holdfast.engine.requests.request_progress import RequestRow
from holdfast.request_context import RequestContext
from holdfast.status_page.sources import with_waiting


def in_engine(number: int) -> RequestRow:
    """A request that an engine works for."""
    return RequestRow(number, "decode", 1.0, "", 1, 0, 10, 10, 3)


def waiting(*numbers: int) -> list[RequestContext]:
    """Requests that wait for capacity."""
    return [RequestContext(number=number, key="team-a") for number in numbers]


def test_requests_that_wait_come_behind_those_in_the_engine() -> None:
    """In the order of their arrival, whatever the order of their turns."""
    rows, left_out = with_waiting([in_engine(3)], 0, waiting(5, 2, 4), limit=3)
    assert [(row.number, row.stage) for row in rows] == [
        (3, "decode"),
        (2, "waiting"),
        (4, "waiting"),
    ]
    assert left_out == 1
    assert (rows[1].key, rows[1].generation, rows[1].prompt_tokens) == ("team-a", 0, None)


def test_a_request_has_one_row() -> None:
    """Also if it was set aside and waits again, while the engine's side knows it."""
    rows, left_out = with_waiting([in_engine(3)], 2, waiting(3), limit=3)
    assert [(row.number, row.stage) for row in rows] == [(3, "decode")]
    assert left_out == 2


def test_a_full_table_counts_those_that_wait() -> None:
    """They are among those that are not shown."""
    rows, left_out = with_waiting([in_engine(3)], 2, waiting(5, 6), limit=1)
    assert [row.number for row in rows] == [3]
    assert left_out == 4
