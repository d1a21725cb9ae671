"""What a peer's health port answers, and what becomes of one that is hostile."""

from __future__ import annotations

import gzip
import json
import socket
from pathlib import Path

import pytest

from holdfast.doctor.asking import MAX_ANSWER_BYTES, ask
from holdfast.doctor.reach import Address
from peer_records import FOLLOWER
from peer_servers import (
    Handler,
    answer,
    answering,
    closed_ports,
    dripping,
    endless,
    hanging_up,
    over_tls,
    peer_server,
    saying,
    silent,
    telling,
)
from self_signed import certificate

HERE = Address(socket.AF_INET, "127.0.0.1")
PATIENCE_SECONDS = 120.0
"""More than anything here takes on a busy machine."""


def test_a_peer_that_answers_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the proxy that the environment names, with the time of each answer."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with peer_server(telling(FOLLOWER)) as port:
        report = ask(HERE, port, PATIENCE_SECONDS)
    assert (report.document, report.problem) == (FOLLOWER, "")
    assert len(report.answers) == 4
    assert all(one.date.endswith("GMT") for one in report.answers)
    assert all(one.asked_seconds <= one.answered_seconds for one in report.answers)


def test_a_peer_at_an_address_of_ipv6_is_read() -> None:
    """Its URL has brackets."""
    with peer_server(telling(FOLLOWER), "::1") as port:
        assert ask(Address(socket.AF_INET6, "::1"), port, PATIENCE_SECONDS).document == FOLLOWER


def test_a_head_with_tls_is_read(tmp_path: Path) -> None:
    """Although nobody vouches for its certificate: it is only asked how it is."""
    handler = over_tls(telling(FOLLOWER), certificate(tmp_path))
    with peer_server(handler) as port:
        assert ask(HERE, port, PATIENCE_SECONDS).document == FOLLOWER


@pytest.mark.parametrize(
    "handler",
    [
        silent,
        dripping,
        endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    ],
    ids=["silent", "dripping", "going on"],
)
def test_a_peer_that_does_not_come_to_an_end_is_given_up(handler: Handler) -> None:
    """At the deadline, whatever it sends until then."""
    with peer_server(handler) as port:
        report = ask(HERE, port, 1.0)
    assert report.document == {}
    assert report.problem == "its answers took longer than 1 s"


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
    ],
    ids=["without a length", "with a length"],
)
def test_an_answer_that_is_too_long_is_cut_off(start: bytes) -> None:
    """Long before it fills the memory: little more was sent than what waits in the sockets."""
    sent: list[bytes] = []
    with peer_server(endless(start, b" " * 65536, sent)) as port:
        report = ask(HERE, port, PATIENCE_SECONDS)
    assert report.document == {}
    assert report.problem == f"/livez sends more than {MAX_ANSWER_BYTES} bytes"
    assert sum(map(len, sent)) < 64 * MAX_ANSWER_BYTES


@pytest.mark.parametrize(
    "handler",
    [
        endless(b"HTTP/1.1 200 OK\r\n", b"X-Header: x\r\n" * 1000),
        hanging_up(b"SSH-2.0-OpenSSH_9.6\r\n"),
        saying(b"\x00\xff" * 1000),
        saying(answer(b"", status="99999 Much")),
        saying(answer(b"", headers={"Content-Length": "-1"})),
    ],
    ids=["endless headers", "another protocol", "garbage", "no status", "no length"],
)
def test_a_server_of_something_else_is_called_so(handler: Handler) -> None:
    """It is not asked any further."""
    with peer_server(handler) as port:
        report = ask(HERE, port, PATIENCE_SECONDS)
    assert report.document == {}
    assert report.problem.startswith("it is not a web server")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (answer(b"{}", status="401 Unauthorized"), "/statusz asks for an API key"),
        (answer(b"{}", status="404 Not Found"), "/statusz answers HTTP 404"),
        (answer(b"[]"), "/statusz is not a JSON object"),
        (answer(b"[" * 100_000), "/statusz is not a JSON object"),
        (answer(b'{"a": NaN}'), "/statusz is not a JSON object"),
        (answer(b'{"a": ' + b"9" * 10_000 + b"}"), "/statusz is not a JSON object"),
        (answer(b"\xff{}"), "/statusz is not a JSON object"),
        (
            answer(
                gzip.compress(json.dumps(FOLLOWER).encode()), headers={"Content-Encoding": "gzip"}
            ),
            "/statusz is not a JSON object",
        ),
    ],
    ids=["key", "status", "list", "nested", "NaN", "long number", "bytes", "compressed"],
)
def test_an_answer_that_is_not_a_status_is_said_to_be_none(data: bytes, problem: str) -> None:
    """With what is wrong; nothing is unpacked."""
    with peer_server(answering(data)) as port:
        report = ask(HERE, port, PATIENCE_SECONDS)
    assert (report.document, report.problem) == ({}, problem)


def test_a_redirect_is_not_followed() -> None:
    """A peer must not have the doctor ask another server."""
    asked = []

    def record(connection: socket.socket) -> None:
        asked.append(connection.getpeername())

    with peer_server(record) as other:
        location = {"Location": f"http://127.0.0.1:{other}/statusz"}
        with peer_server(answering(answer(b"", status="302 Found", headers=location))) as port:
            report = ask(HERE, port, PATIENCE_SECONDS)
    assert report.problem == "/statusz answers HTTP 302"
    assert asked == []


def test_a_port_that_has_closed_meanwhile_is_no_web_server() -> None:
    """It was open a moment ago."""
    with closed_ports(1) as (port,):
        assert ask(HERE, port, PATIENCE_SECONDS).problem == "it is not a web server (ConnectError)"
