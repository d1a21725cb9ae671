"""The socket that clients connect to, open before anything else is ready."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from holdfast.errors import AddressInUseError, UsageError, reason_of
from holdfast.listener.acceptor import Acceptor
from holdfast.listener.connection_table import ConnectionSlot, ConnectionTable, OnRefused
from holdfast.listener.http_connection import HttpConnection
from holdfast.listener.own_socket import OwnAcceptor
from holdfast.listener.tls import tls_error
from holdfast.listener.unix_socket import bound_unix_socket
from holdfast.loopback import WILDCARDS, connectable
from holdfast.settings import LimitSettings, ListenSettings
from holdfast.telemetry.counters import Refusals
from holdfast.telemetry.logs import clean_uvicorn_lines, write_uvicorn_alike

logger = logging.getLogger(__name__)

START_DEADLINE_SECONDS = 30.0
STOP_DEADLINE_SECONDS = 3.0
"""The time for the last bytes of answers; requests have been drained before."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""The largest WebSocket message, if `--max-body-size` allows it."""
ALWAYS_ANSWERED = frozenset(
    {"/livez", "/readyz", "/startupz", "/health", "/ping", "/metrics", "/metrics/routing"}
)
"""The paths of health checks and scrapes, which work even when all connections are in use."""


@contextmanager
def bound_socket(settings: ListenSettings) -> Iterator[socket.socket]:
    """Bind the socket; the file of a Unix socket is removed at the end.

    Raises:
        AddressInUseError: another process has the address.
        UsageError: the address cannot be bound here.
    """
    name = f"unix:{settings.uds}" if settings.uds else f"{settings.host or '*'}:{settings.port}"
    flags = "--uds" if settings.uds else "--port or --host"
    with contextlib.ExitStack() as stack:
        try:
            sock = (
                stack.enter_context(bound_unix_socket(Path(settings.uds)))
                if settings.uds
                else stack.enter_context(_bind_tcp(settings))
            )
        except (OSError, ValueError) as error:  # ValueError: a host name that cannot be encoded
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                raise AddressInUseError(
                    f"{name} is in use by another process.",
                    remedy=f"stop that process, or choose another {flags}"
                    + (
                        ", or remove the socket file if no process listens there."
                        if settings.uds
                        else "."
                    ),
                ) from error
            raise UsageError(
                f"cannot listen on {name}: {reason_of(error)}.",
                remedy=_remedy(settings, error),
            ) from error
        yield sock


def _remedy(settings: ListenSettings, error: OSError | ValueError) -> str:
    if not settings.uds:
        return "choose an address of this machine with --port or --host."
    create = "create the directory, or " if isinstance(error, FileNotFoundError) else ""
    return f"{create}choose another path with --uds."


@asynccontextmanager
async def listening(  # noqa: PLR0913 - where to listen, what to serve, where to count refusals
    app: Callable[..., Any],
    sock: socket.socket,
    settings: ListenSettings,
    *,
    limits: LimitSettings,
    refusals: Refusals,
    own: socket.socket | None = None,
    on_refused: OnRefused = lambda _method, _url, _status: None,
) -> AsyncIterator[uvicorn.Server]:
    """Serve `app` on `sock` while entered. The supervisor handles signals, not uvicorn.

    `limits` bounds each connection, and each refusal is counted. `on_refused` also receives a
    refused request if it was complete enough to have a route. `own` is the socket of
    `own_client`, over which this process has the same application.

    Raises:
        UsageError: a TLS file is missing or invalid, or this process may not open enough files.
    """
    clean_uvicorn_lines()
    # A proxy may keep the root path in the request, or strip it.
    below_root = frozenset(f"{settings.root_path}{path}" for path in ALWAYS_ANSWERED)
    table = ConnectionTable(limits, refusals, ALWAYS_ANSWERED | below_root, on_refused=on_refused)
    config = _config(app, settings, limits, partial(HttpConnection, table=table))
    write_uvicorn_alike()
    server = _Server(config, table, own)
    task = asyncio.create_task(server.serve(sockets=[sock]), name="listener")
    try:
        await _until_started(server, task)
        logger.info("listening on %s", place(sock, settings))
        yield server
    finally:
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_DEADLINE_SECONDS):
                await asyncio.shield(task)
        server.force_exit = True
        task.cancel()
        await asyncio.wait({task}, timeout=STOP_DEADLINE_SECONDS)


