"""What becomes of throughput and latency at three times the load that the server can take?

    python benchmarks/overload.py                         the demo model, two rounds
    python benchmarks/overload.py --rounds 5 --json -- MODEL --max-num-seqs 16

Each round is a closed loop with as many clients as there are places in the engine, which is peak
load, and then an open loop at three times the rate that it reached: requests come when they come,
and whoever gets 429 does not ask again. All else but an answer or a 429 is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import IO
from urllib.parse import urlsplit

import httpx

from holdfast import __version__
from holdfast.api.line import LEAST_SPARE, SPARE_SHARE
from holdfast.versions import vllm_version

DEMO = (
    "--demo",
    "--enforce-eager",
    "--kv-cache-memory-bytes=128M",
    "--max-num-batched-tokens=1024",
)
LOAD_FACTOR = 3.0
WARM_UP_SECONDS = 3.0
"""At the start of a phase, not counted."""
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 48
START_SECONDS = 600.0
STOP_SECONDS = 60.0
ANSWER_SECONDS = 120.0
POLL_SECONDS = 0.2
IDLE_SECONDS = 1.0

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class Phase:
    """What one load met, its first seconds left out."""

    seconds: float
    latencies_seconds: list[float] = field(default_factory=list)
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

    def summary(self) -> dict[str, float]:
        """The numbers of a row."""
        return {
            "answered_per_second": self.per_second,
            "p50_seconds": self.percentile(0.5),
            "p99_seconds": self.percentile(0.99),
            "refused_share": self.codes["429"] / max(1, self.codes.total()),
            "lost": self.lost,
        }


class Load:
    """Asks one server over connections that stay open, as cheaply as Python can."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)
        self._model = model
        self._random = random.Random(1)  # noqa: S311 - prompts, not secrets
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
        writer.write(self._request())
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
        wish = {"model": self._model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS}
        body = json.dumps({**wish, "ignore_eos": True, "temperature": 0}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: benchmark\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@contextmanager
def served(flags: Sequence[str], log: IO[str]) -> Iterator[str]:
    """The URL of a server that is ready; it is gone when left."""
    with tempfile.TemporaryDirectory(prefix="holdfast-overload-") as directory:
        ours = (f"--learned-dir={directory}", "--probe=quick", "--disable-uvicorn-access-log")
        address = ("--host=127.0.0.1", "--port=0")
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "serve", *flags, *ours, *address],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield _until_ready(process, Path(log.name))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client(timeout=10, trust_env=False) as client:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            _, found, rest = log.read_text(errors="replace").partition("listening on ")
            url = rest.split()[0] if found and rest.split() else ""
            if url and client.get(f"{url}/readyz").status_code == httpx.codes.OK:
                return url
    last_lines = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    sys.exit(f"{last_lines}\noverload: error: the server was not ready; see above.")


async def rounds_of(url: str, places: int, rounds: int, seconds: float) -> list[dict[str, Phase]]:
    """Peak load and overload, one after the other."""
    async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
    load, found = Load(url, model), []
    await load.closed(places, WARM_UP_SECONDS)
    for number in range(1, rounds + 1):
        print(f"overload: round {number} of {rounds}", file=sys.stderr, flush=True)
        peak = await load.closed(places, seconds)
        over = await load.open(LOAD_FACTOR * peak.per_second, seconds)
        found.append({"peak": peak, "overload": over})
    return found


def ratios(rounds: Sequence[Mapping[str, Phase]]) -> dict[str, list[float]]:
    """Overload by peak, in each round."""
    pairs = [(one["overload"], one["peak"]) for one in rounds]
    return {
        "throughput": [over.per_second / peak.per_second for over, peak in pairs],
        "p99": [over.percentile(0.99) / peak.percentile(0.99) for over, peak in pairs],
    }


def table(rounds: Sequence[Mapping[str, Phase]]) -> Iterator[str]:
    """Medians, with the least and the most in brackets."""
    yield _row("", "peak load", "overload")
    labels = {
        "answered_per_second": "answered a second",
        "p50_seconds": "latency, p50, s",
        "p99_seconds": "latency, p99, s",
        "refused_share": "share of 429",
        "lost": "lost",
    }
    for name, label in labels.items():
        sides = ([one[side].summary()[name] for one in rounds] for side in ("peak", "overload"))
        yield _row(label, *map(_spread, sides))
    yield ""
    found = ratios(rounds)
    yield _row("throughput, overload / peak", _spread(found["throughput"]))
    yield _row("p99 of the answered, overload / peak", _spread(found["p99"]))


def _row(label: str, *cells: str) -> str:
    return (f"{label:<38}" + "".join(f"{cell:<24}" for cell in cells)).rstrip()


def _spread(values: Sequence[float]) -> str:
    middle, least, most = (f"{f(values):.2f}" for f in (median, min, max))
    return f"{middle} ({least} to {most})" if len(values) > 1 else middle


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="how many (2)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load (20)")
    parser.add_argument("--seqs", type=int, default=16, help="--max-num-seqs of the server (16)")
    parser.add_argument(
        "--waiting", type=int, help="--max-waiting of the server (half of the places)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "serve", nargs="*", metavar="MODEL FLAG", help="after `--`; without, the demo model"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.seqs < 1 or arguments.seconds < 1:
        parser.error("--rounds, --seqs and --seconds: at least 1")
    return arguments


def main() -> None:
    """Run the rounds and print what they found."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    places = arguments.seqs + max(LEAST_SPARE, arguments.seqs // SPARE_SHARE)
    waiting = places // 2 if arguments.waiting is None else arguments.waiting
    flags = (*(arguments.serve or DEMO), f"--max-num-seqs={arguments.seqs}")
    with (
        tempfile.NamedTemporaryFile("w+", suffix=".log") as log,
        served((*flags, f"--max-waiting={waiting}"), log.file) as url,
    ):
        rounds = asyncio.run(rounds_of(url, places, arguments.rounds, arguments.seconds))
    setting = {"places": places, "max_waiting": waiting, "load_factor": LOAD_FACTOR}
    versions = {"holdfast": __version__, "vllm": vllm_version()}
    if arguments.json:
        summaries = [{side: asdict(one) | one.summary() for side, one in r.items()} for r in rounds]
        record = {"versions": versions, "cores": os.cpu_count(), **setting, "rounds": summaries}
        print(json.dumps({**record, "ratios": ratios(rounds)}, indent=2))
        return
    print(f"Overload at {LOAD_FACTOR:.0f} times the peak rate: places: {places}, --max-waiting")
    print(f"{waiting}, rounds: {len(rounds)}, CPU cores: {os.cpu_count()}, Holdfast {__version__},")
    print(f"vLLM {vllm_version()}. Median (least to most).\n")
    print("\n".join(table(rounds)))


if __name__ == "__main__":
    main()
