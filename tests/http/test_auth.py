"""Closed by default: what reaches the application with which key, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from asgi_server import DEADLINE_SECONDS, serving
from counter_values import counter_values
from holdfast.api.admission import PROBE_HEADER, Admission
from holdfast.api.auth import OPEN_PATHS, KeyCheck, Keys
from holdfast.api.gate import Gate
from holdfast.api.health import health_routes
from holdfast.api.load import routing_route
from holdfast.api.metrics import metrics_route
from holdfast.api.request_log import RequestLog
from holdfast.api.router import OwnRoutes
from holdfast.errors import UsageError
from holdfast.lifecycle.states import State
from holdfast.request_context import current_request
from holdfast.settings import KeySettings
from holdfast.telemetry.counters import Refusals
from holdfast.telemetry.load import Load
from holdfast.telemetry.routing import Routing
from inner_app import InnerApp, View
from sample_status import a_status

Headers = Mapping[str, str] | Sequence[tuple[str, str]]

API, ADMIN, PROBE = "api-key-1", "admin-key-1", "the-word-of-this-start"
NO_KEYS = Keys.read((), KeySettings())
BOTH = Keys.read((API, "api-key-2"), KeySettings(admin_api_key=ADMIN))
GUARDED = Keys.read((API,), KeySettings(metrics_auth="api-key"))


class Guarded:
    """All layers in front of a small application, and what of it was reached."""

    def __init__(
        self,
        keys: Keys,
        *,
        root_path: str = "",
        state: State = State.READY,
        allowed_origins: Collection[str] = (),
    ) -> None:
        self.reached: list[str] = []
        self.names: list[str] = []
        self.inner = InnerApp()
        self.refusals = Refusals()
        admission = Admission(View(state), probe_token=PROBE, refusals=self.refusals)
        routes = [
            *health_routes(a_status, queue=lambda: (0, 0)),
            metrics_route(lambda: ()),
            routing_route(lambda: Routing(Load(), is_ready=True)),
            Route("/admin/plain", self._admin),
            Mount("/admin/mounted", self._admin_app),
        ]
        gate = Gate(self._behind, admission)
        front = OwnRoutes(routes, gate, root_path=root_path)
        is_probe = admission.is_probe
        self.app: ASGIApp = KeyCheck(
            front,
            keys,
            self.refusals,
            is_probe=is_probe,
            allowed_origins=allowed_origins,
            root_path=root_path,
        )

    async def _behind(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            self.reached.append(scope["path"])
            self.names.append(current_request().key)
        await self.inner(scope, receive, send)

    async def _admin(self, _request: object) -> PlainTextResponse:
        self.reached.append("admin")
        return PlainTextResponse("admin")

    async def _admin_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._admin(None)
        await response(scope, receive, send)

    def ask(self, *paths: str, method: str = "GET", headers: Headers = ()) -> list[httpx.Response]:
        """One request for each path, as it is written, over one real socket."""

        async def asked() -> list[httpx.Response]:
            async with serving(self.app) as client:
                return [
                    await client.request(
                        method,
                        "/",
                        headers=headers,
                        extensions={"target": path.encode()},
                    )
                    for path in paths
                ]

        return asyncio.run(asked())

    def codes(self, *paths: str, method: str = "GET", headers: Headers = ()) -> list[int]:
        """The status of each."""
        return [answer.status_code for answer in self.ask(*paths, method=method, headers=headers)]

    def status_of(self, path: str, headers: list[tuple[bytes, bytes]], kind: str = "http") -> int:
        """The status of one request without a socket, or the code that closed a WebSocket."""
        sent: list[Message] = []
        scope: Scope = {
            "type": kind,
            "method": "GET",
            "path": path,
            "query_string": b"",
            "headers": headers,
            "root_path": "",
        }

        async def receive() -> Message:
            return {"type": "websocket.connect" if kind == "websocket" else "http.request"}

        async def send(message: Message) -> None:
            sent.append(message)

        asyncio.run(_awaited(self.app(scope, receive, send)))
        return int(sent[0]["status"] if kind == "http" else sent[-1]["code"])


async def _awaited(call: Any) -> None:
    await call


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_keys_all_but_admin_is_open() -> None:
    """A server is as open as vLLM's, and nobody is an admin of it."""
    guarded = Guarded(NO_KEYS)
    assert guarded.codes("/v1/whoami", "/statusz", "/admin/plain") == [200, 200, 404]
    assert guarded.codes("/admin/plain", headers=_bearer("any")) == [404]
    assert guarded.reached == ["/v1/whoami"]


