"""Does the front end's memory stay? After many requests, and while many wait at the gate.

    python benchmarks/memory.py                   20,000 requests to each side, 1 to 10,000 held
    python benchmarks/memory.py --held            only what is held, which starts no engine

Requests are held as during a recovery: the gate of Holdfast, its listener and real connections,
with nothing behind them.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

import pairs
import sides
from clients import BenchClient
from holdfast.api.admission import Admission
from holdfast.api.gate import Gate
from holdfast.api.router import OwnRoutes
from holdfast.lifecycle.states import State
from holdfast.lifecycle.supervisor import Supervisor
from holdfast.listener.server import bound_socket, listening
from holdfast.settings import LimitSettings, ListenSettings, OverloadSettings
from holdfast.telemetry.counters import Refusals
from holdfast.workspace.plan import MIB
from plots import Curve
from sides import Bench

REQUESTS = 20_000
WARM_REQUESTS = 1_000
"""Before the first number: pools, caches and heaps have their size by then."""
CLIENTS = 64
HELD = (1, 10, 100, 1_000, 10_000)
BODY_BYTES = 1_000
HOLD_SECONDS = 600.0
CONNECT_SECONDS = 60.0
FILES_BESIDE = 100


def grown(bench: Bench, side: str, client: BenchClient, requests: int) -> dict[str, float]:
    """Resident memory of the front end before, in the middle of and after the requests."""
    with bench.ready(side) as server:
        found = {"ready": server.resident_mib()}
        parts = {"warm": WARM_REQUESTS, "half": requests // 2, "all": requests // 2}
        for seed, (name, count) in enumerate(parts.items(), 1):
            client.run(
                server.url,
                clients=CLIENTS,
                requests=count,
                seed=seed,
                input_tokens=16,
                output_tokens=1,
            )
            found[name] = server.resident_mib()
        return found


def held_mib(counts: Sequence[int]) -> list[float]:
    """Return the resident memory of a front end that holds this many requests, one a connection."""
    _allow_files(max(counts) + FILES_BESIDE)
    process = subprocess.Popen(
        [sys.executable, __file__, "--hold"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin  # noqa: S101 - it was asked for
    assert process.stdout  # noqa: S101 - as above
    try:
        port, empty_mib = process.stdout.readline().split()
        pairs.say(f"memory: an empty front end has {float(empty_mib):.1f} MiB")
        found = []
        with ExitStack() as connections:
            sent = 0
            for count in counts:
                for _ in range(count - sent):
                    connections.enter_context(_request(int(port)))
                sent = count
                process.stdin.write(f"{count}\n")
                process.stdin.flush()
                found.append(float(process.stdout.readline()) - float(empty_mib))
        return found
    finally:
        process.kill()
        process.wait(sides.KILL_SECONDS)


def _request(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=CONNECT_SECONDS)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {BODY_BYTES}\r\n\r\n"
    )
    connection.sendall(head.encode() + b" " * BODY_BYTES)
    return connection


def _allow_files(count: int) -> None:
    """Let this process and its children open this many files.

    Raises:
        SystemExit: the hard limit is lower.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        sys.exit(f"error: {count} open files are needed, and {hard} are allowed; raise ulimit -Hn.")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


class _Recovering(Supervisor):
    """A server that always expects to be ready in time."""

    state = State.RECOVERING
    reason = "a benchmark"
    eta_seconds = 1.0
    is_recovering = True

    def __init__(self) -> None:
        """Supervise nothing."""

    async def until_moved(self) -> None:
        await asyncio.Event().wait()


async def _hold() -> None:
    """The process of `held_mib`: hold what comes, and say how much memory that takes."""
    refusals = Refusals()
    admission = Admission(
        _Recovering(),
        probe_token="",
        refusals=refusals,
        hold_timeout_seconds=HOLD_SECONDS,
        overload=OverloadSettings(max_waiting=max(HELD)),
    )
    settings = ListenSettings(host="127.0.0.1", port=0, has_access_log=False)
    front = OwnRoutes((), Gate(_nothing, admission))
    with bound_socket(settings) as sock:
        async with listening(front, sock, settings, limits=LimitSettings(), refusals=refusals):
            print(sock.getsockname()[1], _resident_mib(), flush=True)
            while count := int(await asyncio.to_thread(sys.stdin.readline) or 0):
                while admission.held < count:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(sides.POLL_SECONDS)
                print(_resident_mib(), flush=True)


async def _nothing(*_: object) -> None:
    raise RuntimeError("nothing is let in")


def _resident_mib() -> float:
    return float(psutil.Process().memory_info().rss / MIB)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser, pairs=1)
    parser.add_argument("--held", action="store_true", help="only what is held")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    return pairs.parsed(parser)


def _grown(arguments: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """Every pair, and what each side had."""
    requests = WARM_REQUESTS if arguments.quick else REQUESTS
    found = []
    with tempfile.TemporaryDirectory(prefix="holdfast-memory-") as directory:
        bench = sides.bench_of((), Path(directory))
        with BenchClient(bench.model) as client:
            for number in range(1, arguments.pairs + 1):
                pairs.say(f"memory: pair {number} of {arguments.pairs}")
                order = pairs.ordered(number)
                of = {side: grown(bench, side, client, requests) for side in order}
                found.append({side: of[side] for side in pairs.SIDES})
    return found


def measures(found: Sequence[dict[str, dict[str, float]]]) -> list[pairs.Measure]:
    """The rows of the requests."""
    rows = {
        "ready": "front end at READY, MiB",
        "warm": f"after {WARM_REQUESTS:,} requests, MiB",
        "half": f"after {REQUESTS // 2:,} more, MiB",
        "all": f"after {REQUESTS:,} more, MiB",
    }
    measured = [
        pairs.Measure(
            label,
            {side: [pair[side][name] for pair in found] for side in pairs.SIDES},
            1,
            "<= 1.10",
        )
        for name, label in rows.items()
    ]
    growth = {
        side: [pair[side]["all"] - pair[side]["half"] for pair in found] for side in pairs.SIDES
    }
    label = f"growth in the last {REQUESTS // 2:,}, MiB"
    return [*measured, pairs.Measure(label, growth, 2, "itself < 1")]


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    if arguments.hold:
        asyncio.run(_hold())
        return
    sides.end_on_sigterm()
    counts = HELD[:4] if arguments.quick else HELD
    held = held_mib(counts)
    rows = [] if arguments.held else measures(_grown(arguments))
    held_rows = [
        pairs.Measure(f"{count:,} held requests, MiB", {"holdfast": [mib]}, 1)
        for count, mib in zip(counts, held, strict=True)
    ]
    title = f"Memory of the front end, requests of {BODY_BYTES:,} bytes held"
    curve = Curve(
        "held", "Memory against held requests", "held requests", "MiB", counts, {"holdfast": held}
    )
    findings = pairs.Findings("memory", title, [*rows, *held_rows], curves=[curve])
    pairs.show(findings, arguments)


if __name__ == "__main__":
    main()
