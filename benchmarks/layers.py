"""What do all layers between the listener and vLLM cost? Beside the same server without them.

    python benchmarks/layers.py             the demo model, five pairs
    python benchmarks/layers.py --json

Two servers are up, and take turns with the same load: 64 clients, streaming chats of 64 tokens in
and 64 out.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pairs
import sides
from clients import BenchClient, Result

CLIENTS = 64
REQUESTS = 640
QUICK_REQUESTS = 64
SIDES = ("holdfast", sides.UNLAYERED_SIDE)


def _found(arguments: argparse.Namespace, bench: sides.Bench) -> list[dict[str, Result]]:
    requests = QUICK_REQUESTS if arguments.quick else REQUESTS
    found = []
    with (
        bench.ready(SIDES[0]) as first,
        bench.ready(SIDES[1]) as second,
        BenchClient(bench.model) as client,
    ):
        servers = {server.side: server for server in (first, second)}
        # The first pair fills caches, and is not counted.
        for number in range(arguments.pairs + 1):
            pairs.say(f"layers: pair {number} of {arguments.pairs}")
            results = {
                side: client.run(
                    servers[side].url, clients=CLIENTS, requests=requests, seed=10 + number
                )
                for side in pairs.ordered(number, SIDES)
            }
            found.append({side: results[side] for side in SIDES})
    return found[1:]


def main() -> None:
    """Run the pairs and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser)
    arguments = pairs.parsed(parser)
    sides.end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="holdfast-layers-") as directory:
        found = _found(arguments, sides.bench_of((), Path(directory)))
    rows = (
        ("output tokens a second", "output_throughput", 0, ">= 0.98"),
        ("median TTFT, ms", "median_ttft_ms", 0, ""),
        ("p99 TTFT, ms", "p99_ttft_ms", 0, ""),
    )
    measures = [
        pairs.Measure(
            label, {side: [pair[side][key] for pair in found] for side in SIDES}, digits, goal
        )
        for label, key, digits, goal in rows
    ]
    title = f"All layers at {CLIENTS} clients, {len(found)} pairs"
    pairs.show(pairs.Findings("layers", title, measures), arguments)


if __name__ == "__main__":
    main()