def test_with_a_key_set_a_request_without_one_gets_401() -> None:
    """Whether there is such a route or not, with an error as OpenAI's clients read it."""
    guarded = Guarded(BOTH)
    for answer in guarded.ask("/v1/whoami", "/statusz", "/docs", "/", "/no/such/path"):
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["error"]["type"] == "authentication_error"
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert guarded.reached == []


@pytest.mark.parametrize(
    ("headers", "api", "admin"),
    [
        ({}, "needs an API key: send it as", "needs the admin key: send it as"),
        ({"authorization": API}, "needs an API key: send it as", "needs the admin key: send it"),
        (_bearer("wrong"), "This API key is not known.", "This admin key is not known."),
        (_bearer(ADMIN), "This is an admin key; this route needs an API key.", ""),
    ],
)
def test_a_refusal_tells_a_wrong_key_from_a_missing_one(
    headers: dict[str, str], api: str, admin: str
) -> None:
    """All are 401 with the same headers, and whether a route exists is not told."""
    guarded = Guarded(BOTH)
    known, unknown = guarded.ask("/v1/whoami", "/no/such/path", headers=headers)
    assert known.json() == unknown.json()
    assert api in known.json()["error"]["message"]
    assert (known.status_code, known.headers["www-authenticate"]) == (401, "Bearer")
    (of_admins,) = guarded.ask("/admin/plain", headers=headers)
    assert admin in of_admins.text
    assert of_admins.status_code == (401 if admin else 200)


@pytest.mark.parametrize("state", [State.STARTING, State.FAILED])
def test_a_closed_gate_says_nothing_without_a_key(state: State) -> None:
    """401 comes before 503."""
    guarded = Guarded(BOTH, state=state)
    assert guarded.codes("/v1/whoami") == [401]
    assert guarded.codes("/v1/whoami", headers=_bearer(API)) == [503]


@pytest.mark.parametrize("given", [f"Bearer {API}", f"bearer {API}", "BEARER api-key-2"])
def test_any_api_key_lets_in(given: str) -> None:
    """Several are right at once, so that they can be changed one after the other."""
    headers = {"authorization": given}
    assert Guarded(BOTH).codes("/v1/whoami", "/statusz", headers=headers) == [200, 200]


def test_a_request_knows_the_name_of_its_key() -> None:
    """What comes after the door can tell clients apart, and has no key."""
    guarded = Guarded(BOTH)
    for key in (API, "api-key-2", API):
        guarded.ask("/v1/whoami", headers=_bearer(key))
    assert guarded.names[0] == guarded.names[2] != guarded.names[1]
    assert all(name.startswith("key-") and len(name) == 12 for name in guarded.names)


def test_a_second_header_is_refused() -> None:
    """Who stands between may have looked at the other one."""
    guarded = Guarded(BOTH)
    twice = [("authorization", f"Bearer {API}")] * 2
    assert guarded.codes("/v1/whoami", headers=twice) == [401]
    assert guarded.reached == []


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_health_needs_no_key(method: str) -> None:
    """A probe that fails for a key would end a healthy server."""
    guarded = Guarded(BOTH)
    encoded = [f"/%{ord(path[1]):02x}{path[2:]}" for path in OPEN_PATHS]
    variants = [*OPEN_PATHS, *encoded, *(f"{path}/" for path in OPEN_PATHS)]
    assert set(guarded.codes(*variants, method=method)) == {200}
    assert guarded.reached == []


