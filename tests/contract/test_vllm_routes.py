"""No route of vLLM's is reached without a key: all that there are, in every way to write them.

A route that a new vLLM adds is in here by itself.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.routing import Match, Mount
from starlette.types import Receive, Scope, Send
from vllm.tasks import FRONTEND_TASKS, GENERATION_TASKS, POOLING_TASKS

from asgi_server import DEADLINE_SECONDS, serving
from holdfast.api.admission import Admission
from holdfast.api.auth import METRICS_PATH, METRICS_PATHS, OPEN_PATHS, KeyCheck, Keys
from holdfast.api.gate import Gate
from holdfast.api.health import health_routes
from holdfast.api.load import routing_route
from holdfast.api.metrics import metrics_route
from holdfast.api.router import OPERATOR_PATHS, OwnRoutes, is_for_operators
from holdfast.cli import parse_serve
from holdfast.engine.openai_app import put_frequent_first
from holdfast.request_context import FREQUENT_PATHS
from holdfast.settings import KeySettings
from holdfast.telemetry.counters import Refusals
from holdfast.telemetry.load import Load
from holdfast.telemetry.routing import Routing
from inner_app import View
from sample_status import a_status

KEY = "the-api-key"
PREFIX = "/prefix"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}
CLIENT_PATHS = {
    "/v1/models",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/responses",
    "/v1/responses/render",
    "/v1/responses/response_id",
    "/v1/responses/response_id/cancel",
    "/v1/systemone",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/realtime",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v2/embed",
    "/v2/rerank",
    "/inference/v1/generate",
    "/classify",
    "/pooling",
    "/rerank",
    "/score",
    "/generative_scoring",
    "/invocations",
    "/tokenize",
    "/detokenize",
    "/version",
    "/load",
    "/kv_event_sources",
    "/docs",
    "/docs/oauth2-redirect",
    "/redoc",
    "/openapi.json",
}
"""What a client may ask with its key: it is answered, or told what concerns every client."""
LEFT_OPEN_BY_VLLM = {"/tokenize", "/invocations", "/generative_scoring", "/scale_elastic_ep"}


@pytest.fixture(scope="module")
def vllm_app() -> Iterator[Any]:
    """vLLM's own application with every route it can have, those for developers too."""
    from vllm.entrypoints.launchers.app import build_app

    from holdfast.engine.launch.arguments import parse

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.delenv("VLLM_WORKER_MULTIPROC_METHOD")  # else forks are ruled out, for good
        patch.delenv("VLLM_API_KEY", raising=False)
        namespace = parse(parse_serve(["model", "--api-key", KEY], {}))
        namespace.enable_fault_tolerance = True
        tasks = (*GENERATION_TASKS, *POOLING_TASKS, *FRONTEND_TASKS)
        model: Any = SimpleNamespace(get_pooling_task=lambda _tasks: "embed")
        level = logging.root.level
        yield build_app(namespace, tasks, model)
        logging.root.setLevel(level)  # which it raises, so that other tests would see no warning


@pytest.fixture(scope="module")
def paths(vllm_app: Any) -> list[str]:
    """The path of every route, with words for its parameters."""

    def walk(routes: Any, above: str = "") -> Iterator[str]:
        for route in routes:
            yield above + route.path
            if isinstance(route, Mount):
                yield f"{above}{route.path}/below"
                yield from walk(route.routes or (), above + route.path)

    found = {path.replace("{", "").replace("}", "") for path in walk(vllm_app.routes)}
    assert found >= LEFT_OPEN_BY_VLLM | {"/score", "/sleep", "/v1/realtime", "/openapi.json"}
    return sorted(found)


