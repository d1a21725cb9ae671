"""How long does a stream pause when its engine dies? Beside a request that comes at that moment.

    python benchmarks/seams.py               the demo model, ten deaths for each length
    python benchmarks/seams.py --json -- MODEL --max-model-len 8192

The engine is killed while one client reads a stream. At that moment a second client asks for a
stream whose prompt is as long as what the first has of prompt and answer. The pause is the longest
time between two chunks of the first stream; the wait is the time to the first chunk of the second.
What the layer that lets streams go on costs without a death, `layers.py --without continuing` says.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

import pairs
import sides
from sides import Server

DEATHS = 10
SENT_TOKENS = 64
"""A stream that has sent this many is cut."""
REST_TOKENS = 400
"""What it would still send: long enough for the kill to come first."""
PROMPT_TOKENS = (64, 4000)
QUICK_PROMPT_TOKENS = (64,)
TOKEN_IDS = range(20, 200)
ENDLESS_FLAGS = ("--max-engine-restarts=1000", "--restart-window=1")
"""Neither the budget of restarts nor its back-off is measured."""
DEADLINE_SECONDS = 1800.0
CONTINUED = "holdfast_requests_continued_total"


@dataclass
class Reading:
    """A stream that a thread reads."""

    times_seconds: list[float] = field(default_factory=list)
    """When each chunk came."""
    error: str = ""
    has_begun: threading.Event = field(default_factory=threading.Event)

    @property
    def pause_seconds(self) -> float:
        """The longest time between two chunks."""
        return max(later - sooner for sooner, later in pairwise(self.times_seconds))

    def read(self, http: httpx.Client, body: Mapping[str, Any]) -> None:
        """Read the stream to its end; what goes wrong is the error."""
        try:
            for at_seconds in chunk_times(http, body):
                self.times_seconds.append(at_seconds)
                if len(self.times_seconds) >= SENT_TOKENS:
                    self.has_begun.set()
        except (httpx.HTTPError, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.has_begun.set()


@dataclass(frozen=True, slots=True)
class Seam:
    """What two clients saw of one death."""

    pause_seconds: float
    wait_seconds: float


def chunk_times(http: httpx.Client, body: Mapping[str, Any]) -> Generator[float]:
    """Ask for a streamed completion, and yield the moment at which each chunk comes.

    Raises:
        ValueError: the server refuses it, or ends it with an error.
    """
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        if answer.is_error:
            raise ValueError(f"{answer.status_code}: {answer.read().decode()[:500]}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            if "error" in json.loads(line.removeprefix("data: ")):
                raise ValueError(line[:500])
            yield time.monotonic()


def a_body(model: str, *, prompt_tokens: int, max_tokens: int, seed: int) -> dict[str, Any]:
    """Return a request with a prompt that no other has."""
    prompt = Random(seed).choices(TOKEN_IDS, k=prompt_tokens)  # noqa: S311 - no secret
    limits = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"model": model, "prompt": prompt, **limits}


def seam(server: Server, prompt_tokens: int, seed: int) -> Seam:
    """Kill the engine in the middle of a stream, and measure both clients.

    Raises:
        SystemExit: the stream did not go on, or the fresh request got no answer.
    """
    deadline = httpx.Timeout(server.deadline_seconds)
    reading = Reading()
    with (
        httpx.Client(base_url=server.url, timeout=deadline, trust_env=False) as one,
        httpx.Client(base_url=server.url, timeout=deadline, trust_env=False) as other,
    ):
        model = other.get("/v1/models").json()["data"][0]["id"]
        before = _continued(other)
        long = a_body(
            model, prompt_tokens=prompt_tokens, max_tokens=SENT_TOKENS + REST_TOKENS, seed=seed
        )
        fresh = a_body(
            model, prompt_tokens=prompt_tokens + SENT_TOKENS, max_tokens=1, seed=seed + 1
        )
        core = server.core()
        thread = threading.Thread(target=reading.read, args=(one, long))
        thread.start()
        try:
            reading.has_begun.wait(server.deadline_seconds)
            core.kill()
            wait_seconds = _first_chunk_seconds(server, other, fresh)
        finally:
            thread.join()
        if reading.error or _continued(other) != before + 1:
            server.give_up(f"the stream did not go on: {reading.error or 'it ended too soon'}")
    server.until_ready()
    return Seam(reading.pause_seconds, wait_seconds)


def _first_chunk_seconds(server: Server, http: httpx.Client, body: Mapping[str, Any]) -> float:
    """Return the time to the first chunk, over all attempts if the first is told to come later."""
    began = time.monotonic()
    while True:
        try:
            with closing(chunk_times(http, body)) as times:
                return next(times) - began
        except ValueError as error:
            if time.monotonic() - began > server.deadline_seconds:
                server.give_up(f"no answer after the death of the engine: {error}")
            time.sleep(sides.POLL_SECONDS)


def _continued(http: httpx.Client) -> float:
    """Return how many streams have gone on so far."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    samples = (sample for family in families for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == CONTINUED)


def measures(found: Mapping[int, Sequence[Seam]]) -> Iterator[pairs.Measure]:
    """Yield a row for each length of the prompt."""
    for prompt_tokens, seams in found.items():
        values = {
            "pause of a stream": [one.pause_seconds for one in seams],
            "wait of a fresh request": [one.wait_seconds for one in seams],
        }
        yield pairs.Measure(f"prompt of {prompt_tokens:,} tokens, s", values, 2)


def _found(arguments: argparse.Namespace, directory: Path) -> dict[int, list[Seam]]:
    """Return the deaths that count: the first recovery, which fills caches, does not."""
    lengths = QUICK_PROMPT_TOKENS if arguments.quick else PROMPT_TOKENS
    found: dict[int, list[Seam]] = {length: [] for length in lengths}
    bench = sides.bench_of(arguments.serve, directory)
    flags = (*bench.flags, *ENDLESS_FLAGS)
    bench = replace(bench, flags=flags, deadline_seconds=DEADLINE_SECONDS)
    seeds = count(step=2)
    with bench.ready("holdfast") as server:
        seam(server, lengths[0], next(seeds))
        for number in range(1, arguments.pairs + 1):
            for length in lengths:
                pairs.say(f"seams: death {number} of {arguments.pairs}, prompt of {length} tokens")
                found[length].append(seam(server, length, next(seeds)))
    return found


def main() -> None:
    """Kill engines, and print what their clients saw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser, pairs=DEATHS)
    parser.add_argument(
        "serve", nargs="*", metavar="MODEL FLAG", help="after `--`; without, the demo model"
    )
    arguments = pairs.parsed(parser)
    sides.end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="holdfast-seams-") as directory:
        found = _found(arguments, Path(directory))
    name = "the demo model" if not arguments.serve else Path(arguments.serve[0]).name
    title = f"Streams of {name} cut after {SENT_TOKENS} tokens, {arguments.pairs} deaths each"
    pairs.show(pairs.Findings("seams", title, list(measures(found))), arguments)


if __name__ == "__main__":
    main()
