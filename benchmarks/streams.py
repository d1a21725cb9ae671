"""How much does it answer, and how soon? Streaming chats at 1, 16 and 64 clients.

    python benchmarks/streams.py               the demo model, twenty pairs of bursts
    python benchmarks/streams.py --plugin      also `vllm serve` with our plugin alone
    python benchmarks/streams.py --json -- MODEL --gpu-memory-utilization 0.4 --max-model-len 4096

Holdfast and `vllm serve` are up side by side and take turns with the same bursts of `vllm bench
serve`: 64 tokens in and 64 out. On a GPU each server gets a part of its memory, or the second
would not start.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import bursts
import pairs
import sides
from bursts import Row
from clients import BenchClient

LOADS = {1: 8, 16: 64, 64: 128}
"""Requests of a burst by clients."""
QUICK_LOADS = {1: 2, 16: 16, 64: 64}
BURSTS = 20
MAX_CLIENTS = max(LOADS)


ROWS = (
    *(Row("output tok/s", clients, "output_throughput", 0, ">= 1.00") for clients in LOADS),
    *(
        Row(f"{name} TTFT, ms", clients, f"{name}_ttft_ms", 1, "<= 1.00")
        for name in ("median", "p99")
        for clients in (16, MAX_CLIENTS)
    ),
    Row("median inter-token latency, ms", MAX_CLIENTS, "median_itl_ms"),
    Row("CPU of the front end, µs a token", MAX_CLIENTS, "front_end_us_per_token"),
    Row("CPU of the whole server, µs a token", MAX_CLIENTS, "server_us_per_token"),
)


def main() -> None:
    """Run the pairs and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser, pairs=BURSTS)
    parser.add_argument(
        "--plugin", action="store_true", help="add a side: `vllm serve` with Holdfast's plugin"
    )
    parser.add_argument(
        "serve", nargs="*", metavar="MODEL FLAG", help="after `--`; without, the demo model"
    )
    arguments = pairs.parsed(parser)
    sides.end_on_sigterm()
    asked = (*pairs.SIDES, sides.PLUGIN_SIDE) if arguments.plugin else pairs.SIDES
    with tempfile.TemporaryDirectory(prefix="holdfast-streams-") as directory:
        bench = sides.bench_of(arguments.serve, Path(directory))
        loads = QUICK_LOADS if arguments.quick else LOADS
        with BenchClient(bench.model) as client:
            found = bursts.found(bench, client, loads, arguments.pairs, asked)
    name = "the demo model" if not arguments.serve else Path(bench.model).name
    measures = [row.measure(found, asked) for row in ROWS]
    title = (
        f"Streaming chats of {name}, {len(found)} pairs of bursts, flags {' '.join(bench.flags)}"
    )
    pairs.show(pairs.Findings("streams", title, measures), arguments)


if __name__ == "__main__":
    main()
