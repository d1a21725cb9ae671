"""What happens to a patch whose site exists, and to one whose site does not."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing import shared_memory, spawn
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from holdfast import patches
from holdfast.errors import EngineStartError, ExitCode
from holdfast.patches import check, fits
from holdfast.patches.patch import Patch, is_fit, missing_sites, require
from holdfast.versions import vllm_version
from holdfast.worker.ipc_names import name_ipc_after

HERE = __name__


class Declared:
    """What a patch may be for: each attribute comes to its objects in another way."""

    declared: int

    def __init__(self) -> None:
        self.set_by_constructor = 1

    def method(self) -> None:
        """Found in the class itself."""


class Derived(Declared):
    """Has all of it from its base."""


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """Nothing is remembered of what fitted before."""
    is_fit.cache_clear()
    yield
    is_fit.cache_clear()


def patch(*sites: str, is_guarantee: bool = True) -> Patch:
    """A patch of these sites."""
    return Patch("patches.some.function", "worker", sites, "it dies", is_guarantee=is_guarantee)


@pytest.mark.parametrize("name", ["declared", "set_by_constructor", "method"])
@pytest.mark.parametrize("kind", ["Declared", "Derived"])
def test_a_site_of_a_class_is_found_however_it_gets_there(kind: str, name: str) -> None:
    """A method, a declared attribute and one that the constructor sets, inherited or not."""
    assert missing_sites(patch(f"{HERE}:{kind}.{name}")) == []


@pytest.mark.parametrize(
    "site",
    [f"{HERE}:Declared.gone", f"{HERE}:Gone.method", f"{HERE}:GONE", f"{HERE}_gone:X", "gone.x:X"],
)
def test_a_site_that_is_not_there_is_named(site: str) -> None:
    """An attribute, its class, a name of a module, a module, and a package."""
    assert missing_sites(patch(f"{HERE}:Declared", site)) == [site]


def test_a_site_that_moved_is_found_in_either_place() -> None:
    """And both are named if it is in neither."""
    here, gone = f"{HERE}:Declared", f"{HERE}:gone"
    assert missing_sites(patch(f"{gone} or {here}", f"{here} or {gone}")) == []
    assert missing_sites(patch(f"{gone} or {HERE}:lost")) == [f"{gone} or {HERE}:lost"]


def test_no_module_is_imported_for_a_guarantee() -> None:
    """A module that is not imported yet only has to exist."""
    assert "xmlrpc.server" not in sys.modules
    require(patch("xmlrpc.server:Unknown"))
    assert "xmlrpc.server" not in sys.modules


def test_a_gain_is_looked_for_where_it_is_about_to_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a module that its maker would import next, too."""
    monkeypatch.delitem(sys.modules, "xmlrpc.client", raising=False)
    assert not is_fit(patch("xmlrpc.client:Unknown", is_guarantee=False))
    assert is_fit(patch("xmlrpc.client:ServerProxy", is_guarantee=False))


