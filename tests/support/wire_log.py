"""Stands between a router and a replica, passes every byte on, and notes what the router asks."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise

from peer_servers import peer_server

_REQUEST = re.compile(rb"(?:GET|POST) (\S+) HTTP/1\.[01]\r\n")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_CHUNK_BYTES = 64 * 1024
_OK = 200
_REPLICAS = 2


@dataclass
class Asked:
    """One request of the router to the replica."""

    path: str
    at: float
    answered_at: float | None = None
    status: int = 0
    """0 if there was no answer."""


@dataclass(frozen=True, slots=True)
class Outage:
    """How often a router asked for the health of a replica that was away for a while.

    A health interval is the time from one of these questions to the next.
    """

    bad: int
    """How many bad answers there were."""
    bad_before_last: int
    """How many bad answers the router had got when it sent its last request."""
    good_before_first: int | None
    """How many good answers it had got when it sent the first one again; None if it has not."""

    def is_within(self, intervals: int) -> bool:
        """Whether traffic left, and came back if it did, within this many answers."""
        is_back_late = self.good_before_first is not None and self.good_before_first > intervals
        return self.bad_before_last < intervals and not is_back_late


@dataclass
class WireLog:
    """What the routers behind one address have asked a replica for."""

    health: str
    work: str
    """The path of the requests that are to go elsewhere while the replica is away."""
    port: int = 0
    asked: list[Asked] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where routers ask."""
        return f"http://127.0.0.1:{self.port}"

    def outage(self, since: int, chats_at: Sequence[float] | None = None) -> Outage | None:
        """Describe the outage after the first `since` requests; None before a bad answer.

        With the times at which clients asked for chats, a good answer counts only if two of them
        came before the next one: of two chats, a round robin sends one to each replica, and a
        router that is asked for less, as on a machine that stood still, cannot send any.
        """
        asked = self.asked[since:]
        answers = [(one, one.answered_at) for one in asked if one.path == self.health]
        checks = [(one.status == _OK, at) for one, at in answers if at is not None]
        bad = [at for is_good, at in checks if not is_good]
        if not bad:
            return None
        good = [at for is_good, at in checks if is_good and at > bad[-1]]
        sent = [one.at for one in asked if one.path == self.work]
        away = [at for at in sent if not good or at < good[0]]
        back = [at for at in sent if good and at >= good[0]]
        return Outage(
            len(bad),
            sum(at < away[-1] for at in bad) if away else 0,
            sum(at < back[0] for at in _used(good, chats_at)) if back else None,
        )

    def serve(self, client: socket.socket, replica_port: int) -> None:
        """Pass one connection on until either side closes it."""
        open_requests: list[Asked] = []
        try:
            with socket.create_connection(("127.0.0.1", replica_port)) as replica:
                answers = threading.Thread(
                    target=self._pass_answers, args=(replica, client, open_requests), daemon=True
                )
                answers.start()
                with suppress(OSError):
                    while data := client.recv(_CHUNK_BYTES):
                        self._note_request(data, open_requests)
                        replica.sendall(data)
                with suppress(OSError):
                    replica.shutdown(socket.SHUT_RDWR)
                answers.join()
        except OSError:  # nobody listens: the router gets no answer either
            self._note_request(client.recv(_CHUNK_BYTES), open_requests)
        finally:
            for one in open_requests:
                one.answered_at = time.monotonic()

    def _note_request(self, data: bytes, open_requests: list[Asked]) -> None:
        if found := _REQUEST.match(data):
            one = Asked(found[1].decode(), time.monotonic())
            open_requests.append(one)
            self.asked.append(one)

    @staticmethod
    def _pass_answers(
        replica: socket.socket, client: socket.socket, open_requests: list[Asked]
    ) -> None:
        with suppress(OSError):
            while data := replica.recv(_CHUNK_BYTES):
                if open_requests and (found := _STATUS.match(data)):
                    one = open_requests.pop()
                    one.status, one.answered_at = int(found[1]), time.monotonic()
                client.sendall(data)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def _used(good: Sequence[float], chats_at: Sequence[float] | None) -> Iterator[float]:
    if chats_at is None:
        yield from good
        return
    for at, following in pairwise(good):
        if sum(at < chat_at < following for chat_at in chats_at) >= _REPLICAS:
            yield at
    yield from good[-1:]


@contextmanager
def wire_log(replica_port: int, *, health: str, work: str) -> Iterator[WireLog]:
    """Listen for routers in place of the replica on a port of this machine."""
    log = WireLog(health, work)
    with peer_server(lambda client: log.serve(client, replica_port)) as port:
        log.port = port
        yield log
