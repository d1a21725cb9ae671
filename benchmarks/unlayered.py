"""`holdfast serve` without the layers between the listener and vLLM's application, for a benchmark.

Our own routes are there, and the probe is known by its token; nobody else is asked for anything.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast import cli, serve
from holdfast.api.router import OwnRoutes
from holdfast.application import Application
from holdfast.request_context import REQUEST, RequestContext


class _Unlayered(Application):
    def _layers(self) -> ASGIApp:
        async def behind(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "lifespan":
                REQUEST.set(RequestContext(is_probe=self._admission.is_probe(scope)))
            await self._engine_app(scope, receive, send)

        return OwnRoutes(self._routes(), behind)


if __name__ == "__main__":
    serve.Application = _Unlayered  # type: ignore[attr-defined]  # it imports it too
    cli.main()