def test_only_exact_health_paths_are_open() -> None:
    """A path that our own routes do not answer is closed."""
    guarded = Guarded(BOTH)
    ends = ("/x", "%0A", "%00", ";x", "%20", "/..", "%2F.", "%2e")
    longer = [f"{path}{end}" for path in ("/livez", "/health", "/metrics") for end in ends]
    others = ["//livez", "/./livez", "/x/../livez", "/v1/../metrics", "/LIVEZ", "/%2Flivez"]
    assert set(guarded.codes(*longer, *others)) == {401}
    assert guarded.reached == []


def test_the_metrics_pages_are_open_unless_they_are_closed() -> None:
    """Scrapers have no key by default; with the switch they need one, on every variant."""
    pages = ("/metrics", "/metrics/", "/%6detrics", "/metrics?x")
    paths = (*pages, "/metrics/routing", "/metrics/routing/", "/metrics/%72outing")
    assert set(Guarded(BOTH).codes(*paths)) == {200}
    closed = Guarded(GUARDED)
    assert set(closed.codes(*paths)) == {401}
    assert set(closed.codes(*paths, headers=_bearer(API))) == {200}


def test_admin_routes_need_the_admin_key() -> None:
    """Nothing is 401, an API key is 403, the word of the probe 401, and the admin key opens."""
    guarded = Guarded(BOTH)
    paths = ("/admin/plain", "/admin/plain/", "/%61dmin/plain", "/admin/mounted/deep")
    assert guarded.codes(*paths) == [401] * 4
    assert counter_values(guarded.refusals)["unauthorized"] == 4
    for answer in guarded.ask(*paths, headers=_bearer(API)):
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
    assert guarded.codes(*paths, headers={PROBE_HEADER: PROBE}) == [401] * 4
    assert guarded.reached == []
    assert guarded.codes(*paths, headers=_bearer(ADMIN)) == [200] * 4
    assert guarded.codes("/v1/whoami", headers=_bearer(ADMIN)) == [401]
    assert guarded.reached == ["admin"] * 4


def test_an_attempt_at_an_admin_route_names_who_made_it(caplog: pytest.LogCaptureFixture) -> None:
    """An API key by its name, in the request log too; others by their address."""
    keys = Keys.read(("api-key-1",), KeySettings(admin_api_key=ADMIN))
    guarded = Guarded(keys)
    guarded.app = RequestLog(guarded.app)
    with caplog.at_level("INFO", "holdfast"):
        for headers in (_bearer(API), {}, _bearer(ADMIN)):
            guarded.ask("/admin/plain?x=1", headers=headers)
        guarded.ask("/pause", headers=_bearer(API))
    name = keys.api.name_of(API.encode())
    messages = [one.message for one in caplog.records if one.name == "holdfast.admin"]
    client, stranger, operator = messages
    assert client.startswith(f"admin '/admin/plain' by {name}: refused with 403: This route")
    assert stranger.startswith("admin '/admin/plain' by an unknown client at 127.0.0.1: refused ")
    assert "refused with 401: This route" in stranger
    assert operator.startswith(f"admin '/pause' by {name}: refused with 403: This route")
    requests = [one.message for one in caplog.records if one.name == "holdfast.requests"]
    assert [f"key={name}" in line for line in requests] == [True, False, False, True]


def test_the_root_path_opens_nothing() -> None:
    """A proxy may leave it in the request or take it away: the key is the same."""
    guarded = Guarded(BOTH, root_path="/prefix")
    paths = [
        prefix + path
        for prefix in ("", "/prefix")
        for path in ("/livez", "/v1/whoami", "/admin/plain")
    ]
    assert guarded.codes(*paths, "/prefixed/livez") == [200, 401, 401] * 2 + [401]
    assert guarded.codes("/prefix/admin/plain", headers=_bearer(API)) == [403]
    assert guarded.reached == []
    assert guarded.codes("/prefix/admin/plain", headers=_bearer(ADMIN)) == [200]


