"""Which requests carry a valid key? With an API key set, every path not named here needs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.api.admin_attempts import AdminAttempts
from holdfast.api.errors import close_websocket, openai_error
from holdfast.api.keyring import Keyring
from holdfast.api.router import is_for_operators, route_path
from holdfast.errors import UsageError
from holdfast.labels import RefusalReason
from holdfast.request_context import current_request
from holdfast.settings import KeySettings
from holdfast.telemetry.counters import Refusals

OPEN_PATHS = frozenset({"/livez", "/readyz", "/startupz", "/health", "/ping"})
"""The paths of health checks, which carry no key; our own routes answer all of them."""
METRICS_PATH = "/metrics"
ROUTING_PATH = "/metrics/routing"
METRICS_PATHS = frozenset({METRICS_PATH, ROUTING_PATH})
"""The paths of scrapes, which need a key if `--metrics-auth` says so."""
MESSAGES_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Anthropic's routes, whose clients send `x-api-key`; no other route reads that header."""
ADMIN_PATH = "/admin"
WEBSOCKET_POLICY_VIOLATION = 1008


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a server. Without an API key its routes are open, except those of admins."""

    api: Keyring
    admin: Keyring
    guards_metrics: bool = False

    @classmethod
    def read(cls, api_keys: tuple[str, ...], settings: KeySettings) -> Keys:
        """Read the keys from the flags and the files.

        Raises:
            UsageError: a file cannot be read, or the flags contradict each other.
        """
        api = Keyring(api_keys, settings.api_key_file)
        given = [settings.admin_api_key] if settings.admin_api_key is not None else []
        admin = Keyring(
            given, settings.admin_api_key_file, source="--admin-api-key-file", may_limit=False
        )
        guards_metrics = settings.metrics_auth == "api-key"
        if guards_metrics and api.is_empty:
            raise UsageError(
                "--metrics-auth api-key was given without an API key.",
                remedy="add --api-key or --api-key-file.",
            )
        if settings.usage_directory is not None and api.is_empty:
            raise UsageError(
                "--usage-dir was given without an API key.",
                remedy="add --api-key or --api-key-file.",
            )
        if admin.shares_a_key_with(api):
            raise UsageError(
                "an API key is also an admin key, so every client would be an admin.",
                remedy="use another key for --admin-api-key.",
            )
        return cls(api, admin, guards_metrics)

    def broken_files(self) -> Mapping[str, bool]:
        """Return whether the file of each keyring is broken. Any thread may call it."""
        return {"api": self.api.is_broken, "admin": self.admin.is_broken}

    def short_names(self) -> tuple[str, ...]:
        """Return the names of the keys that are short enough to guess."""
        return (*self.api.short_names, *self.admin.short_names)


@dataclass(frozen=True, slots=True)
class _Refusal:
    status: int
    kind: str
    message: str
    reason: RefusalReason | None = None

    @property
    def response(self) -> Response:
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        return openai_error(self.message, kind=self.kind, status=self.status, headers=headers)


_HOW_TO_SEND = "send it as 'Authorization: Bearer KEY'."
_NO_API_KEY = _Refusal(
    401, "authentication_error", f"This route needs an API key: {_HOW_TO_SEND}", "unauthorized"
)
_UNKNOWN_API_KEY = _Refusal(
    401, "authentication_error", "This API key is not known.", "unauthorized"
)
_ADMIN_KEY = _Refusal(
    401,
    "authentication_error",
    "This is an admin key; this route needs an API key.",
    "unauthorized",
)
_NO_ADMIN_KEY = _Refusal(
    401, "authentication_error", f"This route needs the admin key: {_HOW_TO_SEND}", "unauthorized"
)
_UNKNOWN_ADMIN_KEY = _Refusal(
    401, "authentication_error", "This admin key is not known.", "unauthorized"
)
_NOT_ADMIN = _Refusal(
    403, "permission_error", "This route needs the admin key, not an API key.", "forbidden"
)
_FOREIGN_PAGE = _Refusal(
    403,
    "permission_error",
    "Web pages of this origin may not use this server: see --allowed-origins.",
    "forbidden",
)
_NO_ROUTE = _Refusal(
    404,
    "not_found_error",
    "Not found: this route needs an admin key, and none is configured (--admin-api-key).",
)


class KeyCheck:
    """ASGI layer: a request with the right key, or that needs none, reaches `app` unchanged.

    It reads the path as the router does. Health routes and the files of the status page are open;
    those of metrics are if `--metrics-auth` allows it. `/admin` and everything below it needs an
    admin key, and so do vLLM's routes for operators, even without an API key. Everything else needs
    an API key if there is one: routes of any kind and method, WebSockets, and paths that do not
    exist.
    """

    def __init__(  # noqa: PLR0913 - what tells which requests need which key
        self,
        app: ASGIApp,
        keys: Keys,
        refusals: Refusals,
        *,
        is_probe: Callable[[Scope], bool],
        is_shell: Callable[[Scope], bool] = lambda _: False,
        allowed_origins: Collection[str] = (),
        root_path: str = "",
    ) -> None:
        """Take `is_shell`, which tells the files of the status page, which have no data.

        Web pages of `allowed_origins` may use a server without an API key.
        """
        self._app = app
        self._keys = keys
        self._refusals = refusals
        self._is_probe = is_probe
        self._is_shell = is_shell
        self._allowed_origins = allowed_origins
        self._root_path = root_path
        self._attempts = AdminAttempts()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass the request on, or answer 401, 403 or 404 (close a WebSocket with 1008)."""
        if scope["type"] not in {"http", "websocket"}:
            return self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is None:
            return self._app(scope, receive, send)
        return self._refuse(refusal, scope, receive, send)

    async def _refuse(self, refusal: _Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        if refusal.reason is not None:
            self._refusals.count(refusal.reason)
        if scope["type"] == "websocket":
            code, reason = WEBSOCKET_POLICY_VIOLATION, refusal.message
            await close_websocket(receive, send, code=code, reason=reason)
        else:
            await refusal.response(scope, receive, send)

    def _refusal(self, scope: Scope) -> _Refusal | None:
        path = route_path(scope["path"], self._root_path)
        if needs_admin_key(path):
            refusal = self._admin_refusal(scope)
            if refusal is not None and not self._keys.admin.is_empty:
                self._note_attempt(scope, path, refusal)
            return refusal
        # Our own routes have no WebSocket, so these paths are open for HTTP only.
        if scope["type"] == "http" and self._is_open(path):
            return None
        return self._api_refusal(scope, path)

    def _is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or (path in METRICS_PATHS and not self._keys.guards_metrics)

    def _api_refusal(self, scope: Scope, path: str) -> _Refusal | None:
        if self._keys.api.is_empty:
            return _FOREIGN_PAGE if self._is_of_foreign_page(scope) else None
        # The probe does not use a client's key, which may change at any moment. A browser cannot
        # send one with the request for a page, which therefore asks for it.
        if self._is_probe(scope) or self._is_shell(scope):
            return None
        token = _messages_token(scope) if path in MESSAGES_PATHS else _token(scope)
        name = self._keys.api.name_of(token)
        if name is None:
            return self._without_api_key(token)
        current_request().key = name
        return None

    def _without_api_key(self, token: bytes) -> _Refusal:
        """Return the refusal of a token that is not an API key.

        It tells a stranger nothing that the routes of admins do not: these answer each key anyway.
        """
        if not token:
            return _NO_API_KEY
        return _UNKNOWN_API_KEY if self._keys.admin.name_of(token) is None else _ADMIN_KEY

    def _is_of_foreign_page(self, scope: Scope) -> bool:
        """Return whether a web page of an origin that may not do so opens this WebSocket.

        Browsers apply the rules of CORS to requests alone, and let every page open a WebSocket to
        any server. Other clients send no `Origin`, or that of the server.
        """
        if scope["type"] != "websocket" or "*" in self._allowed_origins:
            return False
        hosts = _values(scope, b"host")
        return any(
            origin.partition(b"://")[2] not in hosts
            and origin.decode("latin-1") not in self._allowed_origins
            for origin in _values(scope, b"origin")
        )

    def _admin_refusal(self, scope: Scope) -> _Refusal | None:
        if self._keys.admin.is_empty:
            return _NO_ROUTE
        token = _token(scope)
        # Checked at each request: a changed file may name an admin key as an API key.
        if (client := self._keys.api.name_of(token)) is not None:
            current_request().key = client
            return _NOT_ADMIN
        name = self._keys.admin.name_of(token)
        if name is None:
            return _UNKNOWN_ADMIN_KEY if token else _NO_ADMIN_KEY
        current_request().key = name
        return None

    def _note_attempt(self, scope: Scope, path: str, refusal: _Refusal) -> None:
        address = scope["client"][0] if scope.get("client") else "a socket"
        by = current_request().key or f"an unknown client at {address}"
        self._attempts.note(path, by, status=refusal.status, message=refusal.message)


def needs_admin_key(path: str) -> bool:
    """Return whether a path, given as by `route_path`, is open to admins alone."""
    is_admin = path == ADMIN_PATH or path.startswith(f"{ADMIN_PATH}/")
    return is_admin or is_for_operators(path)


def _token(scope: Scope) -> bytes:
    """Return the token after `Bearer`; empty, and so invalid, unless exactly one header has it."""
    given = _values(scope, b"authorization")
    if len(given) != 1:
        return b""
    scheme, _, token = given[0].partition(b" ")
    return bytes(token) if scheme.lower() == b"bearer" else b""


def _messages_token(scope: Scope) -> bytes:
    """Return the token as `_token` does, or else that of exactly one `x-api-key`."""
    given = _values(scope, b"x-api-key")
    if len(given) != 1 or _values(scope, b"authorization"):
        return _token(scope)
    return given[0]


def _values(scope: Scope, header: bytes) -> list[bytes]:
    return [bytes(value) for name, value in scope["headers"] if name == header]
