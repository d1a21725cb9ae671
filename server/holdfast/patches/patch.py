"""Defines a patch, checks that its sites exist, and replaces functions.

The patches that guarantees need are checked once vLLM is imported. A module that is not imported by
then only has to exist, because importing some of them takes seconds.
"""

from __future__ import annotations

import inspect
import logging
import platform
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from types import FunctionType
from typing import Any, Literal, TypeAlias

from holdfast.errors import EngineStartError
from holdfast.versions import NOT_INSTALLED, installed_version, vllm_version

Process: TypeAlias = Literal["front end", "fork server", "engine", "worker", "plan"]
"""Where a patch acts; `engine` is every process of vLLM's engine, and `plan` is `holdfast plan`."""

logger = logging.getLogger("vllm.holdfast")


@dataclass(frozen=True, slots=True)
class Patch:
    """One change, and the reason for it."""

    by: str
    """The function or class that applies it, below `holdfast`."""
    process: Process
    sites: tuple[str, ...]
    """What it replaces, sets or overrides: `module:qualified.name`; ` or ` joins alternatives."""
    reason: str
    """What it gains, in numbers, or the bug that it fixes."""
    is_guarantee: bool = True
    """Whether Holdfast refuses to start without it."""
    upstream: str = ""
    """The address of the issue or pull request that it follows; empty if we found none."""
    seen_in: str = "vLLM 0.32, 0.33"
    """The versions, one for each owner, in which the code at its sites was run or read."""


def require(patch: Patch) -> None:
    """Check that a patch fits, in the modules that are imported already.

    Raises:
        EngineStartError: a site is missing.
    """
    if missing := missing_sites(patch):
        seen = " and ".join(_seen_versions(patch, missing))
        raise EngineStartError(
            f"{_lacking(missing)}, which {patch.by} has to change: {patch.reason}",
            remedy=f"install {seen}, or a Holdfast made for what is installed.",
        )


@cache
def is_fit(patch: Patch) -> bool:
    """Whether an optional patch fits; if it does not, log one warning.

    This imports its modules, as the caller is about to apply it.
    """
    for site in patch.sites:
        with suppress(ImportError):
            import_module(site.partition(":")[0])
    missing = missing_sites(patch)
    if missing:
        logger.warning("%s, so %s is left out: %s", _lacking(missing), patch.by, patch.reason)
    return not missing


def missing_sites(patch: Patch) -> list[str]:
    """Return the sites of a patch that do not exist."""
    return [site for site in patch.sites if not any(map(_is_there, site.split(" or ")))]


@cache
def owner_of(site: str) -> str:
    """Return the distribution of a site; `vLLM` for each of its builds, or `Python`."""
    top = re.split(r"[.:]", site, maxsplit=1)[0]
    if top == "vllm":
        return "vLLM"
    if top in sys.stdlib_module_names:
        return "Python"
    return next(iter(packages_distributions().get(top, ())), top)


def _lacking(missing: list[str]) -> str:
    """Return a clause that says what each owner, in the installed version, does not have."""
    lost: dict[str, list[str]] = {}
    for site in missing:
        lost.setdefault(owner_of(site), []).append(site)
    return " and ".join(
        f"{_with_version(owner)} lacks {' and '.join(sites)}" for owner, sites in lost.items()
    )


def _with_version(owner: str) -> str:
    match owner:
        case "vLLM":
            return f"vLLM {vllm_version()}"
        case "Python":
            return f"Python {platform.python_version()}"
    version = installed_version(owner)
    return f"{owner} ({version})" if version == NOT_INSTALLED else f"{owner} {version}"


def _seen_versions(patch: Patch, missing: list[str]) -> list[str]:
    """Return the versions that the patch was seen in, of those that lack something."""
    versions = [one.replace(", ", " or ") for one in patch.seen_in.split(" with ")]
    owners = {owner_of(site) for site in missing}
    return [one for one in versions if one.partition(" ")[0] in owners] or versions


def _is_there(site: str) -> bool:
    name, _, path = site.partition(":")
    found: Any = sys.modules.get(name)
    if found is None:
        return _can_be_imported(name)
    *owners, last = path.split(".")
    for owner in owners:
        found = getattr(found, owner, None)
    return hasattr(found, last) or (isinstance(found, type) and _is_set_on_instances(found, last))


def _can_be_imported(name: str) -> bool:
    """Whether a module exists, as far as one can tell without importing its package."""
    package = name.rpartition(".")[0]
    if package and package not in sys.modules:
        return _can_be_imported(package)
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not a package
        return False


def _is_set_on_instances(kind: type, name: str) -> bool:
    """Whether a class declares an attribute, or its constructor sets it."""
    for base in kind.__mro__:
        if name in vars(base).get("__annotations__", {}):
            return True
        for method in ("__init__", "__post_init__"):
            function = inspect.unwrap(vars(base).get(method, object))
            if isinstance(function, FunctionType) and name in function.__code__.co_names:
                return True
    return False


_MARK = "holdfast_original"


def original(owner: Any, name: str) -> Any:
    """Return vLLM's own attribute of a class or module, even if we have replaced it."""
    found = getattr(owner, name)
    return getattr(found, _MARK, found)


def is_replaced(owner: Any, name: str) -> bool:
    """Whether we have replaced this attribute."""
    return hasattr(getattr(owner, name), _MARK)


def replace(owner: Any, name: str, function: Any) -> None:
    """Replace vLLM's own attribute by `function`, even if we have replaced it before.

    A static method stays one.
    """
    setattr(function, _MARK, original(owner, name))
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(function) if is_static else function)
