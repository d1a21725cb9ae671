"""How long do the steps of the engine take, as a client sees them and as Holdfast counts them?"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

from gpu_check.engine.growth import LONG, prompt
from gpu_check.engine.servers import POLL_SECONDS, completion
from gpu_check.engine.subjects import Engine
from gpu_check.records import CheckFailedError, Measured

_TOKENS = 128
_LONG_TOKENS = 2
_COUNT_SECONDS = 5.0
"""A step is counted when its output is there, which a client may have before."""


def check(engine: Engine) -> Sequence[Measured]:
    """A short and a long prompt, streamed. It fails only if the steps are not counted."""
    before = _steps(engine)
    first_seconds, gaps = _streamed(engine, 64, _TOKENS)
    if not gaps:
        raise CheckFailedError(f"a stream of {_TOKENS} tokens came in one part")
    deadline_seconds = time.monotonic() + _COUNT_SECONDS
    while (counted := _steps(engine) - before) < _TOKENS and time.monotonic() < deadline_seconds:
        time.sleep(POLL_SECONDS)
    if counted < _TOKENS:
        raise CheckFailedError(f"{_TOKENS} tokens were made one by one, {counted} steps counted")
    long_seconds, _ = _streamed(engine, LONG, _LONG_TOKENS)
    return [
        Measured("start until ready", round(engine.start_seconds, 1), "s"),
        Measured("first token of 64", _ms(first_seconds), "ms"),
        Measured(f"first token of {LONG}", _ms(long_seconds), "ms"),
        Measured("decode step, median", _ms(statistics.median(gaps)), "ms"),
        Measured("decode step, slowest", _ms(max(gaps)), "ms"),
        Measured("steps counted", counted),
    ]


def _steps(engine: Engine) -> int:
    return max(int(rank["steps"]) for rank in engine.server.status()["workspace"])


def _streamed(engine: Engine, length: int, count: int) -> tuple[float, list[float]]:
    """Seconds to the first token, and for each token of the parts that follow.

    A device may be faster than the way to the client, so one part may have several tokens.
    """
    began_seconds = time.monotonic()
    body = {**completion(prompt(length), count), "stream": True}
    parts: list[tuple[float, int]] = []
    with engine.server.opened("/v1/completions", body) as response:
        for line in response:
            text = line.decode().removeprefix("data: ").strip()
            if text.startswith("{") and (choices := json.loads(text)["choices"]):
                parts.append((time.monotonic(), len(choices[0]["token_ids"] or ())))
    told = sum(tokens for _, tokens in parts)
    if told != count:
        raise CheckFailedError(f"a stream of {count} tokens has {told}")
    pairs = pairwise(part for part in parts if part[1])
    return parts[0][0] - began_seconds, [(b - a) / tokens for (a, _), (b, tokens) in pairs]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
