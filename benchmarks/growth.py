"""How does it grow? Load against clients, scrapes against ranks, plans against layers.

    python benchmarks/growth.py

Clients: one start of each side, 1 to 512 clients. Ranks: `/metrics` is rendered from the files of 1
to 64 ranks, written here. Layers: `holdfast plan` of the demo model with ever more layers, as a
command. What memory does with held requests is in `memory.py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pairs
import sides
from clients import BenchClient
from holdfast import __version__
from holdfast.labels import MEMORY_KINDS
from holdfast.lifecycle.states import State
from holdfast.records import EngineReport, SlotStats, Status
from holdfast.telemetry.collector import HoldfastCollector, OwnRegistry, RequestCounts
from holdfast.telemetry.counters import Counters, request_waits
from holdfast.telemetry.exposition import render
from holdfast.versions import vllm_version
from holdfast.workspace.plan import MIB
from holdfast.workspace.stats import StatsWriter, read_all
from plots import Curve

CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REQUESTS_PER_CLIENT = 2
LEAST_REQUESTS = 8
RANKS = (1, 2, 4, 8, 16, 32, 64)
SLOTS = 4
CALLERS = 8
RENDERS = 15
LAYERS = (2, 8, 32, 128)


def by_clients(counts: Sequence[int], directory: Path) -> list[Curve]:
    """Throughput and p99 time to the first token."""
    bench = sides.bench_of((), directory)
    throughput: dict[str, list[float]] = {}
    first_token: dict[str, list[float]] = {}
    with BenchClient(bench.model) as client:
        for side in pairs.SIDES:
            pairs.say(f"growth: {side}, up to {counts[-1]} clients")
            with bench.ready(side) as server:
                client.run(server.url, clients=16, requests=32, seed=0)
                results = [
                    client.run(
                        server.url,
                        clients=count,
                        requests=max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * count),
                        seed=count,
                    )
                    for count in counts
                ]
            throughput[side] = [float(result["output_throughput"]) for result in results]
            first_token[side] = [float(result["p99_ttft_ms"]) for result in results]
    return [
        Curve("throughput", "Output against clients", "clients", "tok/s", counts, throughput),
        Curve("ttft", "p99 time to first token", "clients", "ms", counts, first_token),
    ]


def by_ranks(counts: Sequence[int]) -> Curve:
    """Time to render our part of `/metrics`, the files of the ranks read each time."""
    found = []
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="holdfast-ranks-") as directory:
            for rank in range(count):
                _write_rank(Path(directory), rank)
            found.append(median(_render_seconds(Path(directory)) for _ in range(RENDERS)) * 1e3)
    lines = {"holdfast": found}
    return Curve("ranks", "Our part of a scrape against ranks", "ranks", "ms", counts, lines)


def _write_rank(directory: Path, rank: int) -> None:
    with StatsWriter(directory, engine=0, rank=rank, generation=1) as stats:
        stats.update(
            lambda report: replace(
                report,
                slots=tuple(
                    SlotStats(*divmod(slot, 2), 24 * MIB, 24 * MIB, 20 * MIB, "layer.py:10:prefill")
                    for slot in range(SLOTS)
                ),
                callers={f"layer_{n}.py:10:forward": (n + 1) * MIB for n in range(CALLERS)},
                memory=dict.fromkeys(MEMORY_KINDS, 100 * MIB),
            )
        )
        stats.step_started()
        stats.step_ended(scheduled_tokens=64, requests=1)


def _render_seconds(directory: Path) -> float:
    def status() -> Status:
        return Status(
            state=State.READY,
            reason="",
            since_unix_seconds=0.0,
            eta_seconds=None,
            has_been_ready=True,
            engine=EngineReport(),
            probe=None,
            ranks=read_all(directory, reads_steps=False),
            start_phases={},
            has_engine=True,
        )

    collector = HoldfastCollector(
        status,
        counters=Counters(),
        requests=RequestCounts,
        waits=request_waits(),
        restarts_left=lambda: 3,
        loop_lag_seconds=lambda: 0.0,
        host_memory=lambda: None,
        version=__version__,
        vllm_version=vllm_version(),
    )
    registry = OwnRegistry(collector)
    began = time.perf_counter()
    render((registry,))
    return time.perf_counter() - began


def by_layers(counts: Sequence[int], directory: Path) -> Curve:
    """Time of `holdfast plan`, with the imports that every command pays."""
    model = Path(sides.bench_of((), directory).model)
    found = []
    for count in counts:
        larger = directory / f"layers-{count}"
        shutil.copytree(model, larger)
        config = json.loads((larger / "config.json").read_text())
        (larger / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
        command = (sys.executable, "-m", "holdfast", "plan", str(larger), *sides.DEMO_FLAGS)
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found.append(time.perf_counter() - began)
        pairs.say(f"growth: a plan of {count} layers took {found[-1]:.1f} s")
    lines = {"holdfast": found}
    return Curve("plan", "Time of `holdfast plan` against layers", "layers", "s", counts, lines)


def measures(curves: Sequence[Curve]) -> list[pairs.Measure]:
    """A row for each place of each curve."""
    return [
        pairs.Measure(
            f"{curve.title}, {curve.x_label}: {x:,g}, {curve.y_label}",
            {side: [ys[place]] for side, ys in curve.lines.items()},
        )
        for curve in curves
        for place, x in enumerate(curve.xs)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser, pairs=1)
    parser.add_argument("--engineless", action="store_true", help="only what starts no engine")
    arguments = pairs.parsed(parser)
    sides.end_on_sigterm()
    curves = [by_ranks(RANKS)]
    with tempfile.TemporaryDirectory(prefix="holdfast-growth-") as directory:
        curves.append(by_layers(LAYERS[:1] if arguments.quick else LAYERS, Path(directory)))
    if not arguments.engineless:
        with tempfile.TemporaryDirectory(prefix="holdfast-growth-") as directory:
            curves += by_clients(CLIENTS[:5] if arguments.quick else CLIENTS, Path(directory))
    title = "Growth, one start of each side"
    pairs.show(pairs.Findings("growth", title, measures(curves), curves=curves), arguments)


if __name__ == "__main__":
    main()