def _variants(path: str) -> Iterator[str]:
    """The same path as a client may write it to be taken for another."""
    letter = path[1:2] or "x"
    yield from (path, f"{path}/", f"{path}//", f"/{path}", f"{PREFIX}{path}", f"{path}?a=b")
    yield from (f"/v1/..{path}", f"/livez/..{path}", f"/.{path}", f"/livez%2F..{path}")
    yield f"/%{ord(letter):02x}{path[2:]}"
    yield f"/%{ord(letter):02X}{path[2:]}%2F"
    yield f"/{letter.swapcase()}{path[2:]}"
    yield f"/{path[1:].replace('/', '%2F')}"
    yield from (f"{path}%0A", f"{path}%00", f"{path};x", f"http://other{path}")


class Spied:
    """Our layers with a spy in the place of vLLM's application."""

    def __init__(self, keys: Keys | None = None) -> None:
        self.reached = 0
        self.scopes: list[Scope] = []
        refusals = Refusals()
        admission = Admission(View(), probe_token="", refusals=refusals)
        routes = [
            *health_routes(a_status, queue=lambda: (0, 0)),
            metrics_route(lambda: ()),
            routing_route(lambda: Routing(Load(), is_ready=True)),
        ]
        front = OwnRoutes(routes, Gate(self._spy, admission), root_path=PREFIX)
        keys = keys or Keys.read((KEY,), KeySettings(admin_api_key="another"))
        is_probe = admission.is_probe
        self.app = KeyCheck(front, keys, refusals, is_probe=is_probe, root_path=PREFIX)

    async def _spy(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        self.reached += 1
        self.scopes.append(scope)
        kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
        headers = [(b"content-length", b"0")]
        await send({"type": f"{kind}.start", "status": 299, "headers": headers})
        await send({"type": f"{kind}.body", "body": b""})

    def statuses(self, asked: list[Asked], headers: dict[str, str]) -> list[int]:
        """The status of each request, sent as it is over one connection after the other."""

        async def answered() -> list[int]:
            async with serving(self.app) as client:
                address = (client.base_url.host, client.base_url.port or 0)
                async with asyncio.timeout(DEADLINE_SECONDS * 2):
                    return await _statuses(address, asked, headers)

        return asyncio.run(answered())


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it stands on the wire."""

    method: str
    target: str
    is_upgrade: bool = False
    route: str = ""
    """The path of the route that it is written for."""


async def _statuses(
    address: tuple[str, int], asked: list[Asked], headers: dict[str, str]
) -> list[int]:
    found: list[int] = []
    while len(found) < len(asked):
        reader, writer = await asyncio.open_connection(*address)
        try:
            for one in asked[len(found) :]:
                writer.write(_head(one, headers))
                answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                found.append(int(answer.split()[1]))
                if one.is_upgrade or "connection: close" in answer:
                    break
                length = re.search(r"content-length: (\d+)", answer)
                await reader.readexactly(int(length[1]) if length and one.method != "HEAD" else 0)
        finally:
            writer.close()
            await writer.wait_closed()
    return found


def _head(one: Asked, headers: dict[str, str]) -> bytes:
    all_headers = headers | (UPGRADE if one.is_upgrade else {})
    lines = [f"{name}: {value}" for name, value in all_headers.items()]
    return "\r\n".join([f"{one.method} {one.target} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def _is_ours(asked: Asked) -> bool:
    """Whether the front door answers it itself, by the letter of the table of routes."""
    target = asked.target.removeprefix("http://other").partition("?")[0]
    path = httpx.URL(f"http://x{target}").path if "%" in target else target
    path = path.removeprefix(PREFIX).rstrip("/")
    return not asked.is_upgrade and path in OPEN_PATHS | METRICS_PATHS


def test_no_route_is_reached_without_a_key(paths: list[str]) -> None:
    """Every route, method and variant is 401; with the key each of a client's goes on to vLLM."""
    asked = [
        *(Asked(method, path, route=path) for path in paths for method in METHODS),
        *(
            Asked(method, variant, route=path)
            for path in paths
            for variant in _variants(path)
            for method in ("GET", "POST")
        ),
    ]
    asked = [one for one in asked if not _is_ours(one)]
    without, with_key = Spied(), Spied()
    refused = without.statuses(asked, {})
    assert [one for one, status in zip(asked, refused, strict=True) if status != 401] == []
    assert without.reached == 0
    # Starlette takes a line feed for the end, so our own routes may match, too.
    asked = [one for one in asked if not one.target.endswith("%0A")]
    passed = with_key.statuses(asked, {"Authorization": f"Bearer {KEY}"})
    may_be = {one: {299, 403} if is_for_operators(one.route) else {299} for one in asked}
    found = zip(asked, passed, strict=True)
    assert [one for one, status in found if status not in may_be[one]] == []
    assert with_key.reached == passed.count(299)


def test_each_route_is_a_clients_or_an_operators(paths: list[str]) -> None:
    """One that a new vLLM adds is read, and put into the one list or the other."""
    ours = OPEN_PATHS | METRICS_PATHS | {f"{METRICS_PATH}/below"}
    assert CLIENT_PATHS.isdisjoint(OPERATOR_PATHS)
    unread = set(paths) - ours - CLIENT_PATHS
    assert [path for path in sorted(unread) if not is_for_operators(path)] == []
    assert CLIENT_PATHS - set(paths) == set()


def test_no_route_for_operators_is_reached_with_the_key_of_a_client(vllm_app: Any) -> None:
    """In whatever way it is written that vLLM would take for it; nor without any keys at all."""
    asked = [
        Asked(method, variant, route=path)
        for path in sorted({*OPERATOR_PATHS, "/adapters/name"})
        for variant in _variants(path)
        for method in ("GET", "POST", "OPTIONS")
    ]
    preflight = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
    operating = [route for route in vllm_app.routes if is_for_operators(route.path)]
    assert len(operating) > 20
    for spied, headers in (
        (Spied(), {"Authorization": f"Bearer {KEY}"}),
        (Spied(), {"Authorization": f"Bearer {KEY}", **preflight}),
        (Spied(Keys.read((), KeySettings())), {}),
    ):
        spied.statuses(asked, headers)
        reached = [{**scope, "root_path": PREFIX} for scope in spied.scopes]
        taken = [
            scope["path"]
            for scope in reached
            for route in operating
            if route.matches(scope)[0] is not Match.NONE
        ]
        assert taken == []


def test_an_admin_key_reaches_the_routes_for_operators() -> None:
    """Each as vLLM has it, also where clients need no key."""
    asked = [Asked("POST", path) for path in sorted({*OPERATOR_PATHS, "/adapters/name"})]
    for api_keys in ((KEY,), ()):
        spied = Spied(Keys.read(api_keys, KeySettings(admin_api_key="another")))
        assert set(spied.statuses(asked, {"Authorization": "Bearer another"})) == {299}


def test_no_route_is_reached_by_a_websocket_without_a_key(paths: list[str]) -> None:
    """An upgrade is accepted to be closed with a code, whatever the path."""
    asked = [Asked("GET", path, is_upgrade=True) for path in paths]
    spied = Spied()
    assert set(spied.statuses(asked, {})) == {101}
    assert spied.reached == 0


def test_vllm_checks_no_key_itself(vllm_app: Any) -> None:
    """It was given the flag, and would not know a key that a file has made right since."""
    names = {middleware.cls.__name__ for middleware in vllm_app.user_middleware}
    assert "CORSMiddleware" in names
    assert "AuthenticationMiddleware" not in names


def test_what_is_asked_for_the_most_is_looked_for_first(vllm_app: Any) -> None:
    """Only the order changes, and no route before it took any of these paths."""
    routes = list(vllm_app.router.routes)
    ordered = list(routes)
    put_frequent_first(ordered)
    assert sorted(map(id, ordered)) == sorted(map(id, routes))
    found = [route.path for route in ordered[: len(FREQUENT_PATHS)]]
    assert frozenset(found) == FREQUENT_PATHS
    for path in FREQUENT_PATHS:
        scope = {"type": "http", "path": path, "method": "POST", "root_path": "", "headers": []}
        takes = [route.path for route in routes if route.matches(scope)[0] is not Match.NONE]
        assert takes == [path]
