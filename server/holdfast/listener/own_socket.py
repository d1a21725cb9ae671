"""The socket through which this process uses its own API, and which no other process can use.

Clients can occupy every connection of the public address, fill its queue, or evict a connection
that has not sent anything yet. A probe that came that way would fail when they do.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from holdfast.listener.acceptor import Acceptor
from holdfast.listener.connection_table import ConnectionSlot

_CREDENTIALS = struct.Struct("3i")
"""A `struct ucred`: the pid, uid and gid of the process that connected (unix(7))."""


@contextmanager
def own_socket() -> Iterator[socket.socket]:
    """Bind a Unix socket to an abstract address, which the kernel chooses and which needs no file.

    https://man7.org/linux/man-pages/man7/unix.7.html, "Autobind feature"
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind("")
        yield sock


def own_client(
    own: socket.socket, headers: dict[str, str], *, root_path: str = ""
) -> httpx.AsyncClient:
    """Return a client of this process's own listener, which serves `own`.

    No connection is used twice: the listener might close it at the moment of the next request.
    """
    transport = httpx.AsyncHTTPTransport(
        uds=own.getsockname().decode("ascii"),
        verify=False,  # loads no authorities, since the socket has no TLS
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )
    return httpx.AsyncClient(
        base_url=f"http://localhost{root_path}",
        transport=transport,
        headers=headers,
        timeout=None,  # noqa: S113 - the probe has one deadline over everything
        trust_env=False,
    )


class OwnAcceptor(Acceptor):
    """Accepts the connections of this process only, which take no slot from clients."""

    def _admit(self, sock: socket.socket) -> None:
        if _is_own(sock):
            super()._admit(sock)
        else:
            sock.close()

    def _take_slot(self) -> ConnectionSlot | None:
        return self._table.take_own_slot()


def _is_own(sock: socket.socket) -> bool:
    """Return whether this process made the connection: anybody here can find the address."""
    size = _CREDENTIALS.size
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid == os.getpid()
