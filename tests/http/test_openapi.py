"""The OpenAPI document: vLLM's, with our routes, the key and what the front end answers."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from asgi_server import serving
from holdfast.api.health import health_routes
from holdfast.api.load import routing_route
from holdfast.api.metrics import metrics_route
from holdfast.api.openapi import complete, publish
from holdfast.errors import openai_error_body
from holdfast.status_page.feed import Feed
from holdfast.status_page.shell import StaticFiles, shell_routes
from holdfast.status_page.stream import stream_route
from holdfast.telemetry.load import Load
from holdfast.telemetry.routing import Routing
from sample_status import a_status
from scripted_page import no_text


class Question(BaseModel):
    """A body."""

    text: str


def _vllm(**options: Any) -> FastAPI:
    """An application made as vLLM's is, of two routes."""
    app = FastAPI(**options)

    @app.post("/v1/ask", responses={400: {"model": Question}})
    async def ask(question: Question) -> Question:
        return question

    @app.get("/health")
    async def health() -> None:
        pass

    return app


def _complete(document: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    given = {"version": "1", "has_keys": True, **options}
    return complete(document or _vllm().openapi(), **given)


def _get(app: FastAPI, path: str, **options: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with serving(app) as client:
            return await client.get(path, **options)

    return asyncio.run(ask())


def test_every_operation_has_the_error_of_openai() -> None:
    """In place of FastAPI's 422; what vLLM says of itself stays."""
    document = _complete()
    responses = document["paths"]["/v1/ask"]["post"]["responses"]
    assert set(responses) == {"200", "400", "default"}
    assert responses["default"] == {"$ref": "#/components/responses/OpenAIError"}
    default = document["components"]["responses"]["OpenAIError"]
    assert "Retry-After" in default["headers"]
    reference = default["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    Draft202012Validator(schema).validate(
        json.loads(openai_error_body("no", kind="server_error", status=503))
    )
    vllm_says = responses["400"]["content"]["application/json"]["schema"]["$ref"]
    assert vllm_says.endswith("/Question")


def test_every_route_of_ours_is_documented() -> None:
    """With its methods, and in place of vLLM's route of the same path."""
    document = _complete()
    ours = [
        *health_routes(a_status, queue=lambda: (0, 0)),
        metrics_route(lambda: ()),
        routing_route(lambda: Routing(Load(), is_ready=True)),
        stream_route(Feed(dict)),
        *(route for route in shell_routes(StaticFiles.read(), no_text) if "{" not in route.path),
    ]
    for route in ours:
        methods = {method.lower() for method in route.methods or ()} - {"head"}
        assert set(document["paths"][route.path]) == methods
    assert document["paths"]["/health"]["get"]["security"] == []


def test_a_page_that_is_off_is_not_documented() -> None:
    """Nobody looks for what is not there."""
    both = {"/ui", "/statusz/stream"}
    assert both & _complete()["paths"].keys() == both
    assert both & _complete(has_page=False)["paths"].keys() == set()


@pytest.mark.parametrize(("has_keys", "is_optional"), [(True, False), (False, True)])
def test_the_key_is_needed_where_one_is_set(has_keys: bool, is_optional: bool) -> None:
    """A server without keys takes requests with and without one."""
    document = _complete(has_keys=has_keys)
    assert ({} in document["security"]) is is_optional
    assert document["components"]["securitySchemes"]["api_key"]["scheme"] == "bearer"


@pytest.mark.parametrize(("guards_metrics", "security"), [(False, []), (True, None)])
def test_scrapes_need_a_key_where_they_are_guarded(
    guards_metrics: bool, security: list[Any] | None
) -> None:
    """A client that was made from the document would get 401 otherwise."""
    document = _complete(guards_metrics=guards_metrics)
    for path in ("/metrics", "/metrics/routing"):
        assert document["paths"][path]["get"].get("security") == security
    assert document["paths"]["/livez"]["get"]["security"] == []


@pytest.mark.parametrize("path", ["/admin", "/admin/x", "/pause", "/adapters/{adapter_name}"])
def test_a_route_of_operators_needs_a_key_where_clients_need_none(path: str) -> None:
    """It is that of an admin."""
    other: dict[str, Any] = {"paths": {path: {"post": {}}}}
    document = _complete({"paths": {}}, has_keys=False, others=[other])
    assert document["paths"][path]["post"]["security"] == [{"api_key": []}]


def test_other_documents_stand_beside_ours() -> None:
    """Their paths, components and security are kept."""
    other = {
        "paths": {"/admin/x": {"get": {"security": [{"admin": []}], "responses": {"409": {}}}}},
        "components": {"schemas": {"X": {"type": "null"}}, "securitySchemes": {"admin": {}}},
    }
    document = _complete(others=[other])
    operation = document["paths"]["/admin/x"]["get"]
    assert operation["security"] == [{"admin": []}]
    assert set(operation["responses"]) == {"409", "default"}
    assert document["components"]["schemas"]["X"] == {"type": "null"}


def test_two_components_of_one_name_are_refused() -> None:
    """One of them would be read as the other."""
    other = {"paths": {}, "components": {"schemas": {"Question": {"type": "null"}}}}
    with pytest.raises(ValueError, match="Question"):
        _complete(others=[other])


def test_the_document_names_the_root_path() -> None:
    """What a generated client puts before each path."""
    assert _complete(root_path="/prefix")["servers"] == [{"url": "/prefix"}]


def test_the_served_document_is_built_once() -> None:
    """However many ask for it, at once and later."""
    app = _vllm()
    built: list[None] = []

    def build(document: dict[str, Any]) -> dict[str, Any]:
        built.append(None)
        return _complete(document)

    publish(app, build)

    async def ask() -> list[httpx.Response]:
        async with serving(app) as client:
            first = await asyncio.gather(*(client.get("/openapi.json") for _ in range(4)))
            return [*first, await client.get("/openapi.json")]

    answers = asyncio.run(ask())
    assert len(built) == 1
    assert len({answer.content for answer in answers}) == 1
    assert json.loads(answers[0].content)["info"]["title"] == "Holdfast"


def test_the_documentation_page_still_reads_it() -> None:
    """`/docs` asks for the same path."""
    app = _vllm()
    publish(app, partial(complete, version="1", has_keys=False))
    assert "/openapi.json" in _get(app, "/docs").text


def test_a_document_that_is_switched_off_stays_off() -> None:
    """`--disable-fastapi-docs` leaves no way to it."""
    app = _vllm(openapi_url=None)
    publish(app, _complete)
    assert _get(app, "/openapi.json").status_code == 404
