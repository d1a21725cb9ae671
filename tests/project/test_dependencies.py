"""Everything that Holdfast imports is declared, and what is declared is enough to start."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    packages_distributions,
)
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from holdfast.verify import packages

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "server"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = PROJECT["dependencies"]
FOR_VERIFY = PROJECT["optional-dependencies"]["verify"]
OF_VERIFY = {module: [name] for module, name in packages.DISTRIBUTIONS.items()}
"""They may be missing here."""
BESIDE_VLLM = {"demo", "engine", "patches", "planning", "processes", "worker", "workspace"}
"""The packages that run only where vLLM is, and so may import what vLLM requires."""
WITHOUT_IT = {Path("doctor/gpus.py")}
"""What asks for something that vLLM requires, and says so where it is missing."""


def names_of(requirements: Iterable[str]) -> set[str]:
    """The distributions that some requirements ask for on this machine, without extras."""
    parsed = [Requirement(one) for one in requirements]
    return {
        canonicalize_name(one.name)
        for one in parsed
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The distributions that some requirements bring, as far as they are here, by name."""
    found: dict[str, Distribution] = {}
    wanted = list(names_of(requirements))
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        with suppress(PackageNotFoundError):  # the pins leave out what vLLM needs on GPUs alone
            found[name] = distribution(name)
            wanted += names_of(found[name].requires or ())
    return found


def third_party_imports() -> Iterator[tuple[Path, str]]:
    """Every import of a module that is neither Python's nor ours: the file and the module."""
    for path in sorted((SERVER / "holdfast").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import():
                    modules = [alias.name for alias in node.names]
                case ast.ImportFrom(module=str(module), level=0):
                    modules = [module]
                case _:
                    continue
            for module in modules:
                top = module.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in {"holdfast", "vllm"}:
                    yield path.relative_to(SERVER / "holdfast"), top


def test_every_import_is_declared() -> None:
    """By the package itself, or by vLLM for the packages that import vLLM anyway."""
    providers = {**packages_distributions(), **OF_VERIFY}
    ours = names_of(DECLARED)
    (vllm,) = providers["vllm"]
    vllms = set(closure([vllm]))
    undeclared = []
    for path, module in third_party_imports():
        provided_by = {canonicalize_name(name) for name in providers.get(module, ())}
        is_beside = path.parts[0] in BESIDE_VLLM or path in WITHOUT_IT
        allowed = ours | vllms if is_beside else ours
        if path.parts[0] == "verify":
            allowed = ours | names_of(FOR_VERIFY)
        if not provided_by & allowed:
            undeclared.append(f"{path}: {module}")
    assert undeclared == []


def test_the_extra_of_verify_has_its_packages() -> None:
    """What a check asks for by name is what the extra `verify` brings."""
    assert {canonicalize_name(name) for name in packages.DISTRIBUTIONS.values()} == names_of(
        FOR_VERIFY
    )


@pytest.fixture(scope="module")
def declared_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with exactly what pip installs for the package without extras."""
    directory = tmp_path_factory.mktemp("declared")
    for found in closure(DECLARED).values():
        for top in {Path(str(file)).parts[0] for file in found.files or ()}:
            source = Path(str(found.locate_file(top)))
            if top not in {"..", "__pycache__"} and not (directory / top).exists():
                (directory / top).symlink_to(source)
    return directory


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "--help"), "--workspace-headroom"),
        (("serve", "--help=all"), "vLLM is not installed"),
        (("serve", "--demo"), "vLLM is not installed"),
        (("plan", "--demo"), "vLLM is not installed"),
        (("doctor",), "vLLM is not installed"),
        (("health", "--port", "1"), "Connection refused"),
        (("verify", "http://127.0.0.1:1"), "start the server"),
        (("verify", "diff", "a", "b"), "a is not a report"),
        (("top", "http://127.0.0.1:1"), "whether the server runs"),
        (("follow", "--help"), "--node-key-file"),
        (("--version",), "holdfast"),
    ],
)
def test_what_is_declared_is_enough_without_vllm(
    declared_packages: Path, arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """The commands start, and say in words that vLLM is missing where they need it."""
    code = (
        "import sys\n"
        f"sys.path[:0] = [{str(SERVER)!r}, {str(declared_packages)!r}]\n"
        "from holdfast.cli import main\n"
        f"main({list(arguments)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    assert said in output
