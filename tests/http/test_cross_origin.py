"""What web pages of other origins may read: with `--allowed-origins`, all but answers to admins."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from asgi_server import serving
from holdfast.api.admission import Admission
from holdfast.api.auth import KeyCheck, Keys
from holdfast.api.cross_origin import READABLE_HEADERS, ReadableByPages
from holdfast.api.gate import Gate
from holdfast.api.keyring import Keyring
from holdfast.lifecycle.states import State
from holdfast.settings import ListenSettings
from holdfast.telemetry.counters import Refusals
from inner_app import InnerApp, View

PAGE = "https://chat.example.com"
ALLOWED = "access-control-allow-origin"
EXPOSED = "access-control-expose-headers"
ONE_PAGE = ListenSettings(allowed_origins=(PAGE,))
NO_PAGE = ListenSettings()
EVERY_PAGE = ListenSettings(allowed_origins=("*",))
WITH_KEYS = Keys(Keyring(("key",)), Keyring(("admin",)))
WITHOUT_KEYS = Keys(Keyring(()), Keyring(()))
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization",
}


def _front(state: State, listen: ListenSettings, keys: Keys) -> ASGIApp:
    """Build the layers of a server, before an application that has vLLM's own rule."""
    vllm = CORSMiddleware(
        InnerApp(),
        allow_origins=listen.allowed_origins,
        allow_credentials=listen.allows_credentials,
        allow_methods=listen.allowed_methods,
        allow_headers=listen.allowed_headers,
    )
    refusals = Refusals()
    gate = Gate(vllm, Admission(View(state), probe_token="", refusals=refusals))
    check = KeyCheck(gate, keys, refusals, is_probe=lambda _: False)
    return ReadableByPages(check, listen)


def _ask(
    headers: dict[str, str],
    path: str = "/v1/whoami",
    method: str = "GET",
    *,
    state: State = State.STARTING,
    listen: ListenSettings = ONE_PAGE,
    keys: Keys = WITH_KEYS,
) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with serving(_front(state, listen, keys)) as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize(("key", "status"), [("key", 503), ("wrong", 401)])
def test_a_refusal_can_be_read_by_a_page_that_is_allowed(key: str, status: int) -> None:
    """Otherwise it would see a network failure, and not when to try again."""
    answer = _ask({"origin": PAGE, "authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.headers[ALLOWED]) == (status, PAGE)
    assert answer.headers["vary"] == "Origin"
    assert "retry-after" in answer.headers[EXPOSED]


@pytest.mark.parametrize("headers", [{"origin": "https://other.example.com"}, {}])
def test_a_refusal_can_be_read_by_no_other_page(headers: dict[str, str]) -> None:
    """Nor does a client without an origin get the headers."""
    assert ALLOWED not in _ask(headers).headers


@pytest.mark.parametrize(("origin", "status"), [(PAGE, 200), ("https://other.example.com", 400)])
def test_a_preflight_is_answered_while_the_gate_is_closed(origin: str, status: int) -> None:
    """A browser sends the request itself only after that."""
    answer = _ask({"origin": origin, **PREFLIGHT}, method="OPTIONS")
    assert answer.status_code == status
    assert answer.headers.get(ALLOWED) == (origin if origin == PAGE else None)
    assert answer.headers["access-control-allow-headers"] == "authorization"


@pytest.mark.parametrize("listen", [ONE_PAGE, EVERY_PAGE])
@pytest.mark.parametrize("origin", [PAGE, "https://other.example.com"])
def test_an_answer_of_vllm_has_its_headers_once(listen: ListenSettings, origin: str) -> None:
    """They are those that vLLM gave it, and the one that it does not give."""
    headers = {"origin": origin, "authorization": "Bearer key"}
    answer = _ask(headers, state=State.READY, listen=listen)
    assert answer.text == "inner 0"
    expected = {ONE_PAGE: [PAGE] if origin == PAGE else [], EVERY_PAGE: ["*"]}[listen]
    assert answer.headers.get_list(ALLOWED) == expected
    assert answer.headers.get_list("vary") == ["Origin"]
    readable = answer.headers.get_list(EXPOSED)
    assert readable == [", ".join(READABLE_HEADERS)] * len(expected)


def test_the_flags_of_vllm_hold_for_our_answers() -> None:
    """Of methods, headers and credentials."""
    listen = ListenSettings(
        allowed_origins=(PAGE,),
        allowed_methods=("POST",),
        allowed_headers=("x-one",),
        allows_credentials=True,
    )
    answer = _ask({"origin": PAGE, **PREFLIGHT}, method="OPTIONS", listen=listen)
    assert answer.status_code == 400
    assert answer.headers["access-control-allow-methods"] == "POST"
    assert "x-one" in answer.headers["access-control-allow-headers"]
    assert answer.headers["access-control-allow-credentials"] == "true"


@pytest.mark.parametrize("path", ["/admin/drain", "/pause", "/admin/drain/"])
@pytest.mark.parametrize("more", [{}, PREFLIGHT])
def test_no_page_may_use_the_routes_of_admins(path: str, more: dict[str, str]) -> None:
    """Whatever its origin is."""
    answer = _ask({"origin": PAGE, **more}, path, "OPTIONS", listen=EVERY_PAGE)
    assert answer.status_code == 401
    assert ALLOWED not in answer.headers


@pytest.mark.parametrize("keys", [WITH_KEYS, WITHOUT_KEYS])
def test_a_preflight_is_answered_if_no_page_is_allowed(keys: Keys) -> None:
    """It carries no key, so neither it nor its body may wait at a closed gate."""
    answer = _ask({"origin": PAGE, **PREFLIGHT}, method="OPTIONS", listen=NO_PAGE, keys=keys)
    assert (answer.status_code, answer.text) == (400, "Disallowed CORS origin")
    assert ALLOWED not in answer.headers


def test_an_answer_gets_no_header_if_no_page_is_allowed() -> None:
    """No page may read it."""
    answer = _ask({"origin": PAGE}, listen=NO_PAGE)
    assert answer.status_code == 401
    assert [name for name in answer.headers if name.startswith("access-control-")] == []
