"""What a server says of itself is taken only in the shape that it must have."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asgi_server import serving
from holdfast.records import Configuration
from holdfast.verify.records import Server
from holdfast.verify.survey import survey
from holdfast.verify.target import Target
from openai_double import OpenAIDouble


def surveyed(status: object) -> Server:
    """What is known of a server with such a `/statusz`."""
    app = OpenAIDouble()

    async def statusz(_request: Request) -> Response:
        return JSONResponse(status)

    others = [one for one in app.router.routes if getattr(one, "path", "") != "/statusz"]
    app.router.routes = [*others, Route("/statusz", statusz)]

    async def known() -> Server:
        async with serving(app) as client, Target(str(client.base_url)) as target:
            return await survey(target)

    return asyncio.run(known())


def status_with(configuration: object) -> dict[str, Any]:
    """The least of what Holdfast says."""
    return {"state": "READY", "engine": {}, "probe": {}, "configuration": configuration}


def test_the_configuration_is_what_holdfast_says() -> None:
    """A later version may say more than this one knows."""
    told = {**asdict(Configuration(image="registry/holdfast:1")), "weather": "fine"}
    assert surveyed(status_with(told)).configuration == Configuration(image="registry/holdfast:1")


@pytest.mark.parametrize(
    "told", [None, [], {"flags": 1}, {"files": [{"name": 1}]}, {"versions": {"vllm": None}}]
)
def test_a_configuration_of_another_shape_is_not_known(told: object) -> None:
    """The server is verified all the same."""
    server = surveyed(status_with(told))
    assert server.configuration is None
    assert server.holdfast is not None


@pytest.mark.parametrize("status", [[], {}, {"state": "READY"}, "READY"])
def test_another_servers_status_is_not_that_of_holdfast(status: object) -> None:
    """Whatever it has at that address."""
    server = surveyed(status)
    assert server.holdfast is None
    assert "holdfast" not in server.abilities
