"""Servers on this machine that stand in for a peer: one that answers well, and hostile ones."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from email.utils import formatdate
from typing import Any

Handler = Callable[[socket.socket], None]


@contextmanager
def peer_server(handle: Handler, address: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """The port of a server that hands each connection to `handle`, in a thread of its own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connections: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the doctor has left, or the test is over
            handle(connection)

    def accept() -> None:
        with suppress(OSError):  # the test is over
            while True:
                connection, _ = sock.accept()
                connections.append(connection)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server((address, port), family=family) as sock:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield sock.getsockname()[1]
        finally:
            for one in (sock, *connections):
                with suppress(OSError):  # it has ended
                    one.shutdown(socket.SHUT_RDWR)


@contextmanager
def closed_ports(count: int) -> Iterator[list[int]]:
    """Ports of 127.0.0.1 that refuse connections, and that no other program gets."""
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        yield [sock.getsockname()[1] for sock in socks]


def answer(body: bytes, status: str = "200 OK", headers: Mapping[str, str] | None = None) -> bytes:
    """One answer of a server whose clock is right."""
    given = {"Date": formatdate(usegmt=True), "Content-Length": str(len(body)), **(headers or {})}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def request(connection: socket.socket) -> bool:
    """Read one request; whether there was one."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (part := connection.recv(4096)):
            return False
        data += part
    return True


def answering(data: bytes) -> Handler:
    """The same answer to every request."""

    def handle(connection: socket.socket) -> None:
        while request(connection):
            connection.sendall(data)

    return handle


def telling(document: Any) -> Handler:
    """A server that answers every request with a JSON document."""
    return answering(answer(json.dumps(document).encode()))


def over_tls(handle: Handler, certificate: tuple[str, str]) -> Handler:
    """The same behind TLS; `certificate` has the files of a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    def handle_tls(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as wrapped:
            handle(wrapped)

    return handle_tls


def silent(connection: socket.socket) -> None:
    """Read, and never answer."""
    while connection.recv(4096):
        pass


def dripping(connection: socket.socket) -> None:
    """Send an answer that never ends, a byte now and then."""
    request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Header: ")
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


def saying(data: bytes) -> Handler:
    """Send something at once, and then nothing."""

    def handle(connection: socket.socket) -> None:
        connection.sendall(data)
        silent(connection)

    return handle


def hanging_up(data: bytes) -> Handler:
    """Send something at once, and close."""
    return lambda connection: connection.sendall(data)


def endless(start: bytes, part: bytes, sent: list[bytes] | None = None) -> Handler:
    """Send a start, then a part again and again as fast as it can, and note it in `sent`."""

    def handle(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(part)
            if sent is not None:
                sent.append(part)

    return handle


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", address, port]:
            document = {"state": "waiting", "node": "b", "head": "10.77.0.1:29600"}
            with peer_server(telling(document), address, int(port)):
                sys.stdout.write("listening\n")
                sys.stdout.flush()
                threading.Event().wait()
