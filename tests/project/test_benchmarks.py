from __future__ import annotations

import re
import socketserver
import threading
import time
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import httpx
import pytest

import clients
import connections
import pairs
import plots
import seams
import sides
import steady
import viewers
from holdfast.api.metrics import PAUSE_FACTOR
from servers import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
MEASURE = pairs.Measure("tok/s", {"holdfast": [11, 12, 30], "vllm serve": [10, 10, 10]}, 0, ">= 1")


def test_the_two_sides_take_turns_at_going_first() -> None:
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


def test_an_error_below_a_hundredth_is_told_with_its_thousandths() -> None:
    """`1.01 ± 0.00` would claim more than was measured."""
    sides = {"holdfast": [10.1, 10.3] * 10, "vllm serve": [10.0, 10.3] * 10}
    record = pairs.Findings("load", "Load", [pairs.Measure("s", sides, 0)]).record()
    assert any(" 1.005 ± 0.001 " in line for line in pairs.markdown_table(record))


def test_the_error_is_that_of_the_ratio() -> None:
    """Not that of its logarithm, which is as large for any ratio."""
    ours = [0.55 + 0.01 * number for number in range(11)]
    row = pairs.Measure("s", {"holdfast": ours, "vllm": [10.0] * 11}, 2, "<= 0.05")
    assert pairs.standard_error(row.ratios()) == pytest.approx(0.001, rel=0.2)
    record = pairs.Findings("load", "Load", [row]).record()
    assert any(" 0.060 ± 0.001 | <= 0.05 | no " in line for line in pairs.markdown_table(record))


def test_the_page_states_the_share_of_scrapes() -> None:
    """The part of a core that they leave to everything else."""
    prose = " ".join(PAGE.read_text().split())
    assert PAUSE_FACTOR == 4
    assert "pauses for four times the CPU time" in prose
    assert "at most a fifth of one core" in prose


def test_the_page_lists_every_benchmark() -> None:
    """And names no other; those that `make bench` runs are among them."""
    folder = Path(pairs.__file__).parent
    scripts = {path.name for path in folder.glob("*.py") if "pairs.show(" in path.read_text()}
    listed = re.findall(r"^\| `(\w+[.]py)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(scripts)
    source = (folder / "__main__.py").read_text()
    (names,) = re.findall(r"^NAMES = (\(.+\))$", source, re.MULTILINE)
    assert {f"{name}.py" for name in literal_eval(names)} <= scripts


def test_servers_that_are_up_at_once_are_told_to_share_the_gpu() -> None:
    """By default vLLM takes nearly all of it, and the second one would not start."""
    texts = {path.name: path.read_text() for path in Path(pairs.__file__).parent.glob("*.py")}
    shared = [name for name, text in texts.items() if "bursts.found(" in text]
    lines = "\n".join([*texts.values(), PAGE.read_text()]).splitlines()
    commands = [
        line for line in lines if any(f"/{name} " in line for name in shared) and "-- MODEL" in line
    ]
    assert len(commands) == 3
    assert all("-- MODEL --gpu-memory-utilization 0.4" in command for command in commands)


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


def test_a_stream_that_paused_is_measured_by_its_longest_gap() -> None:
    """Whatever came before and after."""
    assert seams.Reading([1.0, 1.5, 4.5, 5.0]).pause_seconds == 3.0


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nlate",),
        (EVENTS[0], EVENTS[1], b'data: {"error": {"message": "late"}}\n\n'),
    ],
)
def test_a_stream_that_ends_with_an_error_is_not_one_that_goes_on(parts: tuple[bytes, ...]) -> None:
    """Refused, or broken after a chunk."""
    reading = seams.Reading()
    with answering(parts) as (url, _), httpx.Client(base_url=url) as http:
        reading.read(http, {})
    assert "late" in reading.error
    assert reading.has_begun.is_set()


def test_a_seam_is_compared_with_the_wait_at_the_same_death() -> None:
    """One row for each length of the prompt."""
    row, _ = seams.measures({64: [seams.Seam(6.0, 5.0), seams.Seam(3.0, 4.0)], 4000: []})
    assert row.ratios() == [1.2, 0.75]


def test_the_page_states_the_goals_of_viewers() -> None:
    """Those of the output, of the p99, of the CPU time and of a viewer without load."""
    prose = " ".join(PAGE.read_text().split())
    item = prose[prose.index("* **Viewers of the status page**") :].partition(" * **")[0]
    assert [row.goal for row in viewers.ROWS if row.goal] == ["<= 1.01", ">= 0.99", "<= 1.01"]
    assert viewers.P99_GOAL == "<= 1.01"
    assert item.count("(<= 1.01)") == 2
    assert "1 % of the output (>= 0.99)" in item
    assert viewers.VIEWER_GOAL == "<= 0.20"
    assert "at most 0.20 ms of CPU per second" in item


def test_a_viewer_costs_what_the_front_end_spends_with_all_of_them() -> None:
    """Less what it spends without one."""
    _, each = viewers.quiet_measures({viewers.LOOKING: [15.0, 20.0], viewers.NOBODY: [5.0, 5.0]})
    assert each.values == {viewers.LOOKING: [0.2, 0.3]}


