"""The map of the server: `holdfast/__init__.py`, and what each package says of itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "server" / "holdfast"
MAP = PACKAGE / "__init__.py"
PACKAGES = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
CHECKS = PACKAGE / "verify" / "checks"
"""Its packages list their modules as code: `CHECKS` in the order in which they run."""
WITH_A_LIST = sorted(
    path.parent for path in PACKAGE.glob("*/**/__init__.py") if not path.is_relative_to(CHECKS)
)

REFUSALS = {
    "GenerationError",
    "GracefulHTTPError",
    "RefusedError",
    "VLLMNotFoundError",
    "VLLMUnprocessableEntityError",
    "VLLMValidationError",
    "create_error_response",
    "openai_error",
}
"""Whatever makes one of these refuses a request."""

ONLY_WORD_THEM = {"api.errors", "engine.outputs", "patches.broken_responses"}
"""What others have refused, in the form that a client or vLLM expects."""


def docstring(path: Path) -> str:
    """What the module says of itself."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def test_every_name_in_the_map_exists() -> None:
    """A newcomer finds each module, class and function where the map says it is."""
    named = re.findall(r"`([a-z_]+(?:\.\w+)*)`", docstring(MAP))
    missing = []
    for name in named:
        path, *inside = name.split(".")
        here = PACKAGE / path
        while inside and here.is_dir():
            here /= inside.pop(0)
        file = here / "__init__.py" if here.is_dir() else here.with_suffix(".py")
        text = file.read_text() if file.exists() else ""
        if not text or not all(re.search(rf"\b{part}\b", text) for part in inside):
            missing.append(name)
    assert named
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.name))
def test_every_package_says_where_it_runs(package: Path) -> None:
    """Its docstring names the process: what is true in one is not in another."""
    text = docstring(package / "__init__.py")
    assert re.search(r"\bruns? in\b|\bprocess", text, re.IGNORECASE)


@pytest.mark.parametrize("package", WITH_A_LIST, ids=lambda path: module_name(path / "__init__.py"))
def test_every_module_is_in_the_list_of_its_package(package: Path) -> None:
    """A newcomer finds each module by what its package says of it, and nothing that is gone."""
    text = docstring(package / "__init__.py")
    modules, first_column = modules_of(package), listed(text)
    assert modules - first_column - set(re.findall(r"`(\w+)`", text)) == set()
    assert {name for name in first_column - modules if not (package / name).is_dir()} == set()


def test_every_package_is_in_the_map() -> None:
    """And in the table of CONTRIBUTING; neither has another one."""
    known = {path.name for path in PACKAGES}
    table = (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"^    (\w+)/ ", MAP.read_text(), re.MULTILINE)) == known
    assert set(re.findall(r"^\| `server/holdfast/(\w+)/`", table, re.MULTILINE)) == known


def test_every_module_beside_the_packages_is_in_the_map() -> None:
    """It is in a row of its own, or in the paragraph on the small ones."""
    text = docstring(MAP)
    named = listed(text) | set(re.findall(r"`(\w+)`", text))
    assert {path.stem for path in PACKAGE.glob("*.py")} - named == {"__init__", "__main__"}


def layers_of_a_request() -> list[str]:
    """The modules of the layers that `Application._layers` stacks, from the outside in."""
    tree = ast.parse((PACKAGE / "application.py").read_text())
    origins = {
        alias.name: node.module.removeprefix("holdfast.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    (stack,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "_layers"
    )
    made = [
        origins[node.func.id]
        for statement in stack.body
        for node in reversed([*ast.walk(statement)])  # the inner calls first
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    return made[::-1]


def test_the_map_has_the_layers_of_a_request_in_their_order() -> None:
    """Step 2 of a request names each layer, as the code stacks them."""
    _, _, step = MAP.read_text().partition("The layers of `api` follow:")
    named = re.findall(r"`(api\.\w+)`", step.partition("3.")[0])
    assert named == layers_of_a_request()


def listed(text: str) -> set[str]:
    """What a docstring names in the first column of its list: `    screen, cells    the same`."""
    rows = re.findall(r"^ {4}(\w+/?(?:, \w+/?)*)(?= {2})", text, re.MULTILINE)
    return {name.rstrip("/") for row in rows for name in row.split(", ")}


def modules_of(package: Path) -> set[str]:
    """The modules and the packages in a package, each by its own name."""
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    return packages | {path.stem for path in package.glob("*.py")} - {"__init__"}


def module_name(path: Path) -> str:
    """Its name below holdfast: `engine.replay`, and `engine` for the `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").removesuffix(".")


def refuses(path: Path) -> bool:
    """Whether the module makes an error that a client gets."""
    return any(
        isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) in REFUSALS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def test_every_module_that_refuses_a_request_is_named_with_the_reasons() -> None:
    """The list of reasons answers where a request is refused: by this module, or this package."""
    text = (PACKAGE / "labels.py").read_text()
    _, _, section = text.partition("RefusalReason = Literal[")
    named = set(re.findall(r"`([a-z_.]+)`", section.partition("NodeRefusalReason")[0]))
    refusing = {module_name(path) for path in sorted(PACKAGE.rglob("*.py")) if refuses(path)}
    assert "patches.parameters" in refusing
    assert {
        module
        for module in refusing - ONLY_WORD_THEM
        if not any(module == name or module.startswith(f"{name}.") for name in named)
    } == set()
