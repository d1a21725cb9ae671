"""What do fifty viewers of the status page cost? A server with them, beside itself without.

    python benchmarks/viewers.py             the demo model, a quarter of an hour on two cores
    python benchmarks/viewers.py --pairs 300 an hour and a half: one percent of a p99 is seen
    python benchmarks/viewers.py --json

One server without a prefix cache has 64 clients all the time: streaming chats of 64 tokens in and
1 to 64 out. In each pair of windows of eight seconds, viewers read the stream of the status page
during one of the two. They do nothing with it, but share the machine with the server.

Then the same viewers read without a load. A request for one token each half second changes the
document as often as the server sends changes. Beside that, one client asks for `/livez` over and
over: how many answers are late says how often a change keeps the event loop.
"""

from __future__ import annotations

import argparse
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TypeVar
from urllib.parse import urlsplit

import bursts
import pairs
import sides
from bursts import Row
from clients import TTFTS, Result
from sides import Server
from steady import Answer, SteadyLoad

T = TypeVar("T")

CLIENTS = 64
VIEWERS = 50
WINDOWS = 45
WINDOW_SECONDS = 8.0
SETTLE_SECONDS = 1.0
"""After the viewers have come or gone, before anything is counted."""
QUICK_SECONDS = 1.0
SIDES = LOOKING, NOBODY = (f"{VIEWERS} viewers", "none")
ANSWER_SECONDS = 30.0
LOOK_SECONDS = 0.1
CHANGE_SECONDS = 0.5
QUIET_CHANGES = 30
QUICK_QUIET_CHANGES = 4
QUIET_PAIRS = 2
LATE_PAIRS = 4
LATE_SECONDS = 0.002
"""Eight times what `/livez` takes, and a sixtieth of the p99 of the first token at this load."""
VIEWER_GOAL = "<= 0.20"
P99_GOAL = "<= 1.01"
ROWS = (
    Row("CPU of the whole server, µs a token", CLIENTS, "server_us_per_token", 1, "<= 1.01"),
    Row("CPU of the front end, µs a token", CLIENTS, "front_end_us_per_token"),
    Row("output tok/s", CLIENTS, "output_throughput", 0, ">= 0.99"),
    Row("median TTFT, ms", CLIENTS, "median_ttft_ms"),
    Row("p99 TTFT of a window, ms", CLIENTS, "p99_ttft_ms", 1, P99_GOAL),
)
_REQUEST = b"GET /statusz/stream HTTP/1.1\r\nHost: benchmark\r\n\r\n"