def test_the_p99_is_that_of_all_bursts() -> None:
    """With the error of its ratio, which is none if all pairs show the same."""
    ours, theirs = [[2.0, 4.0]] * 10, [[1.0, 2.0]] * 10
    alike = pairs.pooled_p99("p99", {"ours": ours, "theirs": theirs})
    assert (alike.ratios(), alike.record()["standard_error"]) == ([2.0], 0.0)
    varied = pairs.pooled_p99("p99", {"ours": [*ours[1:], [9.0, 9.0]], "theirs": theirs})
    assert varied.record()["standard_error"] > 0
    tenfold = [[10 * value for value in values] for values in [*ours[1:], [9.0, 9.0]]]
    larger = pairs.pooled_p99("p99", {"ours": tenfold, "theirs": theirs})
    error = 10 * varied.record()["standard_error"]
    assert larger.record()["standard_error"] == pytest.approx(error)
    few = pairs.pooled_p99("p99", {"ours": ours[:2], "theirs": theirs[:2]})
    assert few.record()["standard_error"] is None


def test_a_window_has_the_tokens_that_ended_in_it_and_the_waits_that_began_in_it() -> None:
    """Each answer counts once for each, in windows that lie side by side."""
    crossing, after = steady.Answer(9.5, 0.5, 10.5, 30), steady.Answer(10.0, 3.0, 14.0, 50)
    first = viewers.Window(0.0, 10.0, 0.6, 0.9).result(
        [steady.Answer(1.0, 2.0, 4.0, 10), crossing, after]
    )
    second = viewers.Window(10.0, 20.0, 0.8, 1.6).result([crossing, after])
    assert (first["output_throughput"], first[clients.TTFTS]) == (1.0, [2.0, 0.5])
    assert (second["output_throughput"], second[clients.TTFTS]) == (8.0, [3.0])
    assert second["front_end_us_per_token"] == pytest.approx(1e4)
    assert second["server_us_per_token"] == pytest.approx(2e4)


def test_half_of_the_pairs_begin_with_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times at which each side is measured are told apart by nothing else."""
    monkeypatch.setattr(viewers, "VIEWERS", 0)
    server: Any = SimpleNamespace(url="http://127.0.0.1:1")
    order = iter(range(4))
    found = viewers._by_side(server, 2, lambda: next(order))
    assert found == {viewers.LOOKING: [1, 2], viewers.NOBODY: [0, 3]}


def test_a_steady_load_asks_again_when_an_answer_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never the same twice, and for answers that differ in length."""
    monkeypatch.setattr(steady, "RAMP_SECONDS", 0)
    with (
        answering(EVENTS) as (url, asked),
        steady.SteadyLoad(url, "m", tmp_path, clients=3) as load,
    ):
        wait_until(
            lambda: len(load.answers()) >= 9,
            deadline_seconds=60,
            what=lambda: f"nine answers, but {load.answers()}",
        )
    for answer in load.answers():
        first_seconds = answer.began_seconds + answer.time_to_first_token_seconds
        assert answer.began_seconds <= first_seconds <= answer.ended_seconds
    lengths = {answer.output_tokens for answer in load.answers()}
    assert len(lengths) > 1
    assert lengths <= set(range(1, steady.MOST_OUTPUT_TOKENS + 1))
    assert len(set(asked)) == len(asked)


def test_a_steady_load_that_is_not_answered_ends_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the windows would be measured without it."""
    monkeypatch.setattr(steady, "RAMP_SECONDS", 60)
    with (
        answering((b"HTTP/1.1 429 Too Many Requests\r\n\r\n",)) as (url, _),
        pytest.raises(SystemExit, match="load has ended"),
        steady.SteadyLoad(url, "m", tmp_path, clients=1),
    ):
        pass


STREAM = b"HTTP/1.1 200 OK\r\n\r\n", b"data: {}\n\n"


def test_late_answers_are_counted_of_a_thousand() -> None:
    """Those that took longer than the limit, not as long."""
    seconds = [0.0001, viewers.LATE_SECONDS, 2 * viewers.LATE_SECONDS, 1.0]
    assert viewers.late_of_thousand(seconds) == 500


def until_lost(looking: viewers.Viewers, count: int) -> None:
    """Wait until this many streams have ended."""
    deadline_seconds = time.monotonic() + 60
    while looking.lost < count:
        assert time.monotonic() < deadline_seconds
        time.sleep(0.01)


def test_viewers_that_lose_their_stream_end_the_benchmark() -> None:
    """Or the server would be measured without them."""
    with answering(STREAM) as (url, asked):
        looking = viewers.Viewers(url, 2)
        with pytest.raises(SystemExit, match="2 of 2 viewers"), looking.looking():
            until_lost(looking, 2)
    assert [request.split()[1] for request in asked] == [b"/statusz/stream"] * 2


def test_a_viewer_that_is_turned_away_ends_the_benchmark() -> None:
    """As a server without the page does."""
    parts = (b"HTTP/1.1 404 Not Found\r\n\r\n",)
    with answering(parts) as (url, _), pytest.raises(SystemExit, match="404"):
        viewers.Viewers(url, 1).looking().__enter__()
