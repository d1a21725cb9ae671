"""Is this follower up, and do its ranks serve? A follower's routes, and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast import __version__
from holdfast.api.health import rank_report, reply
from holdfast.records import FollowerStatus

_REASONS = {
    "away": "not connected to the head",
    "authenticating": "authenticating to the head",
    "joining": "joining the head",
    "waiting": "waiting for the head to start a generation",
    "ending": "ending the processes of the generation",
    "left": "leaving",
}
"""Why the ranks do not run, in each state in which they do not."""
IN_LOG = "see the log of this node"
"""Stands for the error of a rank: it may quote a request, and these routes need no key."""


def is_alive(status: FollowerStatus) -> bool:
    """Return whether the process can still become, or stay, useful."""
    return status.state != "left"


def is_ready(status: FollowerStatus) -> bool:
    """Return whether the ranks of this node run, with all their memory reserved."""
    has_locked = bool(status.ranks) and all(rank.is_locked for rank in status.ranks)
    is_lost = any(rank.fatal_error for rank in status.ranks)
    return status.state == "running" and status.is_connected and has_locked and not is_lost


def reason(status: FollowerStatus) -> str:
    """Return, for people, why it is not ready, or what it does."""
    if status.state == "running":
        return f"{'running' if is_ready(status) else 'starting'} generation {status.generation}"
    found = _REASONS.get(status.state, status.state)
    return f"{found}: {status.problem}" if status.problem else found


def follower_routes(status: Callable[[], FollowerStatus]) -> list[Route]:
    """Return the routes `/livez`, `/readyz`, `/health`, `/ping` and `/statusz` of a follower."""

    def short(
        path: str,
        answer: Callable[[FollowerStatus], bool],
        *,
        methods: tuple[str, ...] = ("GET", "HEAD"),
    ) -> Route:
        async def endpoint(_request: Request) -> Response:
            now = status()
            return reply(now.state, _report(now, is_full=False), 200 if answer(now) else 503)

        return Route(path, endpoint, methods=methods)

    async def statusz(_request: Request) -> Response:
        now = status()
        return reply(now.state, _report(now, is_full=True), 200)

    return [
        short("/livez", is_alive),
        short("/readyz", is_ready),
        short("/health", is_ready),
        # As on the head, SageMaker's health check posts here.
        short("/ping", is_ready, methods=("GET", "HEAD", "POST")),
        Route("/statusz", statusz, methods=("GET", "HEAD")),
    ]


def _report(status: FollowerStatus, *, is_full: bool) -> dict[str, Any]:
    known: dict[str, Any] = {
        "state": status.state,
        "reason": reason(status),
        "node": status.node,
        "generation": status.generation,
    }
    if not is_full:
        return known
    known["holdfast_version"] = __version__
    known["head"] = status.head
    known["is_connected"] = status.is_connected
    known["problem"] = status.problem
    known["facts"] = dict(status.facts)
    known["memory_available_bytes"] = psutil.virtual_memory().available
    return known | rank_report(
        replace(rank, fatal_error=IN_LOG) if rank.fatal_error else rank for rank in status.ranks
    )