class Messages(logging.Handler):
    """Keeps the records that a logger got."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.messages.append(record.getMessage())


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """The warnings, also where vLLM has set up its loggers, which then propagate nothing."""
    logger, handler = logging.getLogger("vllm.holdfast"), Messages()
    before = logger.disabled, logger.level
    logger.disabled = (
        False  # as a configuration of other loggers, in this process, may have left it
    )
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    yield handler.messages
    logger.removeHandler(handler)
    logger.disabled = before[0]
    logger.setLevel(before[1])


@dataclass(frozen=True, slots=True)
class Owned:
    """A module that lacks what a patch changes, and what is said of its distribution."""

    module: str
    seen_in: str
    installed: str
    """How the line names what is installed."""
    remedy: str


OWNED = {
    "vLLM": Owned(
        "vllm.emptied", "vLLM 0.32, 0.33", f"vLLM {vllm_version()} lacks", "vLLM 0.32 or 0.33"
    ),
    "Python": Owned(
        "multiprocessing.emptied",
        "Python 3.11 to 3.13",
        f"Python {platform.python_version()} lacks",
        "Python 3.11 to 3.13",
    ),
    "another distribution": Owned(
        "yaml.emptied",
        "PyYAML 6.0.1",
        f"PyYAML {version('pyyaml')} lacks",
        "PyYAML 6.0.1",
    ),
    "one of two": Owned(
        "yaml.emptied",
        "vLLM 0.32, 0.33 with PyYAML 6.0.1",
        f"PyYAML {version('pyyaml')} lacks",
        "PyYAML 6.0.1",
    ),
    "nobody": Owned(
        "emptied", "vLLM 0.32, 0.33", "emptied (not installed) lacks", "vLLM 0.32 or 0.33"
    ),
}


@pytest.fixture(params=OWNED)
def owned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Owned:
    """One of these, imported."""
    found = OWNED[request.param]
    monkeypatch.setitem(sys.modules, found.module, ModuleType(found.module))
    return found


def test_what_gains_speed_is_left_out_with_one_warning(owned: Owned, warned: list[str]) -> None:
    """It says which version of what lacks what, and what is lost."""
    site = f"{owned.module}:gone"
    gain = replace(patch(site, is_guarantee=False), seen_in=owned.seen_in)
    assert [is_fit(gain), is_fit(gain)] == [False, False]
    assert warned == [f"{owned.installed} {site}, so patches.some.function is left out: it dies"]


def test_what_a_guarantee_needs_ends_the_start(owned: Owned) -> None:
    """With exit 3, and a line that names the site, whose it is, the reason and the remedy."""
    site = f"{owned.module}:gone"
    with pytest.raises(EngineStartError) as caught:
        require(replace(patch(site), seen_in=owned.seen_in))
    assert caught.value.exit_code is ExitCode.ENGINE_START
    assert f"{owned.installed} {site}, which patches.some.function has to change: it dies" in (
        caught.value.line
    )
    assert f"install {owned.remedy}, or a Holdfast made for what is installed." in (
        caught.value.line
    )


def test_each_owner_of_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch may need something of several distributions, and several things of one."""
    for name in ("vllm.emptied", "yaml.emptied"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    both = patch("vllm.emptied:a", "yaml.emptied:b", "vllm.emptied:c")
    with pytest.raises(EngineStartError) as caught:
        require(replace(both, seen_in="vLLM 0.32, 0.33 with PyYAML 6.0.1"))
    lacking = f"vLLM {vllm_version()} lacks vllm.emptied:a and vllm.emptied:c"
    assert f"{lacking} and PyYAML {version('pyyaml')} lacks yaml.emptied:b" in caught.value.line
    assert "install vLLM 0.32 or 0.33 and PyYAML 6.0.1, or" in caught.value.line


def test_a_process_is_only_asked_for_what_is_changed_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker starts without what only the front end needs."""
    worker, front_end = patch(f"{HERE}:Declared"), Patch("x.y", "front end", ("gone:X",), "z")
    monkeypatch.setattr(patches, "PATCHES", (worker, front_end))
    check("worker")
    with pytest.raises(EngineStartError, match="gone:X"):
        check("front end")


def test_an_engine_does_not_start_where_its_processes_could_outlive_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list has the function by which they are tied to their parent."""
    monkeypatch.delattr(spawn, "get_command_line")
    with pytest.raises(EngineStartError, match=r"multiprocessing\.spawn:get_command_line"):
        check("engine")


def test_python_names_shared_memory_itself_where_it_has_no_prefix(
    monkeypatch: pytest.MonkeyPatch, warned: list[str], tmp_path: Path
) -> None:
    """An optional patch that does not fit sets nothing."""
    module: Any = shared_memory
    monkeypatch.delattr(module, "_SHM_NAME_PREFIX")
    name_ipc_after(tmp_path)
    assert not hasattr(module, "_SHM_NAME_PREFIX")
    assert "_SHM_NAME_PREFIX" in warned[0]


def test_nobody_asks_for_a_patch_that_is_not_in_the_list() -> None:
    """A name that was misspelt would be noticed only where it matters."""
    with pytest.raises(ValueError, match="not enough values"):
        fits("patches.some.function")
