"""How does it live? Start, first requests, scrapes and recovery, beside `vllm serve`.

    python benchmarks/serving.py                        the demo model, five pairs
    python benchmarks/serving.py --json -- MODEL --max-model-len 4096

Each server of a pair is started, measured and ended before the other is. The client is vLLM's own
(`vllm bench serve`), streaming chats of 64 tokens in and 64 out. Before the pairs each side is
started once, which fills the caches of compiled kernels and Holdfast's learned state, and is not
counted. In the first pair both say how they have resolved vLLM's configuration.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import httpx

import pairs
import sides
import startup
from clients import BenchClient, Result
from sides import Bench, Server

QUIET_SECONDS = 30.0
QUIET_PAIRS = 1
"""It spreads little, and half a minute of it in each pair would be a fifth of the benchmark."""
FIRST_REQUESTS = 100
SCRAPED_CLIENTS = 64
SCRAPED_REQUESTS = 960
SCRAPE_INTERVAL_SECONDS = 1.0
"""Longer than the rest after a page, so that a scrape is answered as one of Prometheus is."""
IDLE_SCRAPES = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """How long each part takes."""

    scraped_requests: int = SCRAPED_REQUESTS
    quiet_seconds: float = QUIET_SECONDS
    first_requests: int = FIRST_REQUESTS


QUICK = Plan(scraped_requests=128, quiet_seconds=2.0, first_requests=20)


@dataclass(frozen=True, slots=True)
class Life:
    """What one server has shown between its start and its end."""

    start: startup.Start
    ready_memory_mib: float
    quiet_processor_seconds: float | None
    """None where it was not waited for."""
    first_request_ratio: float
    scraped: Result
    scrape_seconds: Sequence[float]
    ping_seconds: Sequence[float]
    """Of requests without any work, one before each scrape: what a page waits for is in both."""
    scrape_processor_seconds: float
    config: Mapping[str, str]
    """vLLM's, as this server has resolved it; empty where it was not asked for."""


Pair = dict[str, Life]
Row = tuple[str, Callable[[Life], float | None], int, str]
"""Label, value, digits, goal."""


def lived(bench: Bench, side: str, client: BenchClient, plan: Plan, number: int) -> Life:
    """Start one server of this pair, measure it, and end it."""
    is_first, is_quiet, seed = number == 1, number <= QUIET_PAIRS, 10 * number
    with bench.started(side) as server:
        start = startup.until_ready(server)
        ready_memory_mib = server.resident_mib()
        quiet, first_request_ratio = _first_requests(server, plan, seed, is_quiet=is_quiet)
        with _scraped(server) as (ping_seconds, scrape_seconds):
            scraped = client.run(
                server.url, clients=SCRAPED_CLIENTS, requests=plan.scraped_requests, seed=seed
            )
        scrape_processor_seconds = _scrape_processor_seconds(server)
        config = server.resolved_config() if is_first else {}
        return Life(
            startup.recovered(server, start),
            ready_memory_mib,
            quiet,
            first_request_ratio,
            scraped,
            scrape_seconds,
            ping_seconds,
            scrape_processor_seconds,
            config,
        )


