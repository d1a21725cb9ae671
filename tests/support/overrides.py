"""Where a class of ours overrides what a library's class does: `patches` says which count."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc import locate

from replacements import imports_of

WITHOUT_BASES = frozenset({"uvicorn", "vllm"})
"""The packages that promise no class to derive from."""
_OURS = "holdfast"


@dataclass(frozen=True, slots=True)
class Override:
    """One name in the body of a class that one of its bases has, too."""

    line: int
    base: str
    """The base, as it is written."""
    site: str
    """`module:Class.name` of what is overridden; the name of a method if the base is a variable."""


def overrides_in(source: str, module: str) -> list[Override]:
    """Every override that counts, in a module of this name."""
    tree = ast.parse(source)
    origins = dict(imports_of(list(ast.walk(tree))))
    return [
        Override(line, ast.unparse(written), site)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for written in node.bases
        for base in [_resolved(written, module, origins)]
        for line, name in (_methods(node) if base is None else _names(node))
        if (site := _overridden(base, name)) is not None
    ]


def site_of(place: str) -> str:
    """Return where the class of a site is defined, for one that names it by another module."""
    owner, _, name = place.replace(":", ".").rpartition(".")
    kind = locate(owner)
    return f"{kind.__module__}:{kind.__qualname__}.{name}" if isinstance(kind, type) else place


def _methods(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    for one in node.body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            yield one.lineno, one.name


def _names(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    yield from _methods(node)
    for one in node.body:
        match one:
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield one.lineno, name
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                yield one.lineno, name


def _resolved(base: ast.expr, module: str, origins: dict[str, str]) -> object:
    """Return the class that a base is; None for a variable, or a class, of a function."""
    written = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
    first, dot, rest = written.partition(".")
    if first in origins:
        return locate(f"{origins[first]}{dot}{rest}")
    return getattr(builtins, written, None) or locate(f"{module}.{written}")


def _overridden(base: object, name: str) -> str | None:
    """Return the site that this name overrides, if that counts."""
    if name.startswith("__"):
        return None
    if base is None:
        return name
    if not isinstance(base, type):  # `NamedTuple` and others of `typing`
        return None
    owner = next((one for one in base.__mro__ if name in vars(one)), None)
    if owner is None or getattr(vars(owner)[name], "__isabstractmethod__", False):
        return None
    package = owner.__module__.partition(".")[0]
    if package == _OURS or not (package in WITHOUT_BASES or name.startswith("_")):
        return None
    return f"{owner.__module__}:{owner.__qualname__}.{name}"
