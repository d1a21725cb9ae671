"""What a terminal shows of a server that is there, and of one that has gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import MutableMapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import NotReachableError
from holdfast.listener.server import bound_socket, listening
from holdfast.settings import LimitSettings, ListenSettings
from holdfast.telemetry.counters import Refusals
from holdfast.top.command import _Watch
from holdfast.top.reader import StatusEvent
from self_signed import LIFE, certificate, certificate_of

SNAPSHOT = '{"time":"1970-01-01T00:02:00.000+00:00","state":"READY"}'


async def nothing(_scope: MutableMapping[str, Any], receive: Any, _send: Any) -> None:
    """An application that answers no request."""
    await receive()


def refused(scheme: str, host: str, settings: ListenSettings) -> str:
    """The line of a look at a server that listens so."""

    async def look(sock: socket.socket) -> None:
        url = f"{scheme}://{host}:{sock.getsockname()[1]}"
        async with listening(nothing, sock, settings, limits=LimitSettings(), refusals=Refusals()):
            await _Watch(url, "").until_first()

    with bound_socket(settings) as sock, pytest.raises(NotReachableError) as caught:
        asyncio.run(look(sock))
    return caught.value.line


def test_what_is_wrong_with_tls_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the address nor the server is wrong, so to check these would be in vain."""
    cert, key = certificate(tmp_path)
    without = ListenSettings(host="127.0.0.1", port=0, uvicorn_log_level="critical")
    settings = replace(without, ssl_certfile=cert, ssl_keyfile=key)
    private = refused("https", "127.0.0.1", settings)
    assert private.endswith("Remedy: set SSL_CERT_FILE to the certificate of its authority.")
    plain = refused("http", "127.0.0.1", settings)
    assert plain.endswith("If it has a certificate, try https://.")
    assert ".. Remedy" not in plain
    assert refused("https", "127.0.0.1", without).endswith("try http://.")
    monkeypatch.setenv("SSL_CERT_FILE", cert)
    assert refused("https", "127.0.0.1", settings).endswith("that its certificate names.")


@pytest.mark.parametrize("ahead", [2 * LIFE, -2 * LIFE], ids=["not yet", "no longer"])
def test_a_certificate_of_another_time_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: timedelta
) -> None:
    """Its authority is known and it names the host, so other files and hosts would be in vain."""
    cert, key = certificate_of(tmp_path, datetime.now(UTC) + ahead)
    monkeypatch.setenv("SSL_CERT_FILE", cert)
    settings = ListenSettings(
        host="127.0.0.1",
        port=0,
        uvicorn_log_level="critical",
        ssl_certfile=cert,
        ssl_keyfile=key,
    )
    said = refused("https", "127.0.0.1", settings)
    assert said.endswith("Remedy: renew the server's certificate, or correct this machine's clock.")


def test_nothing_gets_older_without_a_connection() -> None:
    """A server that died yesterday was not READY all night."""
    watch, now = _Watch("http://127.0.0.1:1", ""), [120.0]
    watch.mirror.clock = lambda: now[0]
    watch.mirror.take(StatusEvent("snapshot", SNAPSHOT, "a-1"))
    watch._tell("")
    now[0] = 130.0
    assert watch.now_unix_seconds == 130.0
    watch._tell("connection lost")
    now[0] = 5000.0
    watch._tell("connection refused")
    assert watch.now_unix_seconds == 130.0
    watch._tell("")
    assert watch.now_unix_seconds == 5000.0
