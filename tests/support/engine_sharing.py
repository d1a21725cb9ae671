"""Which tests share an engine, read from their marks without importing them.

The process that hands out tests knows only their names, and importing a file of tests imports vLLM.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

FOLDERS = frozenset({"engine", "gpu_paths"})
"""The folders whose files may share an engine, or fake machines."""
SHARED = pytest.StashKey[ExitStack]()
"""Of a session: the engines that its tests share now."""
WHOLE_FILE = ""
OWN = ""
"""In place of the name of an engine: each test has one of its own."""


def group_of(path: Path, test: str) -> str | None:
    """The engine that a test shares: `OWN`, or None where its file has one for itself.

    `test` is its name, with or without its parameters.
    """
    if path.parent.name not in FOLDERS:
        return None
    marks = _marks(path)
    return marks.get(test.partition("[")[0], marks.get(WHOLE_FILE))


@cache
def _marks(path: Path) -> Mapping[str, str]:
    """The engine of the whole file and of single tests, by the name of the test."""
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                found |= _engine(WHOLE_FILE, [value])
            case ast.FunctionDef(name=name, decorator_list=decorators):
                found |= _engine(name, decorators)
            case _:
                pass
    return found


def _engine(test: str, marks: Iterable[ast.expr]) -> dict[str, str]:
    for node in (inner for mark in marks for inner in ast.walk(mark)):
        match node:
            case ast.Call(func=ast.Attribute(attr="shares_engine"), args=[ast.Constant(value)]):
                return {test: str(value)}
            case ast.Attribute(attr="own_engines"):
                return {test: OWN}
            case _:
                pass
    return {}
