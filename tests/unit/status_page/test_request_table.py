"""The rows of the running requests, without anything that a client wrote."""

from __future__ import annotations

from typing import Any

from holdfast.engine.requests.request_progress import RequestRow
from holdfast.status_page.request_table import RequestTable


def a_row(**differences: Any) -> RequestRow:
    """A request in the middle of its prompt."""
    values: dict[str, Any] = {
        "number": 3,
        "stage": "prefill",
        "received_seconds": 5.0,
        "key": "team-a",
        "generation": 2,
        "replays": 1,
        "prompt_tokens": 100,
        "prefilled_tokens": 64,
        "output_tokens": 0,
    }
    return RequestRow(**(values | differences))


def a_table() -> RequestTable:
    """One that writes times as numbers."""
    return RequestTable(lambda seconds: f"at {seconds}")


def test_a_row_has_what_is_known() -> None:
    """Under the number of the request."""
    unknown = a_row(
        number=4, received_seconds=None, key="", prompt_tokens=None, prefilled_tokens=None
    )
    assert a_table().rows([a_row(), unknown], 0.0) == {
        "3": {
            "stage": "prefill",
            "received": "at 5.0",
            "key": "team-a",
            "generation": 2,
            "replays": 1,
            "prompt_tokens": 100,
            "prefilled_tokens": 64,
            "output_tokens": 0,
        },
        "4": {"stage": "prefill", "generation": 2, "replays": 1, "output_tokens": 0},
    }


def test_the_speed_is_that_of_the_last_seconds() -> None:
    """From the first token on: the prompt's time is not the answer's."""
    table = a_table()
    found = [
        table.rows([a_row(output_tokens=tokens)], seconds)["3"].get("output_tokens_per_second")
        for seconds, tokens in [(0.0, 0), (60.0, 1), (60.5, 11), (61.0, 21), (65.0, 21), (70.0, 21)]
    ]
    assert found == [None, None, None, 20.0, 4.0, 0.0]


def test_a_speed_does_not_depend_on_how_many_look() -> None:
    """Each look builds the rows; only some of them are readings."""
    table = a_table()
    for look in range(501):
        row = table.rows([a_row(output_tokens=1 + look // 5)], look / 100)["3"]
    assert row["output_tokens_per_second"] == 20.0
    assert len(table._readings[3]) <= 13


def test_fifty_viewers_see_a_speed() -> None:
    """They get changes so seldom that all earlier readings are older than the window."""
    table = a_table()
    for look in range(3):
        row = table.rows([a_row(output_tokens=1 + 52 * look)], 5.2 * look)["3"]
    assert row["output_tokens_per_second"] == 10.0


def test_a_speed_is_never_negative() -> None:
    """A replay counts from the beginning."""
    table = a_table()
    for seconds, tokens in [(0.0, 50), (1.0, 60), (2.0, 5), (3.5, 8)]:
        row = table.rows([a_row(output_tokens=tokens)], seconds)["3"]
    assert row["output_tokens_per_second"] == 2.0


def test_a_speed_is_forgotten_with_its_request() -> None:
    """A number is never used again, but its memory would be kept."""
    table = a_table()
    table.rows([a_row(output_tokens=1)], 0.0)
    table.rows([], 1.0)
    row = table.rows([a_row(output_tokens=9)], 2.0)["3"]
    assert "output_tokens_per_second" not in row
