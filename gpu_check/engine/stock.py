"""The failure that Holdfast exists for: does stock vLLM have it here?"""

from __future__ import annotations

import time
from collections.abc import Sequence

from gpu_check.engine.growth import LONG, prompt
from gpu_check.engine.servers import POLL_SECONDS, completion
from gpu_check.engine.subjects import Engine
from gpu_check.records import CheckFailedError, Measured

_LOG_SECONDS = 10.0
"""For the log of a process that dies to reach its file."""
_TEXT = "Workspace is locked but allocation from"


def check(engine: Engine) -> Sequence[Measured]:
    """`/health` is 200 and a short prompt is answered; the first long one ends the engine."""
    server = engine.server
    server.tokens(prompt(8), 4)
    if not server.answers_200("/health"):
        raise CheckFailedError("/health is not 200 before the long prompt")
    status, answer = server.ask("/v1/completions", completion(prompt(LONG), 4))
    if status == 200:
        raise CheckFailedError(f"stock vLLM answered a prompt of {LONG} tokens: it does not fail")
    deadline_seconds = time.monotonic() + _LOG_SECONDS * engine.patience
    while _TEXT not in server.log and time.monotonic() < deadline_seconds:
        time.sleep(POLL_SECONDS)
    if _TEXT not in server.log:
        raise CheckFailedError(f"the long prompt got {status} {answer}, and no locked workspace")
    line = next(line for line in server.log.splitlines() if _TEXT in line)
    return [
        Measured("prompt", LONG, "tokens"),
        Measured("answer", f"HTTP {status}"),
        Measured("cause", line[line.index(_TEXT) :][:300]),
    ]