def test_a_preflight_goes_no_further_without_a_key() -> None:
    """The layer before this one answers those of browsers, which cannot add a key."""
    guarded = Guarded(BOTH)
    preflight = {"origin": "http://x", "access-control-request-method": "POST"}
    for path in ("/v1/whoami", "/admin/plain"):
        assert guarded.codes(path, method="OPTIONS", headers=preflight) == [401]
    assert guarded.reached == []


def test_the_probe_needs_no_key_of_a_user() -> None:
    """Its own word opens what an API key opens; a wrong one opens nothing."""
    guarded = Guarded(BOTH, state=State.PROBING)
    assert guarded.codes("/v1/headers", headers={PROBE_HEADER: "wrong"}) == [401]
    assert guarded.codes("/v1/headers", headers={PROBE_HEADER: ""}) == [401]
    assert guarded.codes("/v1/headers", headers={PROBE_HEADER: PROBE}) == [200]
    assert guarded.reached == ["/v1/headers"]


def _websocket(guarded: Guarded, headers: Mapping[str, str], path: str = "/v1/realtime") -> Any:
    """What the server says first, or the code it closes with."""

    async def asked() -> Any:
        async with serving(guarded.app) as client:
            url = f"{str(client.base_url).replace('http', 'ws')}{path}"
            options = {"additional_headers": headers, "open_timeout": DEADLINE_SECONDS}
            async with connect(url, **options) as connection:  # type: ignore[arg-type]
                try:
                    return await connection.recv()
                except ConnectionClosed as closed:
                    return closed.rcvd.code if closed.rcvd else None

    return asyncio.run(asked())


def test_a_websocket_needs_a_key_too() -> None:
    """Without one it is closed with a code that says why, whatever its path."""
    guarded = Guarded(BOTH)
    for path in ("/v1/realtime", "/livez"):
        assert _websocket(guarded, {}, path) == 1008
    assert _websocket(guarded, _bearer(API), "/admin/plain") == 1008
    assert guarded.reached == []
    assert _websocket(guarded, _bearer(API)) == "hello"


OWN_PAGE, CHAT_PAGE = "http://gpu:8000", "https://chat.example.com"


@pytest.mark.parametrize(
    ("origins", "allowed", "is_let_in"),
    [
        ([], (), True),
        ([OWN_PAGE], (), True),
        (["https://gpu:8000"], (), True),
        ([CHAT_PAGE], [CHAT_PAGE], True),
        ([CHAT_PAGE], ["*"], True),
        ([CHAT_PAGE], (), False),
        ([CHAT_PAGE], [OWN_PAGE], False),
        (["http://gpu"], (), False),
        (["http://gpu:8000.example.com"], (), False),
        (["null"], (), False),
        ([""], (), False),
        ([OWN_PAGE, CHAT_PAGE], (), False),
    ],
)
def test_a_websocket_of_a_foreign_page_is_closed(
    origins: list[str], allowed: Collection[str], is_let_in: bool
) -> None:
    """Browsers let any page open one, also to a server without keys that only they can reach."""
    guarded = Guarded(NO_KEYS, allowed_origins=allowed)
    headers = [(b"host", b"gpu:8000"), *((b"origin", one.encode()) for one in origins)]
    code = guarded.status_of("/v1/realtime", headers, "websocket")
    assert (code, guarded.reached) == ((1000, ["/v1/realtime"]) if is_let_in else (1008, []))


def test_a_foreign_page_sees_why_its_websocket_was_closed() -> None:
    """The handshake succeeds first, since browsers do not say why one failed."""
    guarded = Guarded(NO_KEYS)
    assert _websocket(guarded, {"origin": CHAT_PAGE}) == 1008
    assert counter_values(guarded.refusals)["forbidden"] == 1


