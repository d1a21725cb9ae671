"""A load that goes on while something else changes: its clients ask again after each answer.

    with SteadyLoad(server.url, model, directory, clients=64) as load:
        ...
    load.answers()

A burst begins with all its clients at once, and that is when its slowest first tokens come: one
such moment is hardly more than one measurement, however many requests it has. Here requests come
one by one, because answers differ in length, so a second has dozens that each count.

`python benchmarks/steady.py` is the process that asks. What measures it does not share a Python
interpreter with it, and so does not slow it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import connections

MOST_OUTPUT_TOKENS = 64
RAMP_SECONDS = 5.0
"""After which the requests of the beginning, which came all at once, no longer end together."""
SEED = 1
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, with its times on the monotonic clock, which all processes share."""

    began_seconds: float
    time_to_first_token_seconds: float
    ended_seconds: float
    output_tokens: int


class SteadyLoad:
    """A process that asks until the `with` statement ends."""

    def __init__(self, url: str, model: str, directory: Path, *, clients: int) -> None:
        self._command = [sys.executable, __file__, url, model, str(clients)]
        self._path = directory / "answers.jsonl"

    def __enter__(self) -> Self:
        with self._path.open("w") as answers:
            self._process = _asking(self._command, answers)
        self.go_on(RAMP_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(_STOP_SECONDS)

    def go_on(self, seconds: float) -> None:
        """Wait this long while it asks.

        Raises:
            SystemExit: it has ended, as it does when an answer breaks off.
        """
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        sys.exit("error: the load has ended; the reason is above.")

    def answers(self) -> list[Answer]:
        """Return what has ended so far, in this order."""
        *whole, _ = self._path.read_text().split("\n")
        return [Answer(*json.loads(line)) for line in whole]


def _asking(command: list[str], answers: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=answers)


def wishes(model: str, seed: int) -> Iterator[connections.Wish]:
    """Return requests without an end; their answers have up to `MOST_OUTPUT_TOKENS`."""
    source = random.Random(seed)  # noqa: S311 - prompts, not secrets
    while True:
        text, output_tokens = connections.prompt(source), source.randint(1, MOST_OUTPUT_TOKENS)
        yield connections.wish_of(model, text, output_tokens)


def main() -> None:
    """Ask, and write a line for each answer, until the process is ended."""
    url, model, clients = sys.argv[1:]
    for stream in connections.answered(url, wishes(model, SEED), int(clients)):
        wait_seconds = stream.time_to_first_token_seconds
        times = (stream.began_seconds, wait_seconds, stream.ended_seconds)
        print(json.dumps([*times, stream.wish.output_tokens]), flush=True)


if __name__ == "__main__":
    main()
