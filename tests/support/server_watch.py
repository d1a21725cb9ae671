"""Polls a server from a process of its own, so that nothing else in the test delays it.

`python server_watch.py PORT` prints a line for each look until its standard input ends.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what looks needs none of it, and starts sooner
    from servers import Server

LOOKS_A_SECOND = 4
DEADLINE_SECONDS = 20.0
STALL_LOOK_SECONDS = 1.5
"""How often a server looks whether its engine stalls, and the time between two of our looks."""
STANDSTILL_SECONDS = 0.5
"""A process that sleeps nearly always is woken within some milliseconds on a busy machine. One that
is woken this late was on a machine that stood still, with the server on it."""
COUNTED = re.compile(
    rb'^holdfast_(engine_deaths|requests_refused)_total\{(?:cause|reason)="(\w+)"\} (\S+)',
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Look:
    """What `/livez` and the metrics said once."""

    at_seconds: float
    """Of `time.monotonic()`, which all processes of a machine share."""
    livez_seconds: float
    status: int
    """0 if there was no answer in time."""
    state: str
    counts: dict[str, float]
    """Deaths by cause and refusals by reason, as of the last time they were read."""
    late_seconds: float = 0.0
    """How much later than asked for this process was woken for it."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which the server could not serve any request."""

    start_seconds: float
    end_seconds: float

    def overlap_seconds(self, start: float, end: float) -> float:
        """How much of a time it takes."""
        return max(0.0, min(end, self.end_seconds) - max(start, self.start_seconds))

    def meets(self, others: Iterable[Outage]) -> bool:
        """Whether it has any moment in common with another one."""
        return any(self.overlap_seconds(one.start_seconds, one.end_seconds) for one in others)


@dataclass
class Watch:
    """Every look so far, during `watched` and after it."""

    looks: list[Look] = field(default_factory=list)

    @property
    def slowest_livez_seconds(self) -> float:
        """The longest time that `/livez` took."""
        return max(look.livez_seconds for look in self.looks)

    @property
    def deaths(self) -> dict[str, float]:
        """By cause, at the last look."""
        return self._counted("engine_deaths")

    @property
    def refusals(self) -> dict[str, float]:
        """By reason, at the last look."""
        return self._counted("requests_refused")

    def outages(self, *, stall_seconds: float, answered: Sequence[float] = ()) -> list[Outage]:
        """From the last look that saw READY to the next one.

        What stalls serves nobody from the moment when it does, and is noticed `stall_seconds` later
        or with the look after that. The moment is that of the last answer of those that clients
        `answered` to be given without a pause.
        """
        found: list[Outage] = []
        last_ready, is_out, stalls = 0.0, False, 0.0
        for look in self.looks:
            is_ready = look.state == "READY"
            if is_ready and is_out:
                stalled = look.counts.get("engine_deaths stall", 0.0)
                start = last_ready
                if stalled > stalls:
                    latest = last_ready - stall_seconds
                    ends = (at for at in answered if latest - STALL_LOOK_SECONDS <= at <= latest)
                    start = max(ends, default=latest)
                stalls = stalled
                start = max(start, found[-1].end_seconds if found else 0.0)
                found.append(Outage(start, look.at_seconds + look.livez_seconds))
            is_out = not is_ready if look.status else is_out
            last_ready = look.at_seconds if is_ready else last_ready
        return found

    def standstills(self) -> list[Outage]:
        """Return when the whole machine stood still, as one does whose memory is saved or moved."""
        return [
            Outage(look.at_seconds - look.late_seconds, look.at_seconds)
            for look in self.looks
            if look.late_seconds >= STANDSTILL_SECONDS
        ]

    def _counted(self, family: str) -> dict[str, float]:
        counts = self.looks[-1].counts if self.looks else {}
        return {
            name.partition(" ")[2]: count
            for name, count in counts.items()
            if name.startswith(family) and count
        }


@contextmanager
def watched(server: Server) -> Iterator[Watch]:
    """Poll the server until the context ends."""
    port = server.url.rpartition(":")[2]
    watch = Watch()
    with subprocess.Popen(
        [sys.executable, __file__, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                watch.looks.append(Look(**json.loads(line)))

        reading = threading.Thread(target=read)
        reading.start()
        try:
            yield watch
        finally:
            assert process.stdin is not None
            process.stdin.close()
            reading.join()


def looks(port: int) -> Iterator[Look]:
    """Without end, each with the counts of half a second ago at most where they come in time."""
    counts: dict[str, float] = {}
    number = 0
    while True:
        at = time.monotonic()
        status, body = _asked(port, "/livez")
        livez_seconds = time.monotonic() - at
        with contextlib.suppress(ValueError):
            state = str(json.loads(body or "{}").get("state", ""))
        if number % (LOOKS_A_SECOND // 2) == 0:
            _, page = _asked(port, "/metrics")
            counts |= {
                f"{name.decode()} {label.decode()}": float(value)
                for name, label, value in COUNTED.findall(page)
            }
        yield Look(at, livez_seconds, status, state, dict(counts))
        number += 1


def _asked(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_SECONDS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def main(port: int) -> None:
    """Poll until standard input ends."""
    late_seconds = 0.0
    for look in looks(port):
        print(json.dumps(asdict(replace(look, late_seconds=late_seconds))), flush=True)  # noqa: T201 - to the parent process
        woken_seconds = time.monotonic() + 1 / LOOKS_A_SECOND
        if select.select([sys.stdin], [], [], 1 / LOOKS_A_SECOND)[0]:
            return
        late_seconds = time.monotonic() - woken_seconds


if __name__ == "__main__":
    main(int(sys.argv[1]))
