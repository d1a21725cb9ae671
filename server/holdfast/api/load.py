"""What are routers and autoscalers told of the load? `/metrics/routing`, and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from holdfast.api.admission import Admission
from holdfast.api.auth import ROUTING_PATH
from holdfast.lifecycle.states import SERVING
from holdfast.telemetry.exposition import OPENMETRICS, format_for
from holdfast.telemetry.load import Load
from holdfast.telemetry.routing import Routing, routing_page


class LoadView:
    """The load of the server, as each page shows it. Any thread may ask."""

    def __init__(self, admission: Admission, engine_load: Callable[[], Load]) -> None:
        """Take `engine_load`, which returns what waits behind the gate and what the engine has."""
        self._admission = admission
        self._engine_load = engine_load

    def now(self) -> Load:
        """Return the load as it is."""
        load = self._engine_load()
        return replace(load, held=load.held + self._admission.held)

    def shown(self) -> Load:
        """Return the load for vLLM's gauges: saturated while a server that was ready is not.

        A server that starts is shown as it is: routers do not send to it yet, and an autoscaler
        that took it for full would start the next one.
        """
        supervisor = self._admission.supervisor
        is_closed = supervisor.has_been_ready and supervisor.state not in SERVING
        return self.now().saturated() if is_closed else self.now()

    def routing(self) -> Routing:
        """Return what routers are told."""
        supervisor = self._admission.supervisor
        now = Routing(self.now(), supervisor.state in SERVING, supervisor.proven_tokens)
        if (facts := supervisor.facts) is None:
            return now
        return replace(
            now,
            kv_block_tokens=facts.kv_block_tokens,
            kv_blocks=facts.kv_blocks,
            max_loras=facts.max_loras,
        )


class _RoutingPage:
    """Answers each request on the event loop: a page takes less time than a thread's start."""

    def __init__(self, now: Callable[[], Routing]) -> None:
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepts = [value for name, value in scope["headers"] if name == b"accept"]
        content_type = format_for(b",".join(accepts).decode("latin-1")).content_type
        page = routing_page(self._now(), is_openmetrics=content_type.startswith(OPENMETRICS))
        response = Response(page, headers={"content-type": content_type})
        await response(scope, receive, send)


def routing_route(now: Callable[[], Routing]) -> Route:
    """Return the route of the page for routers."""
    return Route(ROUTING_PATH, _RoutingPage(now), methods=("GET", "HEAD"))
