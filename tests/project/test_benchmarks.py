from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from xml.etree import ElementTree as ET

import pytest

import connections
import pairs
import plots
import sides

MEASURE = pairs.Measure("tok/s", {"holdfast": [11, 12, 30], "vllm serve": [10, 10, 10]}, 0, ">= 1")


def test_who_is_first_alternates() -> None:
    """Neither side always has the warmer machine."""
    firsts = [pairs.ordered(number)[0] for number in range(1, 5)]
    assert firsts == ["holdfast", "vllm serve", "holdfast", "vllm serve"]


def test_the_ratio_is_within_a_pair() -> None:
    """One for each pair, ours to theirs; none where there is one side."""
    assert MEASURE.ratios() == [1.1, 1.2, 3.0]
    assert pairs.Measure("phase", {"holdfast": [1.0]}).ratios() == []


def test_the_tables_hold_medians_and_spreads() -> None:
    """For the terminal and for the page, from the same record."""
    record = pairs.Findings("load", "Load", [MEASURE], notes=["A note."]).record()
    row = "| tok/s | 12 (11 to 30) | 10 (10 to 10) | 1.20 (1.10 to 3.00) | >= 1 | yes |"
    assert row in pairs.markdown_table(record)
    assert any("12 (11 to 30)" in line for line in pairs.text_table(record))
    assert list(pairs.text_table(record))[-1] == "A note."


@pytest.mark.parametrize(
    ("ours", "goal", "met"),
    [
        ([9.0] * 10, "<= 1.00", "yes"),
        ([11.0] * 10, "<= 1.00", "no"),
        ([8.0, 12.0] * 4 + [10.1] * 3, "<= 1.00", "within the error"),
        ([8.0, 12.0] * 4 + [9.9] * 3, ">= 1.00", "within the error"),
        ([11.0] * 10, "itself <= 12", "yes"),
        ([11.0] * 10, "", ""),
    ],
)
def test_the_table_says_whether_a_goal_is_met(ours: list[float], goal: str, met: str) -> None:
    """The error counts only if there are enough pairs for one."""
    sides = {"holdfast": ours, "vllm serve": [10.0] * len(ours)}
    record = pairs.Findings("load", "Load", [pairs.Measure("s", sides, 0, goal)]).record()
    (row,) = (line for line in pairs.markdown_table(record) if line.startswith("| s |"))
    assert row.endswith(f"| {goal} | {met} |")


def test_a_difference_of_configurations_names_both_values() -> None:
    """Also of what only one of them has."""
    ours, theirs = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "5"}
    assert sides.config_difference(ours, theirs) == {
        "b": ("2", "4"),
        "c": ("3", "absent"),
        "d": ("absent", "5"),
    }


@pytest.mark.parametrize("ys", [[1.0, 2000.0, 3.5], [0.0, 0.0, 0.0], [-0.5, 0.2, 0.1]])
def test_a_plot_is_a_picture_with_a_point_for_each_value(ys: list[float]) -> None:
    """Valid XML, whatever was measured."""
    curve = plots.Curve("a", "A & B", "clients", "tok/s", [1, 8, 512], {"holdfast": ys})
    root = ET.fromstring(plots.svg(curve))  # noqa: S314 - our own
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == 3


EVENTS = b"HTTP/1.1 200 OK\r\n\r\n", b"data: {}\n\n", b"data: {}\n\ndata: [DONE]\n\n"


@contextmanager
def answering(parts: tuple[bytes, ...], together: int = 1) -> Iterator[tuple[str, list[bytes]]]:
    """A server of one request a connection, and what it was asked; none is answered alone."""
    asked: list[bytes] = []
    all_came = threading.Barrier(together)

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked.append(self.request.recv(1 << 16))
            all_came.wait(60)
            for part in parts:
                self.request.sendall(part)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def test_each_request_of_a_burst_has_a_connection_of_its_own() -> None:
    """All clients ask before one of them is answered, and no two the same."""
    with answering(EVENTS, together=4) as (url, asked):
        result = connections.SocketClient("m").run(url, clients=4, requests=4, seed=1)
    assert len(set(asked)) == 4
    assert result["total_output_tokens"] == 4 * connections.OUTPUT_TOKENS
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"]


@pytest.mark.parametrize("parts", [EVENTS[:2], (b"HTTP/1.1 429 Too Many Requests\r\n\r\n",)])
def test_a_stream_that_breaks_off_ends_the_benchmark(parts: tuple[bytes, ...]) -> None:
    """No number is made of what was not answered."""
    with answering(parts) as (url, _), pytest.raises(SystemExit, match="broke off"):
        connections.SocketClient("m").run(url, clients=1, requests=1, seed=1)
