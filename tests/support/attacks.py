"""Attacks that need no key, and what they cost a server: the time of `/livez`, and memory.

`python attacks.py NAME PORT COUNT` attacks until its standard input ends, and prints a line when
the attack is under way. It is a process of its own, so that the one that measures has the time.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from holdfast.listener.connection_table import connection_limit

HERE = Path(__file__).parent
MIB = 1024 * 1024
DEADLINE_SECONDS = 60
DRIP_SECONDS = 0.1
PAUSE_SECONDS = 0.05
PROBE_PAUSE_SECONDS = 0.003
"""Without a pause, the measurement would cover a moment of the attack and add to it."""
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True, slots=True)
class Cost:
    """What an attack cost a server."""

    seconds: Sequence[float]
    """The time of each answer, in ascending order."""
    peak_bytes: int

    @property
    def median_seconds(self) -> float:
        """The 50th percentile."""
        return self.seconds[len(self.seconds) // 2]

    @property
    def slow_seconds(self) -> float:
        """The 99th percentile."""
        return self.seconds[len(self.seconds) * 99 // 100]

    @classmethod
    def of_all(cls, costs: Iterable[Cost]) -> Cost:
        """Combine runs: a percentile of many answers varies less than those of few."""
        costs = tuple(costs)
        seconds = sorted(chain.from_iterable(cost.seconds for cost in costs))
        return cls(seconds, max(cost.peak_bytes for cost in costs))


class Target:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process = process
        self.port = int(process.stdout.readline())
        self.until_alive()

    def until_alive(self) -> None:
        """Wait for the first answer."""
        end = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                self.livez_seconds(1)
                return
            time.sleep(0.05)
        raise TimeoutError("no answer of /livez")

    def livez_seconds(self, count: int) -> list[float]:
        """Return the times of `count` answers of `/livez`, each over a new connection."""
        return [self._livez_seconds() for _ in range(count)]

    def cost(self, count: int) -> Cost:
        """Return the times of `count` answers, and the largest memory since the start."""
        seconds = sorted(self.livez_seconds(count))
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
        return Cost(seconds, int(peak.split()[1]) * 1024)

    def _livez_seconds(self) -> float:
        started = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_SECONDS)
        connection.request("GET", "/livez")
        response = connection.getresponse()
        response.read()
        connection.close()
        assert response.status == 200
        seconds = time.perf_counter() - started
        time.sleep(PROBE_PAUSE_SECONDS)
        return seconds


@contextmanager
def target(kind: str) -> Iterator[Target]:
    """A server of this kind, ended with the context."""
    with _child("attack_target.py", kind) as process:
        yield Target(process)


@contextmanager
def under_attack(by: str, port: int, count: int) -> Iterator[None]:
    """While entered, the server at `port` is attacked."""
    with _child("attacks.py", by, str(port), str(count)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        yield


@contextmanager
def _child(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def slow_headers(port: int, count: int) -> Iterator[None]:
    """Keep `count` connections open that never finish their headers."""
    wires = [_connected(port) for _ in range(count)]
    while True:
        for place, wire in enumerate(wires):
            try:
                wire.send(b"GET /v1/models HTTP/1.1\r\nX: " if not place else b"x")
            except OSError:
                wire.close()
                wires[place] = _connected(port)
        yield
        time.sleep(DRIP_SECONDS)


def idle(port: int, count: int) -> Iterator[None]:
    """Keep `count` connections open that send nothing."""
    connection_limit(count)
    poll, wires = select.poll(), {}

    def connect() -> None:
        wire = _connected(port)
        wires[wire.fileno()] = wire
        poll.register(wire, select.POLLIN)

    for _ in range(count):
        connect()
    while True:
        yield
        for number, _ in poll.poll(DRIP_SECONDS * 1000):
            poll.unregister(number)
            wires.pop(number).close()
            connect()


def large_body(port: int, count: int) -> Iterator[None]:
    """Send bodies of `count` MiB with their length, one after the other."""
    head = POST + b"Content-Length: %d\r\n\r\n" % (count * MIB)
    return _sent(port, head, b"x" * MIB, count)


def chunked_body(port: int, count: int) -> Iterator[None]:
    """Send bodies of `count` MiB in chunks, one after the other."""
    chunk = b"%x\r\n%b\r\n" % (MIB, b"x" * MIB)
    return _sent(port, POST + b"Transfer-Encoding: chunked\r\n\r\n", chunk, count)


def _sent(port: int, head: bytes, part: bytes, count: int) -> Iterator[None]:
    while True:
        with contextlib.suppress(OSError), _connected(port) as wire:
            wire.sendall(head)
            for _ in range(count):
                wire.sendall(part)
                yield
        time.sleep(PAUSE_SECONDS)
        yield


def deep_json(port: int, count: int) -> Iterator[None]:
    """Send JSON of `count` levels, one after the other."""
    body = b'{"prompt":' * count
    request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    while True:
        with contextlib.suppress(OSError), _connected(port) as wire:
            wire.sendall(request)
            wire.recv(MIB)
        time.sleep(PAUSE_SECONDS)
        yield


def closing_json(port: int, count: int) -> Iterator[None]:
    """Send `count` MiB of closing brackets with openers at the end, one after the other."""
    head = POST + b"Content-Length: %d\r\n\r\n" % (count * MIB)
    while True:
        with contextlib.suppress(OSError), _connected(port) as wire:
            wire.sendall(head)
            for _ in range(count - 1):
                wire.sendall(b"]" * MIB)
                yield
            wire.sendall(b"]" * (MIB - 200) + b"[" * 200)
            wire.recv(MIB)
        yield


ATTACKS: dict[str, Callable[[int, int], Iterator[None]]] = {
    "slow_headers": slow_headers,
    "idle": idle,
    "large_body": large_body,
    "chunked_body": chunked_body,
    "deep_json": deep_json,
    "closing_json": closing_json,
}


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), DEADLINE_SECONDS)


def main(name: str, port: int, count: int) -> None:
    """Attack until standard input ends."""
    is_enough = threading.Event()

    def until_closed() -> None:
        sys.stdin.read()
        is_enough.set()

    threading.Thread(target=until_closed, daemon=True).start()
    attack = ATTACKS[name](port, count)
    next(attack)
    print("under way", flush=True)  # noqa: T201 - to the process that measures
    while not is_enough.is_set():
        next(attack)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
