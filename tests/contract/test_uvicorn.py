"""What the listener overrides and uses of uvicorn's private classes is there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from inspect import isfunction
from pathlib import Path
from pkgutil import iter_modules

import pytest
from packaging.requirements import Requirement
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from holdfast import listener
from holdfast.errors import EngineStartError
from holdfast.patches import PATCHES, check

ROOT = Path(__file__).parents[2]

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


def listed() -> Iterator[tuple[type, str]]:
    """Yield each method of uvicorn in `PATCHES`, and its class."""
    for site in (site for patch in PATCHES for site in patch.sites):
        if site.startswith("uvicorn."):
            module, _, path = site.partition(":")
            owner, _, name = path.partition(".")
            yield getattr(import_module(module), owner), name


def test_every_method_that_the_listener_overrides_is_listed() -> None:
    """And uvicorn has each one in the list: it would never call ours by a name that it gave up."""
    assert set(overrides()) == set(listed())


def test_a_start_ends_without_what_the_listener_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line says that uvicorn lacks it, and which one to install."""
    monkeypatch.delattr(HttpToolsProtocol, "_start_asgi_task")
    with pytest.raises(EngineStartError) as caught:
        check("front end")
    assert f"uvicorn {version('uvicorn')} lacks uvicorn.protocols." in caught.value.line
    assert "install uvicorn 0.54.0" in caught.value.line


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
        for owner, name in (
            *listed(),
            *((owner, name) for owner, names in USED.items() for name in sorted(names)),
        )
    ],
)
def test_uvicorn_has_what_the_listener_builds_on(owner: type, name: str) -> None:
    """A version that calls a method by another name would leave a bound of ours out silently."""
    assert callable(getattr(owner, name, None))
