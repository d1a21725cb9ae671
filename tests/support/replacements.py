"""Where source changes what other code has made, as far as its syntax shows.

A change is an assignment to an attribute, also by `setattr` or our `replace`, or a call that puts
something in front of other code: an exception handler, a route, a class in a registry. What a class
of ours overrides is found by `overrides`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

_CALLS = frozenset({"register", "add_exception_handler", "add_middleware", "setLogRecordFactory"})
"""Methods that change their object, whatever it is."""
_LISTS = frozenset({"routes", "handlers"})
"""Lists in which an object keeps what is asked first."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_OURS = "holdfast"
ANY_NAME = "?"
"""Stands for the name of an attribute that a variable has."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change, as the source has it."""

    line: int
    owner: str
    """What is changed, as it is written: `vllm_logger`, `self.engine_core`."""
    name: str
    """The attribute that is set, or the method that is called."""
    imported: str = ""
    """Both in full, if the owner begins with a name that an import binds."""
    is_call: bool = False


def changes_in(source: str) -> list[Change]:
    """Every change, except of `self`, of `cls`, and of what is known to be an object of ours."""
    module = _Module(ast.parse(source))
    return [
        module.change(owner, name)
        for node in module.nodes
        for owner, name in _changed(node)
        if not module.is_ours(owner, node)
    ]


@dataclass
class _Module:
    """What the syntax of a module says about its names."""

    tree: ast.Module
    nodes: list[ast.AST] = field(init=False)
    _parents: dict[ast.AST, ast.AST] = field(init=False)
    _origins: dict[str, str] = field(init=False)
    _texts: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = list(ast.walk(self.tree))
        self._parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        made = {node.name: _OURS for node in self.nodes if isinstance(node, ast.ClassDef)}
        self._origins = made | dict(imports_of(self.nodes))
        self._texts = dict(_constants(self.tree))

    def change(self, owner: ast.expr, attribute: str | ast.expr) -> Change:
        """Return the change of an attribute, whose name may be a constant of the module."""
        name = attribute if isinstance(attribute, str) else self._text(attribute)
        written = ast.unparse(owner)
        first, *path = written.split(".")
        origin = self._origins.get(first)
        return Change(
            line=owner.lineno,
            owner=written,
            name=name,
            imported=".".join([origin, *path, name]) if origin else "",
            is_call=name in _CALLS | _LISTS,
        )

    def is_ours(self, owner: ast.expr, place: ast.AST) -> bool:
        """Whether what this expression means at this place is an object or a class of ours."""
        match owner:
            case ast.Name(id="self" | "cls"):
                return True
            case ast.Name(id=name) if name in self._origins:
                return self._is_origin_ours(name)
            case ast.Name(id=name):
                functions = [one for one in self._around(place) if isinstance(one, _FUNCTIONS)]
                bound = (self._bound(one, name) for one in functions)
                return all(next(filter(None, bound), [False]))
            case ast.Attribute(value=ast.Name(id="self")):
                classes = [one for one in self._around(place) if isinstance(one, ast.ClassDef)]
                return bool(classes) and all(self._bound(classes[0], ast.unparse(owner)) or [False])
        return self._is_origin_ours(ast.unparse(owner).partition(".")[0])

    def _is_origin_ours(self, name: str) -> bool:
        return self._origins.get(name, "").startswith(_OURS)

    def _text(self, expression: ast.expr) -> str:
        match expression:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name):
                return self._texts.get(name, ANY_NAME)
        return ANY_NAME

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def _bound(self, scope: ast.AST, name: str) -> list[bool]:
        """Return for each binding of `name` in a function or a class whether it is ours."""
        found = []
        for node in ast.walk(scope):
            match node:
                case ast.arg(arg=given, annotation=kind) if given == name:
                    found.append(self._is_type_ours(kind))
                case ast.AnnAssign(target=target, annotation=kind) if ast.unparse(target) == name:
                    found.append(self._is_type_ours(kind))
                case ast.Assign(targets=[target], value=value) if ast.unparse(target) == name:
                    found.append(self._is_value_ours(value))
                case ast.Name(id=stored, ctx=ast.Store()) if stored == name:
                    parent = self._parents[node]
                    found += [] if isinstance(parent, ast.Assign | ast.AnnAssign) else [False]
        return found

    def _is_type_ours(self, kind: ast.expr | None) -> bool:
        match kind:
            case ast.BinOp(left=left):  # `X | None`
                return self._is_type_ours(left)
            case ast.Name(id=name):
                return self._is_origin_ours(name)
        return False

    def _is_value_ours(self, value: ast.expr) -> bool:
        """Whether it is a new object of a class of ours, or a name of one."""
        match value:
            case ast.Call(func=ast.Name(id=name)):
                return name.lstrip("_")[:1].isupper() and self._is_origin_ours(name)
            case ast.Name():
                return self.is_ours(value, value)
        return False


def imports_of(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each name that an import binds, with what it means in full."""
    for node in nodes:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield (
                        (alias.asname or alias.name).partition(".")[0],
                        (alias.name if alias.asname else alias.name.partition(".")[0]),
                    )
            case ast.ImportFrom(module=str(module)):
                for alias in node.names:
                    yield alias.asname or alias.name, f"{module}.{alias.name}"


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                yield name, text


def _changed(node: ast.AST) -> Iterator[tuple[ast.expr, str | ast.expr]]:
    """(`a.b`, "c") of `a.b.c = ...`, `setattr(a.b, "c", ...)` and `a.b.c(...)` of some methods."""
    match node:
        case ast.Attribute(value=owner, attr=name, ctx=ast.Store() | ast.Del()):
            yield owner, name
        case ast.Call(func=ast.Name(id="setattr" | "replace" | "delattr"), args=[owner, name, *_]):
            yield owner, name
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in _CALLS:
            yield owner, name
        case ast.Call(
            func=ast.Attribute(attr="insert", value=ast.Attribute(value=owner, attr=name))
        ) if name in _LISTS:
            yield owner, name
