"""What do fifty viewers of the status page cost? A server with them, beside itself without.

    python benchmarks/viewers.py             the demo model, forty pairs of bursts
    python benchmarks/viewers.py --json

One server takes the same load in turns: 64 clients, streaming chats of 64 tokens in and 64 out. In
one burst of each pair, viewers read the stream of the status page meanwhile. They do nothing with
it, but share the machine with the server.
"""

from __future__ import annotations

import argparse
import selectors
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import bursts
import pairs
import sides
from bursts import Row
from clients import BenchClient, Client
from sides import Server

CLIENTS = 64
REQUESTS = 192
QUICK_REQUESTS = 64
VIEWERS = 50
BURSTS = 40
SIDES = (f"{VIEWERS} viewers", "none")
ANSWER_SECONDS = 30.0
LOOK_SECONDS = 0.1
ROWS = (
    Row("output tok/s", CLIENTS, "output_throughput", 0, ">= 0.99"),
    Row("median TTFT, ms", CLIENTS, "median_ttft_ms"),
    Row("p99 TTFT, ms", CLIENTS, "p99_ttft_ms", 1, "<= 1.01"),
    Row("CPU of the front end, µs a token", CLIENTS, "front_end_us_per_token"),
    Row("CPU of the whole server, µs a token", CLIENTS, "server_us_per_token"),
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


def found(server: Server, client: Client, requests: int, count: int) -> list[bursts.Pair]:
    """Return this many pairs; the first burst, which fills caches, is not counted."""
    bursts.burst(server, client, clients=CLIENTS, requests=requests, seed=0)
    return [_pair(server, client, requests, number) for number in range(count)]


def _pair(server: Server, client: Client, requests: int, number: int) -> bursts.Pair:
    results: dict[str, Mapping[str, float]] = {}
    # No two bursts have the same prompts, or the second of a pair would find them in the cache.
    for place, side in enumerate(pairs.ordered(number, SIDES)):
        bursts.settle((server,))
        seed = 1000 * (number + 1) + place
        with Viewers(server.url, VIEWERS if side == SIDES[0] else 0).looking():
            results[side] = bursts.burst(
                server, client, clients=CLIENTS, requests=requests, seed=seed
            )
    return {side: {CLIENTS: result} for side, result in results.items()}


def main() -> None:
    """Run the pairs and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser, pairs=BURSTS)
    arguments = pairs.parsed(parser)
    sides.end_on_sigterm()
    requests = QUICK_REQUESTS if arguments.quick else REQUESTS
    with tempfile.TemporaryDirectory(prefix="holdfast-viewers-") as directory:
        bench = sides.bench_of((), Path(directory))
        with bench.ready("holdfast") as server, BenchClient(bench.model) as client:
            pairs_found = found(server, client, requests, arguments.pairs)
    measures = [row.measure(pairs_found, SIDES) for row in ROWS]
    title = f"Viewers of the status page, {len(pairs_found)} pairs of bursts"
    pairs.show(pairs.Findings("viewers", title, measures), arguments)


if __name__ == "__main__":
    main()
