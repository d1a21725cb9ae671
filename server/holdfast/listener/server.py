"""The socket that clients and the probe reach, open before anything else is known."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from holdfast.errors import AddressInUseError, UsageError
from holdfast.listener.acceptor import Acceptor
from holdfast.listener.connection_table import Book, Counted, Seat
from holdfast.listener.http_connection import HttpConnection
from holdfast.settings import LimitSettings, ListenSettings
from holdfast.telemetry.counters import Refusals
from holdfast.telemetry.logs import strip_queries

logger = logging.getLogger(__name__)

START_DEADLINE_SECONDS = 30.0
STOP_DEADLINE_SECONDS = 3.0
"""For the last bytes of answers; what could be waited for was drained before."""
MOST_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of a WebSocket, where `--max-body-size` allows as much."""
ALWAYS_ANSWERED = frozenset({"/livez", "/readyz", "/startupz", "/health", "/ping", "/metrics"})
"""What orchestrators and scrapes ask for, also when all connections are in use."""


@contextmanager
def bound(settings: ListenSettings) -> Iterator[socket.socket]:
    """A bound socket; a Unix socket's file is removed at the end.

    Raises:
        AddressInUseError: another process has the address.
        UsageError: the address cannot be bound here.
    """
    name = f"unix:{settings.uds}" if settings.uds else f"{settings.host or '*'}:{settings.port}"
    try:
        sock = _bind_unix(settings.uds) if settings.uds else _bind_tcp(settings)
    except (OSError, ValueError) as error:  # ValueError: a host that no encoding of names allows
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise AddressInUseError(
                f"{name} is in use by another process.",
                remedy="stop that process, or choose another --port, --host or --uds"
                + (
                    ", or remove the socket file if no process listens there."
                    if settings.uds
                    else "."
                ),
            ) from error
        raise UsageError(
            f"cannot listen on {name}: {getattr(error, 'strerror', None) or error}.",
            remedy="choose an address of this machine with --host, --port or --uds.",
        ) from error
    with sock:
        try:
            yield sock
        finally:
            if settings.uds:
                Path(settings.uds).unlink(missing_ok=True)


@asynccontextmanager
async def serving(  # noqa: PLR0913 - where, what, and who is told of what is refused
    app: Callable[..., Any],
    sock: socket.socket,
    settings: ListenSettings,
    *,
    limits: LimitSettings,
    refusals: Refusals,
    counted: Counted = lambda _method, _url, _status: None,
) -> AsyncIterator[uvicorn.Server]:
    """While entered, `app` answers on `sock`. Signals are not uvicorn's: they are the supervisor's.

    What a connection may ask is bounded by `limits`, and what is refused for it is counted:
    a request that was whole enough to have a route is also told to `counted`.

    Raises:
        UsageError: a TLS file is missing or wrong, or so many connections cannot be open.
    """
    strip_queries()
    book = Book(limits, refusals, ALWAYS_ANSWERED, counted=counted)
    server = _Server(_config(app, settings, limits, partial(HttpConnection, book=book)), book)
    task = asyncio.create_task(server.serve(sockets=[sock]), name="listener")
    try:
        await _until_started(server, task)
        logger.info("listening on %s", address(sock, settings))
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
    """Read the files of TLS as a start does.

    Raises:
        UsageError: one is missing or wrong.
    """
    _config(_cut_quietly, settings, LimitSettings(), HttpConnection)


def address(sock: socket.socket, settings: ListenSettings) -> str:
    """Where clients on this machine reach the server; with `--port 0` the only place that says."""
    if settings.uds:
        return f"unix:{settings.uds}"
    return f"{_scheme(settings)}://{_reachable(sock)}"


def own_client(
    sock: socket.socket,
    settings: ListenSettings,
    headers: dict[str, str],
    identity: Path | None = None,
) -> httpx.AsyncClient:
    """A client that talks to our own listener, over TCP, Unix socket or TLS.

    The certificate is not verified: it names the public host, and the peer is this process.
    `identity` holds the certificate that the client shows, and its key.
    """
    transport = httpx.AsyncHTTPTransport(
        uds=settings.uds,
        verify=_unverified(identity),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
    )
    host = "localhost" if settings.uds else _reachable(sock)
    return httpx.AsyncClient(
        base_url=f"{_scheme(settings)}://{host}{settings.root_path}",
        transport=transport,
        headers=headers,
        timeout=None,  # noqa: S113 - the probe has one deadline over everything
        trust_env=False,
    )


class _Server(uvicorn.Server):
    """Leaves SIGTERM and SIGINT to the supervisor, which drains first, and has a door of ours."""

    def __init__(self, config: uvicorn.Config, book: Book) -> None:
        super().__init__(config)
        self._book = book

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept on these sockets. What uvicorn does for a socket, but for the accepting."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the application did not start")
        config = self.config
        self.servers: list[Any] = [
            Acceptor(sock, self._book, self._protocol, config.ssl, config.backlog)
            for sock in sockets or ()
        ]
        self.started = True

    def _protocol(self, seat: Seat) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            seat=seat,
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
        ws_max_size=min(MOST_MESSAGE_BYTES, limits.max_body_bytes),
        # A few kilobytes would become many megabytes, and a read holds several of them.
        ws_per_message_deflate=False,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(
            f"cannot set up TLS: {error}.",
            remedy="check --ssl-keyfile, --ssl-certfile and --ssl-ca-certs.",
        ) from error
    return config


def _keep_alive_seconds(settings: ListenSettings, limits: LimitSettings) -> float:
    if limits.keep_alive_timeout_seconds is None:
        return settings.keep_alive_seconds
    return limits.keep_alive_timeout_seconds


def _cut_quietly(app: Callable[..., Any]) -> Callable[..., Any]:
    """The application; a request that is cut because the server ends is no error of it."""

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


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
    except OSError:
        sock.close()
        raise
    return sock


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
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - read, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104 - as above
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unverified(identity: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if identity is not None:
        context.load_cert_chain(identity)
    return context
