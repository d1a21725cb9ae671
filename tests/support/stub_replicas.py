"""Servers that answer as a replica does in each of its states, at once and without an engine."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from wire_log import Asked, WireLog

CHAT = "/v1/chat/completions"
REALTIME = "/v1/realtime"
HEALTH = "/readyz"
DEADLINE_SECONDS = 60.0
OK = 200


@dataclass(frozen=True, slots=True)
class State:
    """What a replica answers."""

    health: int
    chat: int
    headers: Mapping[str, str] = field(default_factory=dict)
    is_slow: bool = False
    """Whether it answers only when it may go on."""


READY = State(200, 200)
AWAY = State(503, 503, {"Retry-After": "30", "x-should-retry": "true"})
"""It starts, recovers or drains."""
FULL = State(200, 429, {"Retry-After": "7"})
SUSPICIOUS = State(200, 422, {"x-should-retry": "false"})
"""The request may have ended its engine."""
BROKEN = State(200, 500, {"x-should-retry": "false"})
"""So may this one, which it cannot make again."""

SLOW = State(200, 200, is_slow=True)
"""It says nothing for a long time."""


@dataclass
class StubReplica:
    """One of them."""

    wire: WireLog = field(default_factory=lambda: WireLog(HEALTH, CHAT))
    """What it was asked for."""
    state: State = READY
    may_go_on: threading.Event = field(default_factory=threading.Event)
    """Set when a stream that has begun may end."""
    connections: int = 0
    """How often a client connected."""

    @property
    def chats(self) -> list[Asked]:
        """The chats that it was asked for."""
        return [one for one in self.wire.asked if one.path == CHAT]


@contextmanager
def stub_replicas(count: int = 2) -> Iterator[list[StubReplica]]:
    """Start this many that are ready, each on a port of its own."""
    with ExitStack() as stack:
        yield [stack.enter_context(_served(StubReplica())) for _ in range(count)]


@contextmanager
def silent_replica() -> Iterator[int]:
    """The port of one that answers no packet, as if its machine were off: its backlog is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        is_full = False
        while not is_full:
            connection = stack.enter_context(socket.socket())
            connection.settimeout(0.5)
            try:
                connection.connect(address)
            except TimeoutError:
                is_full = True
        yield int(address[1])


@contextmanager
def talking_replica() -> Iterator[int]:
    """The port of one whose WebSockets repeat what they are told."""

    def repeat(socket: ServerConnection) -> None:
        for message in socket:
            socket.send(message)

    def answer(socket: ServerConnection, request: Request) -> Response | None:
        return None if request.path == REALTIME else socket.respond(OK, "")

    with serve(repeat, "127.0.0.1", 0, process_request=answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield int(server.socket.getsockname()[1])


@contextmanager
def _served(replica: StubReplica) -> Iterator[StubReplica]:
    handler = type("Handler", (_Handler,), {"replica": replica})
    with _Server(("127.0.0.1", 0), handler) as server:
        replica.wire.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield replica
        finally:
            replica.may_go_on.set()
            server.shutdown()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024
    """As many as may connect at once; the default is 5."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    replica: StubReplica

    def setup(self) -> None:
        super().setup()
        self.replica.connections += 1

    def do_GET(self) -> None:
        asked = self._asked()
        state = self.replica.state
        # vllm-router asks /health until all replicas have started, whatever it is told to ask.
        known = {HEALTH: state.health, "/health": state.health, "/v1/models": OK}
        self._answer(asked, known.get(self.path, 404), {"data": [{"id": "routed"}]})

    def do_POST(self) -> None:
        asked = self._asked()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.replica.state
        if state.is_slow:
            self.replica.may_go_on.wait(DEADLINE_SECONDS)
        if state.chat == OK and body.get("stream"):
            self._stream(asked)
            return
        message = {"role": "assistant", "content": "held fast"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "routed"}
        error = {"error": {"message": "a test says so", "code": state.chat}}
        document = {**answer, "choices": [choice]} if state.chat == OK else error
        self._answer(asked, state.chat, document, state.headers)

    def _asked(self) -> Asked:
        asked = Asked(self.path, time.monotonic())
        self.replica.wire.asked.append(asked)
        return asked

    def _answer(
        self, asked: Asked, status: int, document: Any, headers: Mapping[str, str] | None = None
    ) -> None:
        content = json.dumps(document).encode()
        asked.status = status
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with suppress(OSError):  # the router has gone
            self.wfile.write(content)
        asked.answered_at = time.monotonic()

    def _stream(self, asked: Asked) -> None:
        asked.status, asked.answered_at = OK, time.monotonic()
        self.send_response(OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(OSError):
            self._chunk(b"data: begun\n\n")
            self.replica.may_go_on.wait(DEADLINE_SECONDS)
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
        """Nothing: the wire log has it."""
