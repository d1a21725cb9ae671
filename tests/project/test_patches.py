"""`PATCHES` is all of it: no line of the server puts anything else in the place of other code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.patches import PATCHES
from holdfast.patches.patch import Patch

SERVER = Path(__file__).parents[2] / "server"

WITHOUT_NUMBER = {
    # They gain something other than speed.
    "engine.continuation.restore",
    "patches.continued.resume_answers",
    "worker.crash_records.record_causes",
    "worker.ipc_names.name_ipc_after",
    # What they save takes several GPUs, or weights of many gigabytes, to measure.
    "patches.engine.find_weight_cache",
    "patches.engine.keep_builds",
}

SETTINGS = {"sys.argv", "sys.orig_argv", "tempfile.tempdir"}
"""Variables that their documentation says may be set."""


def replaced_in(source: str) -> Iterator[tuple[int, str]]:
    """Every name below something imported from elsewhere that is assigned to, with its line."""
    tree = ast.parse(source)
    imported = dict(_imports(tree))
    for node in ast.walk(tree):
        for owner, name in _assigned(node):
            root, *path = ast.unparse(owner).split(".")
            if root in imported and not imported[root].startswith("holdfast"):
                yield owner.lineno, ".".join([imported[root], *path, name])


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
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


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """(`a.b`, "c") of `a.b.c = ...`, `setattr(a.b, "c", ...)` and `replace(a.b, "c", ...)`."""
    match node:
        case ast.Assign():
            targets = node.targets
        case ast.AnnAssign() | ast.AugAssign() | ast.For():
            targets = [node.target]
        case ast.Call(
            func=ast.Name(id="setattr" | "replace"), args=[owner, ast.Constant(value=str(name)), *_]
        ):
            yield owner, name
            return
        case _:
            return
    for target in targets:
        for part in ast.walk(target):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                yield part.value, part.attr


def listed() -> set[str]:
    """The names that the list has, dotted."""
    return {
        place.replace(":", ".")
        for patch in PATCHES
        for site in patch.sites
        for place in site.split(" or ")
    }


def is_ours(name: str) -> bool:
    """What is added under a name of our own replaces nothing."""
    return name.rpartition(".")[2].startswith(("holdfast", "_holdfast"))


def test_every_replacement_is_in_the_list() -> None:
    """An assignment onto a module or a class of another package is a patch, and is listed."""
    unlisted = [
        f"{path}:{line}: {name}"
        for path in sorted(SERVER.rglob("*.py"))
        for line, name in replaced_in(path.read_text(encoding="utf-8"))
        if name not in listed() | SETTINGS and not is_ours(name)
    ]
    assert unlisted == []


@pytest.mark.parametrize(
    "line",
    [
        "import vllm.x\nvllm.x.Y.z = 1",
        "from vllm import x\nx.Y.z = 1",
        "from vllm.x import Y as y\ny.z, other = 1, 2",
        "def f():\n    from vllm import x\n    x.Y.z = 1",
        "from vllm import x\nsetattr(x.Y, 'z', 1)",
        "from vllm import x\nreplace(x.Y, 'z', 1)",
    ],
)
def test_a_replacement_is_seen_however_it_is_written(line: str) -> None:
    """As an assignment of any form, and by the two functions that make one."""
    assert [name for _, name in replaced_in(line)] == ["vllm.x.Y.z"]


@pytest.mark.parametrize(
    "line",
    [
        "from holdfast import x\nx.y = 1",
        "x = 1\nx.y = 1",
        "import os\nos.environ['X'] = '1'",
        "from dataclasses import replace\nfrom vllm import x\nreplace(x, y=1)",
    ],
)
def test_what_is_our_own_is_no_replacement(line: str) -> None:
    """An object of ours, a local one, an item of a mapping, and a copy of a record."""
    assert list(replaced_in(line)) == []


def test_no_patch_is_listed_twice() -> None:
    """Each is asked for by name."""
    assert len({patch.by for patch in PATCHES}) == len(PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.by)
def test_each_patch_says_why_since_when_and_where(patch: Patch) -> None:
    """It has a reason, versions, and the address of an issue or none."""
    assert patch.reason
    assert re.fullmatch(r"(vLLM 0\.32, 0\.33|CPython 3\.11 to 3\.13)( with .+)?", patch.seen_in)
    assert re.fullmatch(r"(https://github\.com/[\w-]+/[\w-]+/issues/\d+)?", patch.upstream)


def test_what_gains_speed_says_how_much() -> None:
    """A gain without a number is not worth a change to other people's code."""
    optional = {patch.by: patch.reason for patch in PATCHES if not patch.is_guarantee}
    assert {by for by, reason in optional.items() if not re.search(r"\d", reason)} == WITHOUT_NUMBER


def test_each_fit_that_is_asked_for_is_in_the_list() -> None:
    """And what is left out where it does not fit is asked for, or nothing would leave it out."""
    asked = {
        node.args[0].value
        for path in SERVER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "fits"
        and isinstance(node.args[0], ast.Constant)
    }
    assert asked == {patch.by for patch in PATCHES if not patch.is_guarantee}


def test_every_patch_is_applied() -> None:
    """What is in the list is called, or a guarantee would be gone without a word."""
    used = {name for path in sorted(SERVER.rglob("*.py")) for name in _used(path.read_text())}
    assert [one.by for one in PATCHES if one.by.rpartition(".")[2] not in used] == []


def _used(source: str) -> Iterator[str]:
    """The names that a module reads, those that it only imports not among them."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                yield name
