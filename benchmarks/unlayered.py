"""`holdfast serve` without the layers between the listener and vLLM's application, for a benchmark.

Our own routes are there, and the probe is known by its token; nobody else is asked for anything.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast import app, cli
from holdfast.api.front import FrontDoor
from holdfast.engine.tracked import REQUEST, Tracked


class _Unlayered(app._Application):  # noqa: SLF001 - a benchmark of what it is made of
    def _layers(self) -> ASGIApp:
        async def behind(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "lifespan":
                REQUEST.set(Tracked(is_probe=self._admission.is_probe(scope)))
            await self._engine_app(scope, receive, send)

        return FrontDoor(self._routes(), behind)


if __name__ == "__main__":
    app._Application = _Unlayered  # type: ignore[misc]  # noqa: SLF001 - as above
    cli.main()
