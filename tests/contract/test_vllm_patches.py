"""Every site of `PATCHES` is where it was: in the vLLM that is installed, and in the next one.

The next one is read, not run: `NEXT_VLLM_SOURCES` names the directory that its wheel was
unpacked to (`pip download vllm==0.33.0 --no-deps`).
"""

from __future__ import annotations

import ast
import os
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import holdfast
from holdfast.patches import PATCHES
from holdfast.patches.patch import Patch, missing_sites

SOURCES_VARIABLE = "NEXT_VLLM_SOURCES"
ROOT = Path(holdfast.__file__).parent
SITES = sorted({site for patch in PATCHES for site in patch.sites if site.startswith("vllm")})


@cache
def parsed(root: Path, module: str) -> ast.Module | None:
    """A module below `root`; None if there is none."""
    path = root.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def is_in_source(root: Path, site: str) -> bool:
    """Whether the sources below `root` define what a site names."""
    module, _, path = site.partition(":")
    return _defines(root, module, path.split("."))


def _defines(root: Path, module: str, path: list[str]) -> bool:
    tree = parsed(root, module)
    for node in () if tree is None else ast.walk(tree):
        match node:
            case ast.ImportFrom():
                bound = {alias.asname or alias.name: alias.name for alias in node.names}
                if path[0] in bound and node.module is not None:
                    source = node.module
                    if node.level:
                        source = f"{module}.{node.module}"
                    return len(path) == 1 or _defines(root, source, [bound[path[0]], *path[1:]])
            case ast.Import() if len(path) == 1:
                if any((alias.asname or alias.name) == path[0] for alias in node.names):
                    return True
            case ast.ClassDef() if node.name == path[0]:
                return len(path) == 1 or _has(node, path[1])
            case _ if len(path) == 1 and path[0] in _names(node):
                return True
    return False


def _has(kind: ast.ClassDef, name: str) -> bool:
    """Whether the body of a class defines a name, or sets it on `self`."""
    return any(name in _names(node) for node in ast.walk(kind))


def _names(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.Assign():
            targets = node.targets
        case ast.AnnAssign():
            targets = [node.target]
        case _:
            return []
    return [
        target.attr if isinstance(target, ast.Attribute) else target.id
        for target in targets
        if isinstance(target, ast.Attribute | ast.Name)
    ]


def installed() -> Path:
    """Where the package `vllm` is."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def missing_in(root: Path) -> list[str]:
    """The sites that the sources below `root` do not have."""
    return [
        site for site in SITES if not any(is_in_source(root, place) for place in site.split(" or "))
    ]


def test_the_installed_sources_have_every_site() -> None:
    """The way in which other sources are read finds everything that is there."""
    assert missing_in(installed()) == []


def test_the_sources_of_another_version_have_every_site() -> None:
    """What is only read here is what Holdfast says that it stands on, too."""
    sources = os.environ.get(SOURCES_VARIABLE)
    if sources is None:
        pytest.skip(f"{SOURCES_VARIABLE} names no sources of another vLLM")
    assert (Path(sources) / "vllm").is_dir()
    assert missing_in(Path(sources)) == []


@pytest.mark.parametrize(
    "site",
    [
        "vllm.v1.worker.workspace:Gone",
        "vllm.v1.worker.gone:WorkspaceManager",
        "vllm.v1.worker.worker_base:WorkerWrapperBase.gone",
        "vllm.v1.metrics.loggers:gone",
    ],
)
def test_what_is_not_in_the_sources_is_missed(site: str) -> None:
    """A walk that finds everything would prove nothing."""
    assert not is_in_source(installed(), site)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.by)
def test_every_site_is_found_where_it_is_imported(patch: Patch) -> None:
    """A process that looks for it finds it, so that none ends for nothing."""
    for site in patch.sites:
        with suppress(ImportError):  # of a place that it moved to in another version
            import_module(site.partition(":")[0])
    assert missing_sites(patch) == []


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.by)
def test_every_patch_says_who_makes_it(patch: Patch) -> None:
    """A function or a class of the module that it names."""
    module, _, name = patch.by.rpartition(".")
    source = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    made = {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assert name in made