def _first_requests(
    server: Server, plan: Plan, seed: int, *, is_quiet: bool
) -> tuple[float | None, float]:
    """CPU seconds of all processes from READY on, and the first request against the hundredth.

    The first is sent at once, the others when the quiet time is over. The hundredth stands for the
    median of the last tenth: one request alone says little.
    """
    began, spent = time.monotonic(), server.processor_seconds()
    with server.client() as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        first = _request_seconds(http, model, f"{seed} first")
        quiet = None
        if is_quiet:
            time.sleep(max(0.0, began + plan.quiet_seconds - time.monotonic()))
            quiet = server.processor_seconds() - spent
        later = [
            _request_seconds(http, model, f"{seed} {number}")
            for number in range(1, plan.first_requests)
        ]
    return quiet, first / median(later[-plan.first_requests // 10 :])


def _request_seconds(http: httpx.Client, model: str, nonce: str) -> float:
    message = {"role": "user", "content": f"{nonce} {'hold fast ' * 6}"}
    body = {"model": model, "messages": [message], "max_tokens": 16, "ignore_eos": True}
    began = time.perf_counter()
    http.post("/v1/chat/completions", json=body).raise_for_status()
    return time.perf_counter() - began


@contextmanager
def _scraped(server: Server) -> Iterator[tuple[list[float], list[float]]]:
    """While entered, `/ping` and `/metrics` are asked for at the interval; yields the latencies."""
    pings: list[float] = []
    scrapes: list[float] = []
    is_over = threading.Event()

    def scrape() -> None:
        with server.client() as http:
            while True:
                pings.append(_answer_seconds(http, "/ping"))
                scrapes.append(_answer_seconds(http, "/metrics"))
                if is_over.wait(SCRAPE_INTERVAL_SECONDS):
                    return

    thread = threading.Thread(target=scrape, name="scrapes")
    thread.start()
    try:
        yield pings, scrapes
    finally:
        is_over.set()
        thread.join()


def _answer_seconds(http: httpx.Client, path: str) -> float:
    began = time.perf_counter()
    http.get(path).raise_for_status()
    return time.perf_counter() - began


def _scrape_processor_seconds(server: Server) -> float:
    with server.client() as http:
        return server.extra_processor_seconds(
            lambda: _answer_seconds(http, "/metrics"), IDLE_SCRAPES
        )


def measures(found: Sequence[Pair]) -> Iterator[pairs.Measure]:
    """The rows: scrapes, what READY costs, then those of the start."""
    for label, of, digits, goal in _ROWS:
        values = {
            side: [value for pair in found if (value := of(pair[side])) is not None]
            for side in found[0]
        }
        yield pairs.Measure(label, values, digits, goal)
    yield from startup.measures(
        [{side: life.start for side, life in pair.items()} for pair in found]
    )


def _beyond_ping(life: Life) -> list[float]:
    pairs_of = zip(life.scrape_seconds, life.ping_seconds, strict=True)
    return [scrape - ping for scrape, ping in pairs_of]


_ROWS: Sequence[Row] = (
    (
        "/metrics at 64 clients, median, ms",
        lambda life: median(life.scrape_seconds) * 1e3,
        1,
        "",
    ),
    (
        "/metrics at 64 clients, p99, ms",
        lambda life: pairs.p99(life.scrape_seconds) * 1e3,
        1,
        "",
    ),
    ("/ping at 64 clients, median, ms", lambda life: median(life.ping_seconds) * 1e3, 1, ""),
    (
        "/metrics beyond /ping at 64 clients, median, ms",
        lambda life: median(_beyond_ping(life)) * 1e3,
        1,
        "",
    ),
    ("CPU of one scrape, ms", lambda life: life.scrape_processor_seconds * 1e3, 1, ""),
    (
        "CPU seconds in the 30 s after READY",
        lambda life: life.quiet_processor_seconds,
        2,
        "<= 1.00",
    ),
    (
        "first request after READY / hundredth",
        lambda life: life.first_request_ratio,
        2,
        "itself <= 1.2",
    ),
    ("memory of the front end at READY, MiB", lambda life: life.ready_memory_mib, 0, "<= 1.10"),
)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser)
    parser.add_argument(
        "serve", nargs="*", metavar="MODEL FLAG", help="after `--`; without, the demo model"
    )
    return pairs.parsed(parser)


def _found(arguments: argparse.Namespace, bench: Bench) -> list[Pair]:
    plan = QUICK if arguments.quick else Plan()
    for side in () if arguments.quick else pairs.SIDES:
        pairs.say(f"serving: a start of {side}, not counted")
        with bench.ready(side):
            pass
    found = []
    with BenchClient(bench.model) as client:
        for number in range(1, arguments.pairs + 1):
            pairs.say(f"serving: pair {number} of {arguments.pairs}")
            order = pairs.ordered(number)
            lives = {side: lived(bench, side, client, plan, number) for side in order}
            found.append({side: lives[side] for side in pairs.SIDES})
    return found


def main() -> None:
    """Run the pairs and print what they took."""
    arguments = _arguments()
    sides.end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="holdfast-serving-") as directory:
        bench = sides.bench_of(arguments.serve, Path(directory))
        found = _found(arguments, bench)
    ours, theirs = (found[0][side].config for side in pairs.SIDES)
    difference = sides.config_difference(ours, theirs)
    name = "the demo model" if not arguments.serve else Path(bench.model).name
    findings = pairs.Findings(
        "serving",
        f"The life of a server of {name}, {len(found)} pairs, flags {' '.join(bench.flags)}",
        list(measures(found)),
        {
            "config_difference": difference,
            "pairs": [{side: asdict(life) for side, life in pair.items()} for pair in found],
        },
        [_told(difference)],
    )
    pairs.show(findings, arguments)


def _told(difference: Mapping[str, tuple[str, str]]) -> str:
    if not difference:
        return "The resolved vLLM configurations of both sides are the same."
    told = (f"`{name}` ({ours} and {theirs})" for name, (ours, theirs) in difference.items())
    return f"The resolved vLLM configurations differ in {', '.join(told)}."


if __name__ == "__main__":
    main()
