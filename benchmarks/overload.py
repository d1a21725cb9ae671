"""What becomes of throughput and latency at three times the load that the server can take?

    python benchmarks/overload.py                         the demo model, 25 rounds
    python benchmarks/overload.py --pairs 5 --json -- MODEL --max-model-len 4096

One server, three loads that take turns. Peak load is a closed loop with as many clients as the
server admits, in the engine and in line. Overload is an open loop at three times the rate that peak
load reached: requests come when they come, and whoever gets 429 does not ask again. All else but an
answer or a 429 is lost.

Who asks three times as much takes more of the cores that serve. The third load tells how much that
is: peak load, while the same client asks another server for the rest, which refuses all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import uvloop

import pairs
import sides
from holdfast.api.line import LEAST_SPARE, SPARE_SHARE
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
OUTPUT_TOKENS = range(32, 65)
"""Drawn for each request. Were all as long, those of a closed loop would begin and end together,
their prefills in one step: a load that no open loop brings about, and a fifth faster.
"""
REQUESTS = 20_000
"""So many prompts are asked in turn, of which no cache remembers the first when it comes again."""
ANSWER_SECONDS = 120.0
IDLE_SECONDS = 1.0
OVERLOAD, PEAK, ELSEWHERE = "overload", "peak load", "refused elsewhere"
SIDES = (OVERLOAD, PEAK, ELSEWHERE)
REFUSER = ("-m", "uvicorn", "--interface=asgi3", "--log-level=error", "refuser:refuse")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
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


class Load:
    """Asks one server over connections that stay open, as cheaply as Python can."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)
        self._model = model
        self._random = random.Random(1)  # noqa: S311 - prompts, not secrets
        # Made beforehand: what asks shares the CPU with what answers.
        self._requests = cycle([self._request() for _ in range(REQUESTS)])
        self._free: list[tuple[float, Connection]] = []

    async def closed(self, clients: int, seconds: float) -> Phase:
        """So many clients, each of which asks again when it has its answer."""
        phase, began = Phase(seconds), time.monotonic()
        end = began + WARM_UP_SECONDS + seconds

        async def ask_on() -> None:
            while time.monotonic() < end:
                await self._ask(phase, began + WARM_UP_SECONDS, end)

        await asyncio.gather(*(ask_on() for _ in range(clients)))
        return phase

    async def open(self, per_second: float, seconds: float) -> Phase:
        """So many requests a second, whatever becomes of them."""
        phase, began = Phase(seconds), time.monotonic()
        end, due = began + WARM_UP_SECONDS + seconds, began
        async with asyncio.TaskGroup() as asking:
            while (due := due + self._random.expovariate(per_second)) < end:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                asking.create_task(self._ask(phase, began + WARM_UP_SECONDS, end))
        return phase

    async def _ask(self, phase: Phase, count_from: float, count_to: float) -> None:
        """Ask once, and note what came, if it came in the time that counts."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                code = await self._exchange()
        except (OSError, EOFError, TimeoutError) as error:
            phase.codes[type(error).__name__] += 1
            return
        ended = time.monotonic()
        if code not in {"200", "429"} or count_from <= ended <= count_to:
            phase.codes[code] += 1
        if code == "200" and count_from <= ended <= count_to:
            phase.latencies_seconds.append(ended - began)

    async def _exchange(self) -> str:
        """One request; its status code."""
        reader, writer = connection = await self._connected()
        writer.write(next(self._requests))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = head.partition("content-length: ")[2].partition("\r\n")[0]
        await reader.readexactly(int(length))
        if "connection: close" in head:
            writer.close()
        else:
            self._free.append((time.monotonic(), connection))
        return head.split(" ", 2)[1]

    async def _connected(self) -> Connection:
        """A connection that the server is not about to close, as it does with idle ones."""
        while self._free:
            idle_since, connection = self._free.pop()
            if time.monotonic() - idle_since < IDLE_SECONDS:
                return connection
            connection[1].close()
        return await asyncio.open_connection(*self._address)

    def _request(self) -> bytes:
        prompt = [self._random.randrange(5, 200) for _ in range(PROMPT_TOKENS)]
        output_tokens = self._random.choice(OUTPUT_TOKENS)
        wish = {"model": self._model, "prompt": prompt, "max_tokens": output_tokens}
        body = json.dumps({**wish, "ignore_eos": True, "temperature": 0}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: benchmark\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Loads:
    """The three loads of one server, and what they need to know of each other."""

    def __init__(self, url: str, model: str, refuser_url: str) -> None:
        self._load = Load(url, model)
        self._elsewhere = Load(refuser_url, model)
        self._peaks: list[float] = []

    async def rounds(self, count: int) -> list[Round]:
        """Each load in turn; who is first alternates."""
        await self._peak(FIRST_SECONDS)
        found = []
        for number in range(1, count + 1):
            phases = {side: await self._phase(side) for side in pairs.ordered(number, SIDES)}
            found.append(phases)
            rates = ", ".join(f"{side} {phases[side].per_second:.0f}/s" for side in SIDES)
            pairs.say(f"round {number} of {count}: {rates}")
        return found

    async def _phase(self, side: str) -> Phase:
        began = time.process_time()
        peak = median(self._peaks)
        if side == PEAK:
            phase = await self._peak(SECONDS)
        elif side == OVERLOAD:
            phase = await self._load.open(LOAD_FACTOR * peak, SECONDS)
        else:
            rest = self._elsewhere.open((LOAD_FACTOR - 1) * peak, SECONDS)
            phase, _ = await asyncio.gather(self._load.closed(PLACES + WAITING, SECONDS), rest)
        phase.client_cpu_seconds = time.process_time() - began
        return phase

    async def _peak(self, seconds: float) -> Phase:
        phase = await self._load.closed(PLACES + WAITING, seconds)
        self._peaks.append(phase.per_second)
        return phase


def measures(found: Sequence[Round]) -> list[Measure]:
    """The rows of the table."""

    def values(
        value: Callable[[Phase], float], sides: Sequence[str] = SIDES
    ) -> Mapping[str, Sequence[float]]:
        return {side: [value(phases[side]) for phases in found] for side in sides}

    def rate(phase: Phase) -> float:
        return phase.per_second

    return [
        Measure("answered a second", values(rate, (OVERLOAD, PEAK)), 1, ">= 0.95"),
        Measure("answered, the client the same", values(rate, (OVERLOAD, ELSEWHERE)), 1, ">= 0.95"),
        Measure("latency, median, s", values(lambda of: of.percentile(0.5)), 2),
        Measure("latency, p99, s", values(lambda of: of.percentile(0.99)), 2, "<= 2.00"),
        Measure("share of 429", values(lambda of: of.refused_share), 2),
        Measure("lost", values(lambda of: of.lost), 0),
        Measure("CPU of the client, s", values(lambda of: of.client_cpu_seconds), 2),
    ]


@contextmanager
def refuser() -> Iterator[str]:
    """The URL of a server that refuses all; it is gone when left."""
    port = sides.free_port()
    command = [sys.executable, *REFUSER, f"--app-dir={Path(__file__).parent}", f"--port={port}"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def main() -> None:
    """Run the rounds and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser, pairs=PAIRS)
    parser.add_argument(
        "serve", nargs="*", metavar="MODEL FLAG", help="after `--`; without, the demo model"
    )
    arguments = pairs.parsed(parser)
    sides.end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="holdfast-overload-") as directory:
        bench = sides.bench_of(arguments.serve, Path(directory))
        flags = (*bench.flags, f"--max-num-seqs={RUNNING}", f"--max-waiting={WAITING}")
        bench = replace(bench, flags=flags, has_access_log=True)
        with refuser() as refuser_url, bench.ready("holdfast") as server:
            loads = Loads(server.url, bench.model, refuser_url)
            found = uvloop.run(loads.rounds(arguments.pairs))
    title = (
        f"{LOAD_FACTOR:.0f} times the peak rate, {PLACES} places and {WAITING} in line, "
        f"{len(found)} rounds"
    )
    pairs.show(pairs.Findings("overload", title, measures(found)), arguments)


if __name__ == "__main__":
    main()
