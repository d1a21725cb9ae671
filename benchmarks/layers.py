"""What do all layers between the listener and vLLM cost? Beside the same server without them.

    python benchmarks/layers.py             the demo model, forty pairs of bursts
    python benchmarks/layers.py --without continuing
                                            what it costs, while no engine dies, that streams go on
    python benchmarks/layers.py --json

Two servers are up, and take turns with the same load: 64 clients, streaming chats of 64 tokens in
and 64 out. The line that is logged of each request is one of the layers.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import bursts
import pairs
import sides
from bursts import Row
from clients import BenchClient


@dataclass(frozen=True, slots=True)
class Other:
    """The second side of a pair, and what the first may cost."""

    title: str
    side: str
    output_goal: str


CLIENTS = 64
REQUESTS = 192
QUICK_REQUESTS = 64
BURSTS = 40
WITHOUT = {
    "layers": Other("All layers", sides.UNLAYERED_SIDE, ">= 0.98"),
    "continuing": Other("Streams that can go on", sides.ENDING_SIDE, ">= 0.99"),
}
ROWS = (
    Row("median TTFT, ms", CLIENTS, "median_ttft_ms"),
    Row("p99 TTFT, ms", CLIENTS, "p99_ttft_ms"),
    Row("CPU of the front end, µs a token", CLIENTS, "front_end_us_per_token"),
    Row("CPU of the whole server, µs a token", CLIENTS, "server_us_per_token"),
)


def main() -> None:
    """Run the pairs and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser, pairs=BURSTS)
    parser.add_argument(
        "--without", choices=WITHOUT, default="layers", help="what the other server lacks (layers)"
    )
    arguments = pairs.parsed(parser)
    sides.end_on_sigterm()
    other = WITHOUT[arguments.without]
    asked = ("holdfast", other.side)
    loads = {CLIENTS: QUICK_REQUESTS if arguments.quick else REQUESTS}
    with tempfile.TemporaryDirectory(prefix="holdfast-layers-") as directory:
        bench = replace(sides.bench_of((), Path(directory)), has_access_log=True)
        with BenchClient(bench.model) as client:
            found = bursts.found(bench, client, loads, arguments.pairs, asked)
    output = Row("output tok/s", CLIENTS, "output_throughput", 0, other.output_goal)
    measures = [row.measure(found, asked) for row in (output, *ROWS)]
    title = f"{other.title}, {len(found)} pairs of bursts"
    pairs.show(pairs.Findings("layers", title, measures), arguments)


if __name__ == "__main__":
    main()
