"""Phrases that a native engineer writes nowhere."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

FOREIGN = re.compile(
    r"(?<!there )\b(?:is|are) no (?!longer|larger|better)|\bworth to\b|\bso (?:long|many|much) as\b"
    r"|\b(?:for|in|only|has|lasts?|after|taken) so long\b|\banew\b|\bmend(?:s|ed|ing)?\b"
    r"|(?<!\beach )(?<!\ball )(?<!\bone )\bof which\b|\bsomebody\b|\bso (?:many|much|few)\b"
    r"|\bbut where\b|\b(?:server|peer) (?:does not )?tells?\b|\bwho(?:m)?ever\b|\bfor ever\b"
    r"|\bbut for\b|\b(?:is|are|was|were) answered (?:\d{3}\b|\{\})",
    re.IGNORECASE,
)
"""CONTRIBUTING has what to write instead."""


def slips(text: str) -> list[str]:
    """Each such phrase with a few words around it, also where a line ends within it."""
    text = " ".join(text.split())
    return [text[max(0, slip.start() - 40) : slip.end() + 20] for slip in FOREIGN.finditer(text)]


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each docstring of a module, a class, a function or a name, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Each comment of a module with the line where it begins; its lines are one text."""
    begun, last, text = 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, said = token.start[0], token.string.lstrip("#").strip()
            if last != line - 1:
                if text:
                    yield begun, text
                begun, text = line, ""
            last, text = line, f"{text} {said}".strip()
    if text:
        yield begun, text


def literals(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Each string below a node with its line, docstrings left out; `{}` for what is filled in."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        yield node.lineno, "".join(map(str, parts))
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from literals(child)