def test_a_page_with_a_key_may_be_of_any_origin() -> None:
    """Where there are keys, the key is what counts."""
    assert _websocket(Guarded(BOTH), {**_bearer(API), "origin": CHAT_PAGE}) == "hello"


def test_a_connection_survives_a_refused_upload() -> None:
    """A body that was never read does not spoil the next request of the same client."""
    guarded = Guarded(BOTH)

    async def asked() -> list[int]:
        async with serving(guarded.app) as client:
            refused = await client.post("/v1/whoami", content=b"x" * 2_000_000)
            answer = await client.get("/v1/whoami", headers=_bearer(API))
            return [refused.status_code, answer.status_code]

    assert asyncio.run(asked()) == [401, 200]


def test_an_admin_key_that_becomes_an_api_key_opens_no_admin_route(tmp_path: Path) -> None:
    """Refused at the start, and later by not being an admin's any more."""
    path = tmp_path / "keys"
    path.write_text(f"{API}\n{ADMIN}\n")
    settings = KeySettings(api_key_file=path, admin_api_key=ADMIN)
    with pytest.raises(UsageError, match="every client would be an admin") as caught:
        Keys.read((), settings)
    assert ADMIN not in caught.value.line
    both = Keys(Keys.read((ADMIN,), KeySettings()).api, BOTH.admin)
    guarded = Guarded(both)
    assert guarded.codes("/admin/plain", headers=_bearer(ADMIN)) == [403]
    assert guarded.reached == []


def test_a_closed_metrics_page_without_a_key_is_refused() -> None:
    """It would be open after all."""
    with pytest.raises(UsageError, match="--metrics-auth api-key"):
        Keys.read((), KeySettings(metrics_auth="api-key", admin_api_key=ADMIN))


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/", "/v1/messages/count_tokens"])
def test_anthropics_header_is_read_on_the_routes_of_messages(path: str) -> None:
    """Its clients send no other."""
    guarded = Guarded(BOTH)
    assert guarded.codes(path, headers={"x-api-key": "wrong"}) == [401]
    assert guarded.reached == []
    guarded.ask(path, headers={"x-api-key": API})
    assert guarded.reached == [path]


@pytest.mark.parametrize(
    "path", ["/v1/whoami", "/v1/messages/render", "/v1/messagesx", "/statusz", "/V1/messages"]
)
def test_anthropics_header_is_read_on_no_other_route(path: str) -> None:
    """What a proxy lets through for one route opens no other."""
    guarded = Guarded(BOTH)
    assert guarded.codes(path, headers={"x-api-key": API}) == [401]
    assert guarded.reached == []


def test_anthropics_header_opens_nothing_for_admins() -> None:
    """An admin key is not an API key."""
    guarded = Guarded(BOTH)
    assert guarded.codes("/admin/plain", headers={"x-api-key": ADMIN}) == [401]
    assert guarded.codes("/v1/messages", headers={"x-api-key": ADMIN}) == [401]
    assert guarded.reached == []


def test_the_usual_header_comes_before_anthropics() -> None:
    """A wrong one is not made up for, and of two of the other kind none counts."""
    guarded = Guarded(BOTH)
    wrong = {**_bearer("wrong"), "x-api-key": API}
    assert guarded.codes("/v1/messages", headers=wrong) == [401]
    assert guarded.codes("/v1/messages", headers=[("x-api-key", API)] * 2) == [401]
    assert guarded.reached == []
    guarded.ask("/v1/messages", headers={**_bearer(API), "x-api-key": "wrong"})
    assert guarded.reached == ["/v1/messages"]


def test_usage_of_keys_without_a_key_is_refused(tmp_path: Path) -> None:
    """Nothing would ever be written."""
    with pytest.raises(UsageError, match="--usage-dir was given without an API key"):
        Keys.read((), KeySettings(usage_directory=tmp_path))


