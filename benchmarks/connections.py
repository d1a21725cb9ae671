"""How soon does it answer clients that all come at once, each on a connection of its own?

    python benchmarks/connections.py               the demo model, twenty pairs of bursts
    python benchmarks/connections.py --json -- MODEL --gpu-memory-utilization 0.4

Holdfast and `vllm serve` are up side by side and take turns with the same bursts of streaming
chats: 64 tokens in and 64 out. `vllm bench serve` keeps its connections and parses every event in
Python; this client opens a socket for each request, sends bytes that were made beforehand, and
looks in what comes for the first event and the last. On a GPU each server gets a part of its
memory, or the second would not start.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import bursts
import pairs
import sides
from bursts import Row
from clients import Result

LOADS = {1: 8, 16: 16, 64: 64}
"""Requests of a burst, by clients: all at once, except that a single client asks eight times."""
QUICK_LOADS = {1: 1, 16: 16, 64: 64}
BURSTS = 20
MAX_CLIENTS = max(LOADS)
PROMPT_CHARACTERS = 64
OUTPUT_TOKENS = 64
ANSWER_SECONDS = 120.0
KEPT_BYTES = 1000
"""Of what was read: what an event may have begun in, or an error is told with."""
_BEGINNING = b"HTTP/1.1 200"
_FIRST_EVENT = b"\ndata: {"
_LAST_EVENT = b"data: [DONE]"

ROWS = (
    *(Row("output tok/s", clients, "output_throughput", 0, ">= 1.00") for clients in LOADS),
    *(Row("median TTFT, ms", clients, "median_ttft_ms", 1, "<= 1.00") for clients in LOADS),
    Row("p99 TTFT, ms", MAX_CLIENTS, "p99_ttft_ms", 1, "<= 1.00"),
    Row("CPU of the front end, µs a token", MAX_CLIENTS, "front_end_us_per_token"),
    Row("CPU of the whole server, µs a token", MAX_CLIENTS, "server_us_per_token"),
)


@dataclass(frozen=True, slots=True)
class Wish:
    """A streaming chat to ask for."""

    request: bytes
    """As it goes over the wire."""
    output_tokens: int
    """Just as many as its answer has."""


class Stream:
    """One request on a socket that is opened for it and closed after it."""

    def __init__(self, address: tuple[str, int], wish: Wish) -> None:
        self.wish = wish
        self.began_seconds = time.monotonic()
        self.first_seconds: float | None = None
        """When the first event had come; None until then."""
        self.ended_seconds: float | None = None
        """When the last event had come; None until then."""
        self.socket = socket.create_connection(address, ANSWER_SECONDS)
        self.socket.setblocking(False)
        self.socket.sendall(wish.request)
        self._received = b""

    def has_ended(self) -> bool:
        """Read what has come, and return whether that was the last event.

        Raises:
            SystemExit: the answer broke off, or was none of events.
        """
        received = self.socket.recv(1 << 16)
        unread = self._received + received
        if not received or (self._received == b"" and not received.startswith(_BEGINNING)):
            sys.exit(f"error: a stream broke off after {unread!r}.")
        if self.first_seconds is None and _FIRST_EVENT in unread:
            self.first_seconds = time.monotonic()
        if self.first_seconds is not None and _LAST_EVENT in unread:
            self.ended_seconds = time.monotonic()
            return True
        self._received = unread[-KEPT_BYTES:]
        return False

    @property
    def time_to_first_token_seconds(self) -> float:
        """How long the first event took, once it has come."""
        return (self.first_seconds or self.began_seconds) - self.began_seconds


class SocketClient:
    """Asks as cheaply as Python can: it shares the CPU with what answers."""

    def __init__(self, model: str) -> None:
        self._model = model

    def run(self, url: str, *, clients: int, requests: int, seed: int) -> Result:
        """Streaming chats of `clients` at a time, under the names of `vllm bench serve`.

        The seed chooses the prompts: the same for both sides of a pair, and no two pairs the same,
        so that no prefix cache answers.
        """
        wishes = [wish_of(self._model, text) for text in prompts(requests, seed)]
        began_seconds = time.monotonic()
        streams = list(answered(url, wishes, clients))
        seconds = time.monotonic() - began_seconds
        first_seconds = [stream.time_to_first_token_seconds for stream in streams]
        return {
            "total_output_tokens": requests * OUTPUT_TOKENS,
            "output_throughput": requests * OUTPUT_TOKENS / seconds,
            "median_ttft_ms": median(first_seconds) * 1000,
            "p99_ttft_ms": pairs.p99(first_seconds) * 1000,
        }


def answered(url: str, wishes: Iterable[Wish], clients: int) -> Iterator[Stream]:
    """Ask for all of these, `clients` at a time, and return each stream that has ended.

    Raises:
        SystemExit: an answer broke off, was none of events, or did not come.
    """
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 0)
    unasked = iter(wishes)
    with _sockets() as asked:
        _ask(asked, address, islice(unasked, clients))
        while asked.get_map():
            ended = _read(asked)
            _ask(asked, address, islice(unasked, len(ended)))
            yield from ended


@contextmanager
def _sockets() -> Iterator[selectors.EpollSelector]:
    """Those that an answer is read from; when left, none of them is open."""
    with selectors.EpollSelector() as asked:
        try:
            yield asked
        finally:
            for key in asked.get_map().values():
                key.data.socket.close()


def _ask(asked: selectors.EpollSelector, address: tuple[str, int], wishes: Iterable[Wish]) -> None:
    for wish in wishes:
        stream = Stream(address, wish)
        asked.register(stream.socket, selectors.EVENT_READ, stream)


def _read(asked: selectors.EpollSelector) -> list[Stream]:
    """Read what has come, and return the streams that have ended."""
    ready = asked.select(ANSWER_SECONDS)
    if not ready:
        sys.exit(f"error: no event in {ANSWER_SECONDS:.0f} s.")
    ended = []
    for key, _ in ready:
        stream: Stream = key.data
        if stream.has_ended():
            asked.unregister(stream.socket)
            stream.socket.close()
            ended.append(stream)
    return ended


def prompts(count: int, seed: int) -> list[str]:
    """This many texts of printable characters."""
    source = random.Random(seed)  # noqa: S311 - prompts, not secrets
    return [prompt(source) for _ in range(count)]


def prompt(source: random.Random) -> str:
    """A text of printable characters, as long as each other one."""
    return "".join(chr(source.randrange(33, 127)) for _ in range(PROMPT_CHARACTERS))


def wish_of(model: str, text: str, output_tokens: int = OUTPUT_TOKENS) -> Wish:
    """A greedy answer of just this length to this text."""
    wish = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_completion_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    body = json.dumps(wish).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: benchmark\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return Wish(head.encode() + body, output_tokens)


def main() -> None:
    """Run the pairs and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser, pairs=BURSTS)
    parser.add_argument(
        "serve", nargs="*", metavar="MODEL FLAG", help="after `--`; without, the demo model"
    )
    arguments = pairs.parsed(parser)
    sides.end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="holdfast-connections-") as directory:
        bench = sides.bench_of(arguments.serve, Path(directory))
        loads = QUICK_LOADS if arguments.quick else LOADS
        client = SocketClient(bench.model)
        found = bursts.found(bench, client, loads, arguments.pairs, pairs.SIDES)
    name = "the demo model" if not arguments.serve else Path(bench.model).name
    title = (
        f"Streaming chats of {name} on new connections, {len(found)} pairs of bursts, "
        f"flags {' '.join(bench.flags)}"
    )
    measures = [row.measure(found, pairs.SIDES) for row in ROWS]
    pairs.show(pairs.Findings("connections", title, measures), arguments)


if __name__ == "__main__":
    main()
