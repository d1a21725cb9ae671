"""What the listener overrides and uses of uvicorn's private classes is there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from pkgutil import iter_modules

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from holdfast import listener

ROOT = Path(__file__).parents[2]

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
    },
    WebSocketsSansIOProtocol: {
        "connection_lost",
        "connection_made",
        "data_received",
        "eof_received",
        "handle_bytes",
        "handle_connect",
        "handle_cont",
        "handle_text",
        "pause_writing",
        "receive",
        "resume_writing",
        "send",
        "send_receive_event_to_app",
    },
    uvicorn.Server: {"capture_signals", "startup"},
}
USED = {
    HttpToolsProtocol: {
        "_should_upgrade",
        "_unset_keepalive_if_required",
        "handle_websocket_upgrade",
        "timeout_keep_alive_handler",
    },
    WebSocketsSansIOProtocol: {"handle_parser_exception"},
    FlowControl: {"pause_reading", "resume_reading", "pause_writing", "resume_writing"},
    RequestResponseCycle: {"run_asgi", "send", "receive"},
}


def overrides() -> Iterator[tuple[type, str]]:
    """Yield each method of uvicorn that a class of the listener overrides, and its class there."""
    for module in iter_modules(listener.__path__, f"{listener.__name__}."):
        for kind in vars(import_module(module.name)).values():
            if isinstance(kind, type) and kind.__module__ == module.name:
                bases = [base for base in kind.__mro__ if base.__module__.startswith("uvicorn.")]
                for name in (name for name, value in vars(kind).items() if isfunction(value)):
                    owner = next((base for base in bases if name in vars(base)), None)
                    if owner is not None and not name.startswith("__"):
                        yield owner, name


def test_every_method_that_the_listener_overrides_is_listed() -> None:
    """And uvicorn has each one in the list: it would never call ours by a name that it gave up."""
    listed = {(owner, name) for owner, names in OVERRIDDEN.items() for name in names}
    assert set(overrides()) == listed


def test_a_uvicorn_that_nobody_ran_is_not_accepted() -> None:
    """Bounds rest on its private methods, so its next minor version has to be tested first."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [allowed] = [one.specifier for one in map(Requirement, declared) if one.name == "uvicorn"]
    [run] = re.findall(r"(?m)^uvicorn==(\d+)\.(\d+)", (ROOT / "requirements/cpu.txt").read_text())
    major, minor = map(int, run)
    assert f"{major}.{minor}.9" in allowed
    assert f"{major}.{minor + 1}.0" not in allowed


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
