"""Is the server up? Only the status record is read, so no answer ever waits for the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from holdfast.api.errors import STATE_HEADER
from holdfast.configuration_record import Configuration
from holdfast.lifecycle.states import HEALTHY, HOPELESS, SERVING
from holdfast.records import ProbeReport, RankMemory, RankStats, Status
from holdfast.telemetry.collector import last_step_age_seconds
from holdfast.telemetry.logs import iso_time

HealthReport = dict[str, Any]
QueueLengths = tuple[int, int]
"""Requests (running, waiting)."""
IsHealthy = Callable[[Status], bool]
_RANK = TypeAdapter(RankMemory)


def is_alive(status: Status) -> bool:
    """Return whether the process can still become, or stay, useful."""
    return status.state not in HOPELESS


def is_ready(status: Status) -> bool:
    """Return whether requests are admitted."""
    return status.state in SERVING


def is_healthy(status: Status) -> bool:
    """Return whether all is well, awake or asleep."""
    return status.state in HEALTHY


def is_started(status: Status) -> bool:
    """Return whether the server has ever been ready."""
    return status.has_been_ready


def health_routes(
    status: Callable[[], Status],
    *,
    queue: Callable[[], QueueLengths],
    broken_key_files: Callable[[], Mapping[str, bool]] = dict,
    configuration: Callable[[], Configuration] = Configuration,
) -> list[Route]:
    """Return the routes `/livez`, `/readyz`, `/health`, `/ping`, `/startupz` and `/statusz`."""

    def body(now: Status, *, is_full: bool) -> HealthReport:
        running, waiting = queue()
        return report(
            now,
            running=running,
            waiting=waiting,
            now_seconds=time.monotonic(),
            is_full=is_full,
        )

    def short(path: str, answer: IsHealthy, *, methods: tuple[str, ...] = ("GET", "HEAD")) -> Route:
        async def endpoint(_request: Request) -> Response:
            now = status()
            code = 200 if answer(now) else 503
            return reply(now.state, body(now, is_full=False), code)

        return Route(path, endpoint, methods=methods)

    async def statusz(_request: Request) -> Response:
        now = status()
        whole = body(now, is_full=True)
        whole["broken_key_files"] = dict(broken_key_files())
        whole["configuration"] = asdict(configuration())
        return reply(now.state, whole, 200)

    return [
        short("/livez", is_alive),
        short("/readyz", is_ready),
        short("/health", is_healthy),
        # vLLM answers POST here too, as SageMaker requires.
        short("/ping", is_healthy, methods=("GET", "HEAD", "POST")),
        short("/startupz", is_started),
        Route("/statusz", statusz, methods=("GET", "HEAD")),
    ]


def report(
    status: Status, *, running: int, waiting: int, now_seconds: float, is_full: bool
) -> HealthReport:
    """Return the body of a health route: the full status, or only what is public.

    `now_seconds` is a time of `time.monotonic()`. Unknown values are null, but those of the
    configuration are empty.
    """
    known: HealthReport = {
        "state": status.state,
        "reason": status.reason,
        "since": iso_time(status.since_unix_seconds),
        "eta_s": status.eta_seconds,
        "progress": {
            "last_step_age_s": last_step_age_seconds(status.ranks, now_seconds),
            "running": running,
            "waiting": waiting,
        },
        "probe": _probe(status.probe),
    }
    if not is_full:
        return known
    if status.detail:
        known["reason"] = f"{status.reason}: {status.detail}"
    known["broken_key_files"] = {}
    known["configuration"] = {}
    known["engine"] = {
        "generation": status.engine.generation,
        "restarts": status.engine.restarts,
        "last_exit": status.engine.last_exit or None,
    }
    known["start"] = {"phases_s": dict(status.start_phases)}
    known["probe"]["steps"] = [asdict(step) for step in status.probe.steps] if status.probe else []
    known["nodes"] = [asdict(node) for node in status.nodes]
    return known | rank_report(status.ranks)


def rank_report(ranks: Iterable[RankStats]) -> HealthReport:
    """Return what the full report says of ranks: `workspace` and `memory`, one entry for each."""
    every = tuple(ranks)
    return {"workspace": [_workspace(rank) for rank in every], "memory": list(map(_memory, every))}


def reply(state: str, body: HealthReport, code: int) -> Response:
    """Make an answer that has the state among its headers, too."""
    return JSONResponse(body, status_code=code, headers={STATE_HEADER: state})


def _probe(probe: ProbeReport | None) -> HealthReport:
    return {
        "passed": probe.passed if probe else None,
        "limited": probe.limited if probe else None,
        "proven_tokens": probe.proven_tokens if probe else None,
    }


def _workspace(rank: RankStats) -> HealthReport:
    known: HealthReport = _RANK.dump_python(rank, exclude={"memory"})
    counted = {"steps": rank.steps, "scheduled_tokens": rank.scheduled_tokens}
    return {**known, **counted, "fatal_error": rank.fatal_error or None}


def _memory(rank: RankStats) -> Mapping[str, int]:
    sizes = {f"{kind}_bytes": size for kind, size in rank.memory.items()}
    return {"engine": rank.engine, "rank": rank.rank, **sizes}
