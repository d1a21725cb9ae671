"""`python attack_target.py bare|front`: a server to attack, which prints its port.

`bare` is a uvicorn application as one writes it first, `front` the same behind our front door. Both
import the same modules, so that their memory differs by what they do.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import MutableMapping
from typing import Any

import uvicorn
import uvloop

from holdfast.api.admission import Admission
from holdfast.api.gate import Gate
from holdfast.api.health import health_routes
from holdfast.api.limits import Limits
from holdfast.api.router import OwnRoutes
from holdfast.listener.connection_table import connection_limit
from holdfast.listener.server import bound_socket, listening
from holdfast.settings import LimitSettings, ListenSettings
from holdfast.telemetry.counters import Refusals
from inner_app import View
from sample_status import a_status

LOCAL = ListenSettings(host="127.0.0.1", port=0, has_access_log=False, uvicorn_log_level="critical")


async def bare(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    """Reads a body whole and parses it, as vLLM's routes do, and answers."""
    if scope["type"] == "lifespan":
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})
        return
    body, status, has_more = bytearray(), 200, scope["method"] == "POST"
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    try:
        json.loads(bytes(body) or b"{}")
    except (ValueError, RecursionError):
        status = 400
    headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


async def serve_bare() -> None:
    """Serve until killed, as uvicorn does by itself."""
    connection_limit(None)
    with bound_socket(LOCAL) as sock:
        print(sock.getsockname()[1], flush=True)  # noqa: T201 - to the process that attacks
        config = uvicorn.Config(bare, http="httptools", access_log=False, log_level="critical")
        await uvicorn.Server(config).serve([sock])


async def serve_front() -> None:
    """Serve until killed, with everything that a request passes except vLLM."""
    refusals = Refusals()
    admission = Admission(View(), probe_token="", refusals=refusals)
    limits = Limits(Gate(bare, admission), LimitSettings(), refusals, is_probe=admission.is_probe)
    routes = health_routes(a_status, queue=lambda: (0, 0))
    door = OwnRoutes(routes, limits)
    with bound_socket(LOCAL) as sock:
        async with listening(door, sock, LOCAL, limits=LimitSettings(), refusals=refusals):
            print(sock.getsockname()[1], flush=True)  # noqa: T201 - to the process that attacks
            await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_bare() if sys.argv[1] == "bare" else serve_front())