def check_tls(settings: ListenSettings) -> None:
    """Read the TLS files as a start does.

    Raises:
        UsageError: a file is missing or invalid.
    """
    _config(_cut_quietly, settings, LimitSettings(), HttpConnection)


def address(sock: socket.socket, settings: ListenSettings) -> str:
    """Return the address for clients on this machine; only this knows the port of `--port 0`."""
    if settings.uds:
        return f"unix:{settings.uds}"
    return f"{_scheme(settings)}://{_reachable(sock)}"


def place(sock: socket.socket, settings: ListenSettings) -> str:
    """Return what the socket listens on; `address` alone does not say who can reach it."""
    here = address(sock, settings)
    is_everywhere = not settings.uds and sock.getsockname()[0] in WILDCARDS
    return f"every address, {here} from this machine" if is_everywhere else here


class _Server(uvicorn.Server):
    """uvicorn's server with our acceptor. It leaves signals to the supervisor, which drains."""

    def __init__(
        self, config: uvicorn.Config, table: ConnectionTable, own: socket.socket | None
    ) -> None:
        super().__init__(config)
        self._table = table
        self._own = own

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, except that our acceptors serve the sockets."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the application did not start")
        config = self.config
        self.servers: list[Any] = [
            Acceptor(sock, self._table, self._protocol, lambda: config.ssl, config.backlog)
            for sock in sockets or ()
        ]
        if self._own is not None:
            own = OwnAcceptor(self._own, self._table, self._protocol, lambda: None, config.backlog)
            self.servers.append(own)
        self.started = True

    def _protocol(self, slot: ConnectionSlot) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            slot=slot,
        )


def _config(
    app: Callable[..., Any], settings: ListenSettings, limits: LimitSettings, protocol: Any
) -> uvicorn.Config:
    config = uvicorn.Config(
        _cut_quietly(app),
        http=protocol,
        # uvicorn gives it to the loop's timer, which takes fractions too.
        timeout_keep_alive=_keep_alive_seconds(settings, limits),  # type: ignore[arg-type]
        log_level=settings.uvicorn_log_level,
        access_log=settings.has_access_log,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=settings.ssl_cert_reqs,
        ssl_ciphers=settings.ssl_ciphers,
        ws_max_size=min(MAX_MESSAGE_BYTES, limits.max_body_bytes),
        # A few kilobytes could expand to many megabytes, and one read may contain several messages.
        ws_per_message_deflate=False,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise tls_error(settings, error) from error
    return config


def _keep_alive_seconds(settings: ListenSettings, limits: LimitSettings) -> float:
    if limits.keep_alive_timeout_seconds is None:
        return settings.keep_alive_seconds
    return limits.keep_alive_timeout_seconds


def _cut_quietly(app: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the application: a request that is cancelled by the server's end is not an error."""

    async def cut_quietly(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return cut_quietly


async def _until_started(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(START_DEADLINE_SECONDS):
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError("the listener ended before it had started")
            await asyncio.sleep(0.01)


def _bind_tcp(settings: ListenSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((settings.host, settings.port))
        # Taken now: until it listens, another process could bind the same address and listen first.
        sock.listen(2048)
    except OSError:
        sock.close()
        raise
    return sock


def _scheme(settings: ListenSettings) -> str:
    return "https" if settings.is_tls else "http"


def _reachable(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    host = connectable(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