class Viewers:
    """Reads streams in a thread, as cheaply as Python can."""

    def __init__(self, url: str, count: int) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)
        self._count = count
        self._ends = threading.Event()
        self.received_bytes = 0
        self.lost = 0
        """How many streams have ended before they were left."""

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While entered, all of them look.

        Raises:
            SystemExit: the server turned one away, or ended its stream.
        """
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.EpollSelector())
            for _ in range(self._count):
                viewer = socket.create_connection(self._address, ANSWER_SECONDS)
                self._look(stack.enter_context(viewer))
                selector.register(viewer, selectors.EVENT_READ, viewer)
            reading = threading.Thread(target=self._read, args=(selector,))
            reading.start()
            try:
                yield
            finally:
                self._ends.set()
                reading.join()
        if self.lost or (self._count and not self.received_bytes):
            sys.exit(f"error: {self.lost} of {self._count} viewers lost their stream.")

    def _look(self, viewer: socket.socket) -> None:
        viewer.sendall(_REQUEST)
        head = viewer.recv(1 << 16)
        if not head.startswith(b"HTTP/1.1 200"):
            sys.exit(f"error: a viewer got {head[:200]!r}.")
        viewer.setblocking(False)

    def _read(self, selector: selectors.EpollSelector) -> None:
        while not self._ends.is_set():
            for key, _ in selector.select(LOOK_SECONDS):
                viewer: socket.socket = key.data
                received = viewer.recv(1 << 20)
                self.received_bytes += len(received)
                if not received:
                    selector.unregister(viewer)
                    self.lost += 1


@dataclass(frozen=True, slots=True)
class Window:
    """A time that is measured, and what the server spent in it."""

    began_seconds: float
    ended_seconds: float
    front_end_cpu_seconds: float
    server_cpu_seconds: float

    def result(self, answers: Sequence[Answer]) -> Result:
        """Return its numbers, under the names of `vllm bench serve`."""
        began, ended = self.began_seconds, self.ended_seconds
        tokens = sum(one.output_tokens for one in answers if began <= one.ended_seconds < ended)
        waits = [
            one.time_to_first_token_seconds for one in answers if began <= one.began_seconds < ended
        ]
        return {
            "output_throughput": tokens / (ended - began),
            "median_ttft_ms": 1e3 * median(waits),
            "p99_ttft_ms": 1e3 * pairs.p99(waits),
            TTFTS: waits,
            "front_end_us_per_token": 1e6 * self.front_end_cpu_seconds / tokens,
            "server_us_per_token": 1e6 * self.server_cpu_seconds / tokens,
        }


def found(server: Server, load: SteadyLoad, seconds: float, count: int) -> list[bursts.Pair]:
    """Return this many pairs of windows of this length under the load."""
    windows = _by_side(server, count, lambda: _window(server, load, seconds))
    answers = load.answers()
    return [
        {side: {CLIENTS: windows[side][number].result(answers)} for side in SIDES}
        for number in range(count)
    ]


def _window(server: Server, load: SteadyLoad, seconds: float) -> Window:
    load.go_on(SETTLE_SECONDS)
    began_seconds = time.monotonic()
    front_end, everything = server.front_end_processor_seconds(), server.processor_seconds()
    load.go_on(seconds)
    return Window(
        began_seconds,
        time.monotonic(),
        server.front_end_processor_seconds() - front_end,
        server.processor_seconds() - everything,
    )


def _viewers(server: Server, side: str) -> Viewers:
    return Viewers(server.url, VIEWERS if side == LOOKING else 0)


def p99(found: Sequence[bursts.Pair]) -> pairs.Measure:
    """Return the row of the latest first tokens of all windows together, in medians of their pair.

    A machine changes its speed within an hour, and of all that is pooled, its slowest minutes alone
    would decide. Even so they decide much of it; the median of the ratios of all pairs, each with
    the p99 of a window, has a smaller error.
    """
    waits = [{side: pair[side][CLIENTS][TTFTS] for side in SIDES} for pair in found]
    usual = [median(chain.from_iterable(pair.values())) for pair in waits]
    relative = {
        side: [
            [seconds / middle for seconds in pair[side]]
            for pair, middle in zip(waits, usual, strict=True)
        ]
        for side in SIDES
    }
    return pairs.pooled_p99(
        f"p99 TTFT, in medians of its pair, clients: {CLIENTS}", relative, 2, P99_GOAL
    )


def quiet(server: Server, model: str, changes: int, count: int) -> list[pairs.Measure]:
    """Return what the front end spends on a document that changes, and what of it on a viewer."""
    return quiet_measures(
        _at_rest_by_side(server, count, lambda: _spent_on(server, model, changes))
    )


def quiet_measures(spent: Mapping[str, list[float]]) -> list[pairs.Measure]:
    """Return the rows of the CPU milliseconds of a second, by side."""
    each = [
        (ours - theirs) / VIEWERS
        for ours, theirs in zip(spent[LOOKING], spent[NOBODY], strict=True)
    ]
    return [
        pairs.Measure("CPU of the front end without load, ms a second", spent),
        pairs.Measure(
            "CPU of one viewer without load, ms a second", {LOOKING: each}, 3, VIEWER_GOAL
        ),
    ]


def late(server: Server, model: str, changes: int, count: int) -> pairs.Measure:
    """Return the row of the late answers of `/livez` while the document changes."""
    found = _at_rest_by_side(
        server, count, lambda: late_of_thousand(_livez_times(server, model, changes))
    )
    label = f"/livez over {1e3 * LATE_SECONDS:.0f} ms without load, of 1,000"
    return pairs.Measure(label, found, 2)


def _by_side(server: Server, count: int, measured: Callable[[], T]) -> dict[str, list[T]]:
    """Return what was measured with viewers and without, in pairs whose order alternates."""
    found: dict[str, list[T]] = {side: [] for side in SIDES}
    for number in range(count):
        for side in pairs.ordered(number, SIDES):
            with _viewers(server, side).looking():
                found[side].append(measured())
    return found


def _at_rest_by_side(
    server: Server, count: int, measured: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the same, each time after the server has come to rest."""

    def at_rest() -> float:
        bursts.settle((server,))
        return measured()

    return _by_side(server, count, at_rest)


