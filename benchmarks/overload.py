"""What becomes of throughput and latency at three times the load that the server can take?

    python benchmarks/overload.py                         the demo model, 25 rounds
    python benchmarks/overload.py --output-tokens 128 256      longer answers
    python benchmarks/overload.py --pairs 5 --json -- MODEL --max-model-len 4096

One server, two loads that take turns. Peak load is a closed loop with as many clients as the
server admits, in the engine and in line. Overload is an open loop at three times the rate that peak
load reached: requests come when they come, and a client that gets 429 does not ask again. All else
but an answer or a 429 is lost.
"""

from __future__ import annotations

import argparse
import json
import random
import selectors
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count, cycle, takewhile
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import pairs
import sides
from holdfast.engine.requests.sequence_queue import LEAST_SPARE, SPARE_SHARE
from pairs import Measure

LOAD_FACTOR = 3.0
RUNNING = 16
"""`--max-num-seqs` of the server."""
PLACES = RUNNING + max(LEAST_SPARE, RUNNING // SPARE_SHARE)
WAITING = PLACES // 2
"""`--max-waiting` of the server."""
PAIRS = 25
SECONDS = 6.0
"""Of each load: the machine changes its pace within a minute, so that turns are short."""
WARM_UP_SECONDS = 1.0
"""At the start of each load, not counted."""
FIRST_SECONDS = 10.0
"""Of a peak load before all others, which tells the rate to begin with."""
PROMPT_TOKENS = 32
OUTPUT_TOKENS = (32, 64)
"""At least and at most; drawn for each request. Were all as long, those of a closed loop would
begin and end together, their prefills in one step: a load that no open loop brings about, and a
fifth faster.
"""
REQUESTS = 20_000
"""This many prompts take turns, so no cache still has the first when it comes again."""
ANSWER_SECONDS = 120.0
IDLE_SECONDS = 1.0
TICK_SECONDS = 0.005
OVERLOAD, PEAK = SIDES = "overload", "peak load"

Round = dict[str, "Phase"]


@dataclass(slots=True)
class Phase:
    """What one load met, its first seconds left out."""

    seconds: float
    latencies_seconds: list[float] = field(default_factory=list)
    client_cpu_seconds: float = 0.0
    """What asking took, of the cores that answer too."""
    codes: Counter[str] = field(default_factory=Counter)
    """Answers by status code, or by the name of the error for what was lost."""

    @property
    def per_second(self) -> float:
        """Requests answered a second."""
        return len(self.latencies_seconds) / self.seconds

    @property
    def lost(self) -> int:
        """Requests that got neither an answer nor a 429."""
        return self.codes.total() - self.codes["200"] - self.codes["429"]

    def percentile(self, share: float) -> float:
        """The latency that `share` of the answers did not exceed."""
        ordered = sorted(self.latencies_seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def refused_share(self) -> float:
        """Of all that was told anything."""
        return self.codes["429"] / max(1, self.codes.total())


class Connection:
    """One that stays open, and at most one request on it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, ANSWER_SECONDS)
        self.socket.setblocking(False)
        self.since_seconds = 0.0
        """When its last request was sent, or its last answer had come."""
        self.stays = True
        self._received = b""

    def ask(self, request: bytes) -> None:
        """Send a request that the socket's buffer has room for."""
        self._received = b""
        self.since_seconds = time.monotonic()
        self.socket.sendall(request)

    def code(self) -> str | None:
        """The status code, once the answer is whole.

        Raises:
            OSError: the connection broke before that.
        """
        received = self.socket.recv(1 << 16)
        if not received:
            raise ConnectionResetError
        self._received += received
        head, end_of_head, body = self._received.partition(b"\r\n\r\n")
        fields = head.lower()
        length = fields.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if not end_of_head or len(body) < int(length):
            return None
        self.stays = b"connection: close" not in fields
        return head[9:12].decode()


class Load:
    """Asks one server, as cheaply as Python can: it shares the CPU with what answers.

    Most of what a request costs a client is to be woken. This one wakes at its own pace, sends all
    that is due by then and reads all that has come.
    """

    def __init__(self, url: str, model: str, output_tokens: Sequence[int]) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)
        self._model = model
        self._output_tokens = output_tokens
        self._random = random.Random(1)  # noqa: S311 - prompts, not secrets
        # Made beforehand, for the same reason.
        self._requests = cycle([self._request() for _ in range(REQUESTS)])
        self._free: list[Connection] = []
        self._asked = selectors.EpollSelector()

    def closed(self, clients: int, seconds: float) -> Phase:
        """Run this many clients, each of which asks again when it has its answer."""
        return self._phase(seconds, lambda _: clients - self._in_flight)

    def open(self, per_second: float, seconds: float) -> Phase:
        """Send this many requests a second, whatever becomes of them."""
        arrivals = accumulate(self._random.expovariate(per_second) for _ in count())
        due = list(takewhile(lambda arrival: arrival < seconds + WARM_UP_SECONDS, arrivals))
        return self._phase(seconds, partial(_pop_arrived, due[::-1]))

    def _phase(self, seconds: float, due: Callable[[float], int]) -> Phase:
        """Ask as often as `due` says, given the seconds since the beginning, to the last answer."""
        phase, began = Phase(seconds), time.monotonic()
        end, processor_seconds = began + WARM_UP_SECONDS + seconds, time.process_time()
        while self._in_flight or time.monotonic() < end:
            now = time.monotonic()
            if now < end:
                for _ in range(due(now - began)):
                    self._ask(phase)
            elif now > end + ANSWER_SECONDS:
                sys.exit(f"error: {self._in_flight} requests had no answer in {ANSWER_SECONDS} s.")
            self._read(phase, end - seconds, end)
            time.sleep(TICK_SECONDS)
        phase.client_cpu_seconds = time.process_time() - processor_seconds
        return phase

    @property
    def _in_flight(self) -> int:
        return len(self._asked.get_map())

    def _ask(self, phase: Phase) -> None:
        try:
            connection = self._connected()
            connection.ask(next(self._requests))
        except OSError as error:
            phase.codes[type(error).__name__] += 1
        else:
            self._asked.register(connection.socket, selectors.EVENT_READ, connection)

    def _read(self, phase: Phase, count_from: float, count_to: float) -> None:
        """Note what has come, if it came in the time that counts; what is lost always counts."""
        for key, _ in self._asked.select(0):
            connection: Connection = key.data
            try:
                code = connection.code()
            except OSError as error:
                code, connection.stays = type(error).__name__, False
            if code is None:
                continue
            self._asked.unregister(connection.socket)
            now = time.monotonic()
            if code not in {"200", "429"} or count_from <= now <= count_to:
                phase.codes[code] += 1
            if code == "200" and count_from <= now <= count_to:
                phase.latencies_seconds.append(now - connection.since_seconds)
            connection.since_seconds = now
            if connection.stays:
                self._free.append(connection)
            else:
                connection.socket.close()

    def _connected(self) -> Connection:
        """A connection that the server is not about to close, as it does with idle ones."""
        while self._free:
            connection = self._free.pop()
            if time.monotonic() - connection.since_seconds < IDLE_SECONDS:
                return connection
            connection.socket.close()
        return Connection(self._address)

    def _request(self) -> bytes:
        prompt = [self._random.randrange(5, 200) for _ in range(PROMPT_TOKENS)]
        output_tokens = self._random.randint(*self._output_tokens)
        wish = {"model": self._model, "prompt": prompt, "max_tokens": output_tokens}
        body = json.dumps({**wish, "ignore_eos": True, "temperature": 0}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: benchmark\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def _pop_arrived(arrivals: list[float], elapsed_seconds: float) -> int:
    """Take from the end all that are not later, and tell how many."""
    before = len(arrivals)
    while arrivals and arrivals[-1] <= elapsed_seconds:
        arrivals.pop()
    return before - len(arrivals)


def rounds(load: Load, number: int) -> list[Round]:
    """Measure each load in turn; the side that goes first alternates."""
    peaks = [load.closed(PLACES + WAITING, FIRST_SECONDS).per_second]
    found = []
    for turn in range(1, number + 1):
        phases = {}
        for side in pairs.ordered(turn, SIDES):
            if side == PEAK:
                phases[side] = load.closed(PLACES + WAITING, SECONDS)
                peaks.append(phases[side].per_second)
            else:
                phases[side] = load.open(LOAD_FACTOR * median(peaks), SECONDS)
        found.append(phases)
        rates = ", ".join(f"{side} {phases[side].per_second:.0f}/s" for side in SIDES)
        pairs.say(f"round {turn} of {number}: {rates}")
    return found


def measures(found: Sequence[Round]) -> list[Measure]:
    """The rows of the table."""

    def row(label: str, value: Callable[[Phase], float], digits: int, goal: str = "") -> Measure:
        values = {side: [value(phases[side]) for phases in found] for side in SIDES}
        return Measure(label, values, digits, goal)

    return [
        row("answered a second", lambda phase: phase.per_second, 1, ">= 0.95"),
        row("latency, median, s", lambda phase: phase.percentile(0.5), 2),
        row("latency, p99, s", lambda phase: phase.percentile(0.99), 2, "<= 2.00"),
        row("share of 429", lambda phase: phase.refused_share, 2),
        row("lost", lambda phase: phase.lost, 0),
        row("CPU of the client, s", lambda phase: phase.client_cpu_seconds, 2),
    ]


def main() -> None:
    """Run the rounds and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser, pairs=PAIRS)
    parser.add_argument(
        "--output-tokens", nargs=2, type=int, default=OUTPUT_TOKENS, metavar=("LEAST", "MOST")
    )
    parser.add_argument(
        "serve", nargs="*", metavar="MODEL FLAG", help="after `--`; without, the demo model"
    )
    arguments = pairs.parsed(parser)
    sides.end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="holdfast-overload-") as directory:
        bench = sides.bench_of(arguments.serve, Path(directory))
        flags = (*bench.flags, f"--max-num-seqs={RUNNING}", f"--max-waiting={WAITING}")
        bench = replace(bench, flags=flags, has_access_log=True)
        with bench.ready("holdfast") as server:
            found = rounds(Load(server.url, bench.model, arguments.output_tokens), arguments.pairs)
    title = (
        f"{LOAD_FACTOR:.0f} times the peak rate, {PLACES} places and {WAITING} in line, "
        "answers of {} to {} tokens, ".format(*arguments.output_tokens)
        + f"{len(found)} rounds"
    )
    pairs.show(pairs.Findings("overload", title, measures(found)), arguments)


if __name__ == "__main__":
    main()
