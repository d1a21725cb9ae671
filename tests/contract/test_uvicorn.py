"""What the listener overrides and uses of uvicorn's private classes is there."""

from __future__ import annotations

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

OVERRIDDEN = {
    HttpToolsProtocol: {
        "_start_asgi_task",
        "connection_lost",
        "connection_made",
        "data_received",
        "eof_received",
        "on_body",
        "on_header",
        "on_headers_complete",
        "on_message_begin",
        "on_message_complete",
        "on_response_complete",
        "on_url",
        "pause_writing",
        "resume_writing",
        "timeout_keep_alive_handler",
    },
    WebSocketsSansIOProtocol: {
        "connection_lost",
        "connection_made",
        "data_received",
        "eof_received",
        "handle_bytes",
        "handle_cont",
        "handle_parser_exception",
        "handle_text",
        "pause_writing",
        "receive",
        "resume_writing",
        "send",
    },
    uvicorn.Server: {"capture_signals", "startup"},
}
USED = {
    HttpToolsProtocol: {
        "_should_upgrade",
        "_unset_keepalive_if_required",
        "handle_websocket_upgrade",
    },
    FlowControl: {"pause_reading", "resume_reading", "pause_writing", "resume_writing"},
    RequestResponseCycle: {"run_asgi", "send", "receive"},
}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(owner, name, id=f"{owner.__name__}.{name}")
        for owners in (OVERRIDDEN, USED)
        for owner, names in owners.items()
        for name in sorted(names)
    ],
)
def test_uvicorn_has_what_the_listener_builds_on(owner: type, name: str) -> None:
    """A version that calls a method by another name would leave a bound of ours out silently."""
    assert callable(getattr(owner, name, None))
