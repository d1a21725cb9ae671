"""Where do the numbers of the page come from? What each source is asked for, and how cheaply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from operator import attrgetter

from holdfast.configuration_record import Configuration
from holdfast.engine.baseline import BaselineWatch
from holdfast.engine.launch.late_engine import LateEngine
from holdfast.engine.requests.request_progress import RequestRow, Traffic, waiting_row
from holdfast.lifecycle.memory_relief import MemoryRelief
from holdfast.lifecycle.supervisor import Supervisor
from holdfast.records import EngineFacts, HostMemory, Status
from holdfast.request_context import RequestContext
from holdfast.telemetry.collector import RequestCounts
from holdfast.telemetry.counters import Counters, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the numbers come from. Each is cheap and waits for nothing."""

    status: Callable[[], Status]
    generation: Callable[[], int]
    """The number of the present engine."""
    restarts_left: Callable[[], int]
    facts: Callable[[], EngineFacts | None] = lambda: None
    configuration: Callable[[], Configuration] = Configuration
    queue: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Requests (running, waiting) in the engine."""
    kv_used: Callable[[], Mapping[int, float]] = dict
    """The share of the KV cache in use, by engine."""
    requests: Callable[[], RequestCounts] = RequestCounts
    rows: Callable[[int], tuple[Sequence[RequestRow], int]] = lambda _: ((), 0)
    """At most N requests, those in the engine first, and how many others there are."""
    traffic: Callable[[], Traffic | None] = lambda: None
    refused: Callable[[], Mapping[str, int]] = dict
    host_memory: Callable[[], HostMemory | None] = lambda: None
    baseline: BaselineWatch | None = None
    totals: Totals = field(default_factory=Totals)
    """What the ranks of all generations counted."""


def sources_of(  # noqa: PLR0913 - every source of a number on the page
    supervisor: Supervisor,
    engine: LateEngine,
    *,
    status: Callable[[], Status],
    requests: Callable[[], RequestCounts],
    waiting: Callable[[], Iterable[RequestContext]],
    counters: Counters,
    memory: MemoryRelief,
    baseline: BaselineWatch | None,
) -> Sources:
    """Return what one server shows.

    `status` is that of the supervisor with all nodes, and `waiting` returns the requests that wait
    in the front end.
    """
    return Sources(
        status=status,
        generation=lambda: supervisor.generation,
        restarts_left=lambda: supervisor.restarts_left,
        facts=lambda: supervisor.facts,
        configuration=lambda: engine.configuration,
        queue=engine.queue,
        kv_used=engine.kv_used,
        requests=requests,
        rows=lambda limit: with_waiting(*engine.request_rows(limit), waiting(), limit),
        traffic=engine.traffic,
        refused=counters.refusals.counts,
        host_memory=memory.last,
        baseline=baseline,
        totals=counters.totals,
    )


def with_waiting(
    rows: Sequence[RequestRow], left_out: int, waiting: Iterable[RequestContext], limit: int
) -> tuple[Sequence[RequestRow], int]:
    """Add the earliest requests that wait to the rows of the engine's, at most `limit` in all."""
    shown = {row.number for row in rows}  # a request that was set aside waits again
    others = [context for context in waiting if context.number not in shown]
    earliest = nsmallest(limit - len(rows), others, key=attrgetter("number"))
    added = [waiting_row(context) for context in earliest]
    return [*rows, *added], left_out + len(others) - len(added)
