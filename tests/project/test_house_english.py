"""What is read in the code and in the alerts is plain English."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from english import comments, docstrings, literals, slips

ROOT = Path(__file__).parents[2]
PACKAGES = (
    ROOT / "server" / "holdfast",
    *(ROOT / name for name in ("dashboards", "benchmarks", "gpu_check", "ops_tests", "scripts")),
    ROOT / "soak",
)
"""Not `demo_training`: the record of the weights has the hash of its code, docstrings included."""
TESTS = ROOT / "tests"
DEPLOYED = sorted(
    path
    for path in (ROOT / "deploy").rglob("*")
    if path.suffix in {".yml", ".yaml", ".tpl", ".txt"} and "tests" not in path.parts
)

SCRIPTS = sorted(
    path
    for place in ("deploy", "scripts", "server/holdfast/status_page/static")
    for path in (ROOT / place).rglob("*")
    if path.is_file() and path.suffix in {"", ".sh", ".js", ".conf", ".service"}
    if "vendor" not in path.parts
)
"""Their strings are also commands, which are English, too."""


def slips_of(source: str) -> list[str]:
    tree = ast.parse(source)
    said = (*literals(tree), *docstrings(tree), *comments(source))
    return [f"{line}: {slip}" for line, text in said for slip in slips(text)]


def slips_outside_strings(source: str) -> list[str]:
    said = (*docstrings(ast.parse(source)), *comments(source))
    return [f"{line}: {slip}" for line, text in said for slip in slips(text)]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.name))
def test_what_the_code_says_reads_as_english(package: Path) -> None:
    """Docstrings, comments, flags, metric helps, errors, remedies, log lines and panels."""
    found = {str(path): slips_of(path.read_text()) for path in package.rglob("*.py")}
    assert {path: slips for path, slips in found.items() if slips} == {}


def test_what_the_tests_say_of_themselves_reads_as_english() -> None:
    """Only docstrings and comments: their strings are also what clients and models send."""
    found = {str(path): slips_outside_strings(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path: slips for path, slips in found.items() if slips} == {}


@pytest.mark.parametrize("path", DEPLOYED, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_operators_edit_reads_as_english(path: Path) -> None:
    """Alerts, and the comments of values, rules and Compose files."""
    assert slips(path.read_text()) == []


@pytest.mark.parametrize(
    "path",
    [ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / "Dockerfile", *SCRIPTS],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_what_builds_and_draws_reads_as_english(path: Path) -> None:
    """Comments in TOML, shell and JavaScript, and what they print."""
    assert slips(path.read_text().replace("#", " ").replace("//", " ")) == []


@pytest.mark.parametrize(
    "text",
    [
        'f"{path} is no mapping."',
        '"those folders are no packages"',
        '"nothing " "but for health"',
        'f"a stream was answered {status}"',
        '"a proof that is not worth to wait for"',
        '"it has taken so long on the clock"',
        "f\"{wait:.0f} s, as {f'it is {kind}, and is no file'}\"",
    ],
)
def test_a_slip_in_the_code_is_found(text: str) -> None:
    """Also over two lines, and within what is filled in."""
    assert slips_of(f"raise ValueError({text})")


def test_a_slip_in_a_docstring_is_found() -> None:
    """Of a module, of a function and of a name; also where a line ends within it."""
    source = (
        '"""It is no page."""\ndef f():\n    """Wait for\n    ever."""\nx = 1\n"""One of which."""'
    )
    assert [slip.partition(":")[0] for slip in slips_of(source)] == ["1", "3"]


def test_a_slip_in_a_comment_is_found() -> None:
    """Also over two lines; what stands in a string is not a comment."""
    source = "x = 1  # there are two\n\n# Wait for\n# ever.\ny = 'x'  # as above\n"
    assert [slip.partition(":")[0] for slip in slips_of(source)] == ["3"]
