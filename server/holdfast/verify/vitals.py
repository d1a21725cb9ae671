"""What `/metrics` says of a server: its memory, its requests, and how many engines have died.

Memory is what the operating system says of processes. Holdfast tells that of the process that
answers HTTP and that of the engine's processes; other servers tell only that of the first.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial

from holdfast.verify.records import Request
from holdfast.verify.target import REQUEST_SECONDS, NoAnswerError, Target
from holdfast.verify.waiting import LimitedError, until_admitted

_OK = 200
_LINE = re.compile(r"^([a-z_:]+)(?:\{([^}\n]*)\})? (\S+)", re.MULTILINE)
"""Nothing in it leaves a line: where braces are never closed, it would read the page for each."""
_FRONT = "process_resident_memory_bytes"
_ENGINE = "holdfast_engine_host_memory_bytes"
_DEATHS = "holdfast_engine_deaths_total"
_STARTED = "process_start_time_seconds"
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_REQUESTS = (*_RUNNING, "vllm:num_requests_waiting", "sglang:num_queue_reqs")
_ASKED_FOR = 'cause="requested"'
"""The label of the death of an engine that an operator restarts."""
_OF_ONE_PRIORITY = re.compile(r'(?:^|,) *priority="[^"]')
"""SGLang also counts the requests of each priority, beside a total whose priority is empty."""
_OF_A_ROUTER = re.compile(r'(?:^|,) *server="')
"""vLLM's production-stack router counts by itself, and never ends one whose client has left."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the page says at one moment; None for what it does not have."""

    memory_bytes: float | None = None
    deaths: float | None = None
    """Deaths of engines that nobody asked for, since the server started."""
    started_at_seconds: float | None = None
    """Since 1970: when the server's own process started, at which it counts from 0."""
    requests: float | None = None
    """The requests of all engines, running and waiting, where vLLM or SGLang reports them."""
    engines: int = 0
    """How many of them tell of requests."""


async def ask_vitals(target: Target, *, is_holdfast: bool) -> Vitals:
    """What `/metrics` says now; nothing if it does not answer, or lets no request in."""
    asking = partial(target.ask, Request("GET", "/metrics"))
    try:
        answer = await until_admitted(asking, REQUEST_SECONDS)
    except (LimitedError, NoAnswerError):
        return Vitals()
    if answer.status != _OK:
        return Vitals()
    return read_vitals(answer.text, is_holdfast=is_holdfast)


def read_vitals(page: str, *, is_holdfast: bool) -> Vitals:
    """What a page says.

    While Holdfast has no engine it tells no memory of one, and half of a sum is not a sample.
    """
    wanted: tuple[str, ...] = (_FRONT, _ENGINE) if is_holdfast else (_FRONT,)
    memory: dict[str, float] = {}
    deaths: float | None = None
    started_at_seconds: float | None = None
    requests: float | None = None
    engines = 0
    for name, labels, said in _LINE.findall(page):
        value = _number(said)
        if name in wanted and value is not None:
            memory[name] = memory.get(name, 0.0) + value
        if name == _DEATHS and _ASKED_FOR not in labels and value is not None:
            deaths = (deaths or 0.0) + value
        if name == _STARTED:
            started_at_seconds = value
        is_apart = _OF_ONE_PRIORITY.search(labels) or _OF_A_ROUTER.search(labels)
        if name in _REQUESTS and value is not None and not is_apart:
            requests = (requests or 0.0) + value
            engines += name in _RUNNING
    memory_bytes = sum(memory.values()) if len(memory) == len(wanted) else None
    return Vitals(memory_bytes, deaths, started_at_seconds, requests, engines)


def _number(said: str) -> float | None:
    try:
        value = float(said)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
