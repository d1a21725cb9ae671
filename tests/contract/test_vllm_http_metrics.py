"""The front end counts HTTP requests as `vllm serve` does, in place of vLLM's application."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import HTTPException
from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_fastapi_instrumentator import metrics as instrumentator_metrics
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from vllm.exceptions import VLLMNotFoundError, VLLMServerError, VLLMValidationError

from asgi_server import DEADLINE_SECONDS, serving
from holdfast.api.metrics import HttpCounts
from holdfast.api.request_log import RequestLog
from holdfast.api.router import OwnRoutes
from holdfast.engine.launch.arguments import make_arg_parser
from holdfast.engine.openai_app import put_frequent_first, without_instrumentator
from holdfast.patches.request_bodies import refuse_wrong_bodies
from holdfast.telemetry.collector import OwnRegistry

RAISED: dict[str, BaseException] = {
    "/http_400": HTTPException(400, "bad request"),
    "/http_404": HTTPException(404, "not found"),
    "/validation": VLLMValidationError("bad parameter", parameter="temperature"),
    "/not_found": VLLMNotFoundError("model not found"),
    "/server_error": VLLMServerError("failed"),
    "/value": ValueError("invalid"),
    "/type": TypeError("wrong type"),
    "/overflow": OverflowError("too large"),
    "/not_implemented": NotImplementedError("not supported"),
    "/runtime": RuntimeError("unexpected"),
}


def _build(*, counts_itself: bool) -> Any:
    from vllm.entrypoints.launchers.app import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m"])
    if counts_itself:
        return build_app(arguments, ("generate",), None)
    with without_instrumentator():
        return build_app(arguments, ("generate",), None)


@pytest.fixture(scope="module")
def app() -> Any:
    """vLLM's application as we build it, with a route for each way to fail."""
    built = _build(counts_itself=False)
    refuse_wrong_bodies(built)
    put_frequent_first(built.router.routes)

    def fail(request: Request) -> None:
        raise RAISED[request.url.path]

    for path in RAISED:
        built.get(path)(fail)

    @built.get("/number")  # type: ignore[untyped-decorator]  # FastAPI's, read as Any
    def number(n: int) -> dict[str, int]:
        return {"n": n}

    return built


def _asked(app: Any, path: str) -> tuple[int, CollectorRegistry]:
    """What was answered, and the page after it."""
    counts = HttpCounts()
    counts.add_routes(app.routes)
    registry = OwnRegistry(counts)

    async def ask() -> int:
        front = RequestLog(OwnRoutes([], app), is_on=False, on_finished=counts.count)
        async with serving(front) as client:
            answer = await client.get(path)
            name = "http_request_duration_highr_seconds_count"
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not registry.get_sample_value(name):  # noqa: ASYNC110 - it has left before
                    await asyncio.sleep(0.001)
        return answer.status_code

    return asyncio.run(ask()), registry


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/http_400", 400),
        ("/http_404", 404),
        ("/validation", 400),
        ("/not_found", 404),
        ("/server_error", 500),
        ("/value", 400),
        ("/type", 400),
        ("/overflow", 400),
        ("/not_implemented", 501),
        ("/runtime", 500),
        ("/number?n=x", 400),
        ("/number?n=1", 200),
    ],
)
def test_what_vllm_answers_is_counted_as_it_was_answered(app: Any, path: str, status: int) -> None:
    """Once, by the class of the status that the client got, whatever was raised on the way."""
    answered, page = _asked(app, path)
    assert answered == status
    labels = {"method": "GET", "handler": path.partition("?")[0], "status": f"{status // 100}xx"}
    assert page.get_sample_value("http_requests_total", labels) == 1
    assert page.get_sample_value("http_request_duration_highr_seconds_count") == 1


def test_vllm_does_not_count_beside_us() -> None:
    """Neither a layer of its application nor a family on its page is left of the library's."""
    assert _what_counts(counts_itself=False) == (False, set())


def test_vllm_counts_when_it_is_built_by_itself() -> None:
    """What is taken from it is there: another vLLM may count by other means."""
    counts, _ = _what_counts(counts_itself=True)
    assert counts


def _what_counts(*, counts_itself: bool) -> tuple[bool, set[Any]]:
    """Whether the application has the library's layer, and what it put on the page."""
    before = set(REGISTRY._collector_to_names)
    app = _build(counts_itself=counts_itself)
    added = set(REGISTRY._collector_to_names) - before
    for collector in added:
        REGISTRY.unregister(collector)
    layers = {layer.cls.__module__.partition(".")[0] for layer in app.user_middleware}
    return "prometheus_fastapi_instrumentator" in layers, added


def test_the_families_are_those_of_the_library() -> None:
    """Names, kinds, labels and buckets are what vLLM's dashboards read."""
    theirs = CollectorRegistry()
    instrument: Any = instrumentator_metrics.default(registry=theirs)
    request = Request({"type": "http", "method": "GET", "headers": []})
    instrument(
        instrumentator_metrics.Info(request, Response(b"four"), "GET", "/v1/models", "2xx", 0.2)
    )
    ours = HttpCounts()
    ours.add_routes([Route("/v1/models", lambda _request: Response())])
    scope = {"method": "GET", "path": "/v1/models"}
    ours.count(scope, 200, duration_seconds=0.2, sent_bytes=len(b"four"))
    assert _families(ours.collect()) == _families(theirs.collect())


def _families(families: Any) -> dict[tuple[str, str], set[tuple[str, frozenset[Any], float]]]:
    def samples(family: Metric) -> set[tuple[str, frozenset[Any], float]]:
        return {
            (sample.name, frozenset(sample.labels.items()), sample.value)
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    return {(family.name, family.type): samples(family) for family in families}
