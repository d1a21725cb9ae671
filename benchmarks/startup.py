"""How long do a start and a recovery take, and how much memory? Beside `vllm serve`.

    python benchmarks/startup.py                         the demo model, five pairs
    python benchmarks/startup.py --pairs 3 --json -- MODEL --max-model-len 4096

Both servers get the same model and flags. They run one after the other, in alternating order. The
first pair fills the caches of compiled kernels and Holdfast's learned state, and is not counted.
Every process is ended before the next one starts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pairs
import sides
from holdfast.telemetry.progress import PHASE_LABELS
from sides import Bench, Server

MEASURES = {
    "listening_seconds": ("listening, s", 2, ""),
    "ready_seconds": ("ready, s", 1, "<= 0.75"),
    "unproven_seconds": ("ready without the probe, s", 1, ""),
    "recovery_seconds": ("engine death to the next answer, s", 1, "<= 0.50"),
    "peak_memory_mib": ("peak memory of the front end, MiB", 0, "<= 1.10"),
}


@dataclass(frozen=True, slots=True)
class Start:
    """One start, measured from outside.

    The recovery of `vllm serve` is the start of another: it ends with its engine.
    """

    listening_seconds: float
    ready_seconds: float
    peak_memory_mib: float
    recovery_seconds: float
    phases_seconds: Mapping[str, float] = field(default_factory=dict)
    """As Holdfast reports them; what no phase covers is `other`."""

    @property
    def unproven_seconds(self) -> float:
        """What the start took beside the probe, which `vllm serve` has not."""
        return self.ready_seconds - self.phases_seconds.get("probe", 0.0)


Pair = dict[str, Start]


def measured(bench: Bench, side: str) -> Start:
    """Start one server, measure it until it is ready, and end it."""
    with bench.started(side) as server:
        return recovered(server, until_ready(server))


def until_ready(server: Server) -> Start:
    """Measure a server that was just started, until it is ready; its recovery is not known yet."""
    listening, ready = server.until_listening(), server.until_ready()
    is_ours = server.side == "holdfast"
    return Start(
        listening,
        ready,
        server.peak_resident_mib(),
        ready,
        _phases(server, ready) if is_ours else {},
    )


def recovered(server: Server, start: Start) -> Start:
    """The same with the time that a recovery takes; after it the engine is another one."""
    if server.side != "holdfast":
        return start
    return replace(start, recovery_seconds=_recovery_seconds(server))


def _phases(server: Server, ready_seconds: float) -> dict[str, float]:
    with server.client() as client:
        told = client.get("/statusz").json()["start"]["phases_s"]
    phases = {str(name): float(seconds) for name, seconds in told.items()}
    return {**phases, "other": ready_seconds - sum(phases.values())}


def _recovery_seconds(server: Server) -> float:
    """From the end of EngineCore to the answer of a request that was sent at that moment."""
    limit_seconds = server.deadline_seconds
    with server.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "hold", "max_tokens": 1}
        server.core().kill()
        began = time.monotonic()
        # The first may be told to come back later; a client does.
        while client.post("/v1/completions", json=body, timeout=limit_seconds).is_error:
            if time.monotonic() - began > limit_seconds:
                server.give_up(f"no answer {limit_seconds:.0f} s after the death of the engine")
            time.sleep(sides.POLL_SECONDS)
    return time.monotonic() - began


def measures(found: Sequence[Pair]) -> Iterator[pairs.Measure]:
    """The rows of both sides, then the phases of Holdfast."""
    for name, (label, digits, goal) in MEASURES.items():
        values = {side: [getattr(pair[side], name) for pair in found] for side in found[0]}
        yield pairs.Measure(label, values, digits, goal)
    ours = [pair["holdfast"].phases_seconds for pair in found]
    for phase in ours[0]:
        values = {"holdfast": [phases.get(phase, 0.0) for phases in ours]}
        yield pairs.Measure(f"phase: {PHASE_LABELS.get(phase, phase)}, s", values)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Start-up of Holdfast beside `vllm serve`: same model, same flags, same run."
    )
    pairs.add_options(parser)
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="SECONDS", help="for one start (600)"
    )
    parser.add_argument(
        "serve", nargs="*", metavar="MODEL FLAG", help="after `--`; without, the demo model"
    )
    return pairs.parsed(parser)


def _run(arguments: argparse.Namespace, directory: Path) -> list[Pair]:
    """The pairs that count; what is going on is told on standard error."""
    bench = replace(sides.bench_of(arguments.serve, directory), deadline_seconds=arguments.timeout)
    found = []
    for number in range(arguments.pairs + 1):
        nth = f"pair {number} of {arguments.pairs}" if number else "warm-up pair, not counted"
        pairs.say(f"startup: {nth}")
        starts = {side: measured(bench, side) for side in pairs.ordered(number)}
        found.append({side: starts[side] for side in pairs.SIDES})
    return found[1:]


def main() -> None:
    """Run the pairs and print what they took."""
    arguments = _arguments()
    sides.end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="holdfast-startup-") as directory:
        found = _run(arguments, Path(directory))
    model = Path(arguments.serve[0]).name if arguments.serve else "the demo model"
    findings = pairs.Findings(
        "startup",
        f"Start-up and recovery of {model}, {len(found)} pairs",
        list(measures(found)),
        {"pairs": [{side: asdict(start) for side, start in pair.items()} for pair in found]},
    )
    pairs.show(findings, arguments)


if __name__ == "__main__":
    main()
