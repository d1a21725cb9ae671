"""What the sources of a vLLM have at the sites of `PATCHES`, read without importing it.

    pip download --no-deps --dest build vllm==0.33.0    # 340 MB
    .venv/bin/python tests/support/vllm_sources.py build/vllm-0.33.0-*.whl

writes `contract/vllm_sites.json`: what the wheel of the next vLLM has there.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from holdfast.patches import PATCHES

SITES = sorted({site for patch in PATCHES for site in patch.sites if site.startswith("vllm")})
RECORD = Path(__file__).parents[1] / "contract" / "vllm_sites.json"


class Sources:
    """The modules below a directory or in a wheel."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        """`read` returns what a file has, by its path; None if there is none."""
        self._read = read
        self._parsed = cache(self._parse)

    def definition(self, site: str) -> str | None:
        """The text that defines what a site names: the first of its alternatives; None if none."""
        for place in site.split(" or "):
            module, _, path = place.partition(":")
            if (found := self._defined(module, path.split("."))) is not None:
                return found
        return None

    def hashes(self) -> dict[str, str | None]:
        """The SHA-256 of each definition, cut short."""
        texts = {site: self.definition(site) for site in SITES}
        return {
            site: None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]
            for site, text in texts.items()
        }

    def _parse(self, module: str) -> tuple[str, ast.Module] | None:
        path = module.replace(".", "/")
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if (text := self._read(name)) is not None:
                return text, ast.parse(text)
        return None

    def _defined(self, module: str, path: list[str]) -> str | None:
        parsed = self._parsed(module)
        if parsed is None:
            return None
        text, tree = parsed
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                found = self._imported(node, module, path)
            else:
                found = _text(text, node, path)
            if found is not None:
                return found
        return None

    def _imported(self, node: ast.ImportFrom, module: str, path: list[str]) -> str | None:
        bound = {alias.asname or alias.name: alias.name for alias in node.names}
        if path[0] not in bound or node.module is None:
            return None
        source = f"{module}.{node.module}" if node.level else node.module
        found = self._defined(source, [bound[path[0]], *path[1:]])
        return found or (f"from {source}" if len(path) == 1 else None)


def site_packages() -> Path:
    """Where the package `vllm` is."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("vLLM is not installed")
    return Path(spec.origin).parents[1]


@cache
def installed() -> Sources:
    """Those of the vLLM that is installed."""
    root = site_packages()

    def read(name: str) -> str | None:
        path = root / name
        return path.read_text(encoding="utf-8") if path.is_file() else None

    return Sources(read)


def of_wheel(wheel: zipfile.ZipFile) -> Sources:
    """Those in a wheel, which stays open meanwhile."""
    names = frozenset(wheel.namelist())
    return Sources(lambda name: wheel.read(name).decode() if name in names else None)


def _text(text: str, node: ast.AST, path: list[str]) -> str | None:
    """What this node of a module defines, if it is what the path names."""
    is_last = len(path) == 1
    match node:
        case ast.Import() if is_last:
            names = [alias.asname or alias.name for alias in node.names]
            return f"import {path[0]}" if path[0] in names else None
        case ast.ClassDef(name=name) if name == path[0]:
            inner = (one for one in ast.walk(node) if is_last or path[1] in _names(one))
            found = next((ast.get_source_segment(text, one) for one in inner), None)
            return found or (_heading(node) if path[1:] == ["register"] else None)
        case _ if is_last and path[0] in _names(node):
            return ast.get_source_segment(text, node)
    return None


def _heading(node: ast.ClassDef) -> str | None:
    """The first line of a class with bases, which decide whether it is an abstract class.

    The method `register` of an abstract class is its metaclass's, so no source of vLLM has it.
    """
    bases = ", ".join(ast.unparse(base) for base in (*node.bases, *node.keywords))
    return f"class {node.name}({bases})" if bases else None


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


if __name__ == "__main__":
    path = Path(sys.argv[1])
    with zipfile.ZipFile(path) as wheel:
        record = {"vllm": path.name.split("-")[1], "sites": of_wheel(wheel).hashes()}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