_RIGHT = {API.encode(), b"api-key-2"}
_HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"authorization", b"x-api-key", PROBE_HEADER.encode(), b"cookie"]),
        st.binary()
        | st.binary().map(lambda end: b"Bearer " + end)
        | st.sampled_from([f"Bearer {ADMIN}".encode(), f"Bearer {API}".encode(), API.encode()]),
    ),
    max_size=3,
)


def _key_in(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The key by the letter of the rule: of the one header, after `Bearer` and one space."""
    found = [value for name, value in headers if name == b"authorization"]
    is_one = len(found) == 1 and found[0][:7].lower() == b"bearer "
    return found[0][7:] if is_one else b""


@pytest.mark.parametrize(
    "given",
    [
        *("", "Bearer", "Bearer ", "Bearer wrong", f"Bearer {API}2", f"Basic {API}", API),
        *(f"Bearer  {API}", f"Bearer\t{API}", f"Bearer {API},{API}", f"Bearer {ADMIN}"),
    ],
)
def test_no_other_header_lets_in(given: str) -> None:
    """Neither another scheme, nor a longer key, nor that of an admin."""
    guarded = Guarded(BOTH)
    assert guarded.status_of("/v1/whoami", [(b"authorization", given.encode())]) == 401
    assert guarded.reached == []


@given(headers=_HEADERS, kind=st.sampled_from(["http", "websocket"]))
@example(headers=[(b"authorization", b"Bearer " + b"x" * 1_000_000)], kind="http")
@example(headers=[(b"authorization", b"\xff\0Bearer")], kind="http")
def test_no_header_lets_in_but_the_key(headers: list[tuple[bytes, bytes]], kind: str) -> None:
    """Whatever bytes are sent: 401, never a failure, and nothing behind the door is reached."""
    guarded = Guarded(BOTH)
    if _key_in(headers) in _RIGHT:
        guarded.status_of("/v1/whoami", headers, "http")
        assert guarded.reached == ["/v1/whoami"]
    else:
        refused = {"http": 401, "websocket": 1008}[kind]
        assert guarded.status_of("/v1/whoami", headers, kind) == refused
        assert guarded.reached == []


_PIECES = (
    "admin",
    "plain",
    "mounted",
    "",
    ".",
    "..",
    "livez",
    "metrics",
    "%2F",
    "\n",
    "Admin",
    "v1",
)
_PATHS = st.lists(st.sampled_from(_PIECES) | st.text(max_size=3), min_size=1, max_size=5).map(
    lambda pieces: "/" + "/".join(pieces)
)


@given(path=_PATHS, headers=_HEADERS, root_path=st.sampled_from(["", "/admin", "/v1"]))
@example(path="/admin/plain\n", headers=[], root_path="")
@example(path="/admin", headers=[(b"authorization", f"Bearer {ADMIN}".encode())], root_path="")
@example(path="/admin//plain", headers=[(b"authorization", f"Bearer {API}".encode())], root_path="")
def test_no_path_leads_to_an_admin_route_without_the_admin_key(
    path: str, headers: list[tuple[bytes, bytes]], root_path: str
) -> None:
    """However it is written, and with any other key."""
    guarded = Guarded(BOTH, root_path=root_path)
    guarded.status_of(path, headers)
    key = _key_in(headers)
    assert "admin" not in guarded.reached or key == ADMIN.encode()
    may_pass = key in _RIGHT or (key == ADMIN.encode() and _is_below_admin(path, root_path))
    assert guarded.reached in ([], ["admin"]) or may_pass


def _is_below_admin(path: str, root_path: str) -> bool:
    """Where the admin key opens the door, also for what then is a route of nobody."""
    if path.startswith(f"{root_path}/"):
        path = path.removeprefix(root_path)
    return path == "/admin" or path.startswith("/admin/")