def late_of_thousand(seconds: Sequence[float]) -> float:
    """Return how many of a thousand took longer than `LATE_SECONDS`."""
    return 1000 * sum(one > LATE_SECONDS for one in seconds) / len(seconds)


def _livez_times(server: Server, model: str, changes: int) -> list[float]:
    """Return the seconds of each answer, asked one after the other while the document changes."""
    parts = urlsplit(server.url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_SECONDS)
    with ThreadPoolExecutor(1) as pool, closing(connection):
        changing = pool.submit(_spent_on, server, model, changes)
        seconds = [_livez_seconds(connection)]
        while not changing.done():
            seconds.append(_livez_seconds(connection))
        changing.result()
    return seconds


def _livez_seconds(connection: HTTPConnection) -> float:
    began_seconds = time.perf_counter()
    connection.request("GET", "/livez")
    connection.getresponse().read()
    return time.perf_counter() - began_seconds


def _spent_on(server: Server, model: str, changes: int) -> float:
    """Return the CPU milliseconds of a second in which the document changes twice."""
    body = {"model": model, "prompt": "look", "max_tokens": 1}
    with server.client() as client:
        began_seconds, before = time.monotonic(), server.front_end_processor_seconds()
        for number in range(1, changes + 1):
            client.post("/v1/completions", json=body).raise_for_status()
            time.sleep(max(0.0, began_seconds + number * CHANGE_SECONDS - time.monotonic()))
        spent = server.front_end_processor_seconds() - before
        return 1000 * spent / (time.monotonic() - began_seconds)


def main() -> None:
    """Run the pairs and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser, pairs=WINDOWS)
    arguments = pairs.parsed(parser)
    sides.end_on_sigterm()
    seconds = QUICK_SECONDS if arguments.quick else WINDOW_SECONDS
    changes = QUICK_QUIET_CHANGES if arguments.quick else QUIET_CHANGES
    with tempfile.TemporaryDirectory(prefix="holdfast-viewers-") as directory:
        bench = sides.bench_of((), Path(directory))
        bench = replace(bench, flags=(*bench.flags, "--no-enable-prefix-caching"))
        with bench.ready("holdfast") as server:
            with SteadyLoad(server.url, bench.model, Path(directory), clients=CLIENTS) as load:
                pairs_found = found(server, load, seconds, arguments.pairs)
            alone = quiet(server, bench.model, changes, min(arguments.pairs, QUIET_PAIRS))
            waits = late(server, bench.model, changes, min(arguments.pairs, LATE_PAIRS))
    rows = [row.measure(pairs_found, SIDES) for row in ROWS]
    measures = [*rows, p99(pairs_found), *alone, waits]
    title = f"Viewers of the status page, {len(pairs_found)} pairs of windows"
    pairs.show(pairs.Findings("viewers", title, measures), arguments)


if __name__ == "__main__":
    main()
