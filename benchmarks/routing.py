"""What does the page for routers cost? Latency and CPU beside `/livez`, and output without it.

    python benchmarks/routing.py             the demo model, 25 pairs
    python benchmarks/routing.py --pairs 5 --json

One server under the same load, in bursts that take turns: 64 clients, streaming chats of 64 tokens
in and 64 out. In one burst nobody asks for the page, in another a router does, twenty times a
second, and in a third it asks for `/livez` as often. The CPU of one request is measured on the idle
server, and what the server spends by itself in that time is deducted. Beside it stands uvicorn with
an application that sends constant bytes: no server on uvicorn can take less.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Self
from urllib.parse import urlsplit

import bursts
import pairs
import sides
from clients import BenchClient
from sides import Server

CLIENTS = 64
REQUESTS = 256
QUICK_REQUESTS = 64
PAIRS = 25
SCRAPES_A_SECOND = 20
IDLE_SCRAPES = 2000
QUICK_IDLE_SCRAPES = 100
ANSWER_SECONDS = 30.0
PAGE, HEALTH = PATHS = ("/metrics/routing", "/livez")
COMPARED = (*PATHS, sides.CONSTANT_SIDE)
SCRAPED, ALONE = SIDES = ("scraped", "alone")


@dataclass(frozen=True, slots=True)
class Pair:
    """What one turn of the bursts, and the idle server after it, have shown."""

    output_tokens_per_second: Mapping[str, float]
    """By side."""
    latencies_seconds: Mapping[str, Sequence[float]]
    """By path, under the load."""
    processor_seconds: Mapping[str, float]
    """Of one request, by path; and of one to uvicorn alone."""


class Scraper:
    """One connection that stays open, as cheap as Python can be: it shares the server's cores."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        address = (parts.hostname or "", parts.port or 0)
        self._socket = socket.create_connection(address, ANSWER_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def seconds(self, path: str) -> float:
        """Ask for a path, and return how long its answer took; exit if it is not 200."""
        began = time.perf_counter()
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: benchmark\r\n\r\n".encode())
        received = b""
        while not _is_whole(received):
            part = self._socket.recv(1 << 16)
            if not part:
                sys.exit(f"error: the server closed the connection instead of answering {path}.")
            received += part
        if not received.startswith(b"HTTP/1.1 200 "):
            sys.exit(f"error: {path} was answered with {received.splitlines()[0].decode()}.")
        return time.perf_counter() - began


def _is_whole(received: bytes) -> bool:
    head, end_of_head, body = received.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return bool(end_of_head) and len(body) >= int(length)


@contextmanager
def _scraping(url: str, path: str) -> Iterator[list[float]]:
    """While entered, ask for the path at the rate of a router; yields the latencies."""
    latencies: list[float] = []
    is_over = threading.Event()

    def scrape() -> None:
        began = time.monotonic()
        with Scraper(url) as scraper:
            for number in count(1):
                latencies.append(scraper.seconds(path))
                if is_over.wait(max(0.0, began + number / SCRAPES_A_SECOND - time.monotonic())):
                    return

    thread = threading.Thread(target=scrape, name=f"scrapes of {path}")
    thread.start()
    try:
        yield latencies
    finally:
        is_over.set()
        thread.join()


def _processor_seconds(server: Server, path: str, requests: int) -> float:
    with Scraper(server.url) as scraper:
        return server.extra_processor_seconds(lambda: scraper.seconds(path), requests)


def _pair(
    server: Server, constant: Server, client: BenchClient, number: int, *, is_quick: bool
) -> Pair:
    requests = QUICK_REQUESTS if is_quick else REQUESTS
    tokens_per_second: dict[str, float] = {}
    latencies: dict[str, Sequence[float]] = {}
    asked: Sequence[tuple[str, str | None]] = (
        (SCRAPED, PAGE),
        (ALONE, None),
        ("watched", HEALTH),
    )
    for seed, (side, path) in enumerate(asked if number % 2 else asked[::-1], 10 * number):
        bursts.settle([server])
        with _scraping(server.url, path) if path else nullcontext([0.0]) as seconds:
            result = client.run(server.url, clients=CLIENTS, requests=requests, seed=seed)
        tokens_per_second[side] = float(result["output_throughput"])
        if path:
            latencies[path] = seconds
    bursts.settle([server])
    idle_scrapes = QUICK_IDLE_SCRAPES if is_quick else IDLE_SCRAPES
    spent = {
        path: _processor_seconds(server, path, idle_scrapes)
        for path in pairs.ordered(number, PATHS)
    }
    spent[sides.CONSTANT_SIDE] = _processor_seconds(constant, PAGE, idle_scrapes)
    return Pair(tokens_per_second, latencies, spent)


def measures(found: Sequence[Pair]) -> list[pairs.Measure]:
    """The rows of the table."""
    milliseconds = {
        path: [[1e3 * one for one in pair.latencies_seconds[path]] for pair in found]
        for path in PATHS
    }
    medians = {path: [*map(median, of_pairs)] for path, of_pairs in milliseconds.items()}
    spent = {path: [1e3 * pair.processor_seconds[path] for pair in found] for path in COMPARED}
    output = {side: [one.output_tokens_per_second[side] for one in found] for side in SIDES}
    return [
        pairs.Measure("latency at 64 clients, median, ms", medians, 2),
        pairs.pooled_p99("latency at 64 clients, p99 of all, ms", milliseconds, 2, "<= 1.20"),
        pairs.Measure("CPU of one request, ms", spent, 3, "itself <= 0.10"),
        pairs.Measure("output tok/s at 64 clients", output, 0, ">= 0.995"),
    ]


def main() -> None:
    """Run the pairs and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser, pairs=PAIRS)
    arguments = pairs.parsed(parser)
    sides.end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="holdfast-routing-") as directory:
        bench = sides.bench_of((), Path(directory))
        with (
            bench.ready("holdfast") as server,
            bench.ready(sides.CONSTANT_SIDE) as constant,
            BenchClient(bench.model) as client,
        ):
            found = []
            for number in range(1, arguments.pairs + 1):
                pairs.say(f"routing: pair {number} of {arguments.pairs}")
                found.append(_pair(server, constant, client, number, is_quick=arguments.quick))
    title = f"{SCRAPES_A_SECOND} scrapes a second, {len(found)} pairs of bursts"
    pairs.show(pairs.Findings("routing", title, measures(found)), arguments)


if __name__ == "__main__":
    main()
