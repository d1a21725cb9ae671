"""The house rules that neither ruff nor mypy knows."""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
MAP = ROOT / "server" / "holdfast" / "__init__.py"

QUESTION = re.compile(r"_?(is|are|has|have|had|was|were|may|can|must|needs?|[a-z]+s)(_|$)")
"""How the name of a boolean begins: `is_ready`, `reads_steps`."""

FOREIGN_BOOLEANS = {
    *("_locked", "deep", "errored", "finished", "zero_init"),  # of vLLM and PyYAML
    *("grew", "limited", "passed", "replace"),  # of published JSON
}

INTERFACES = {
    "EngineLauncher": {"engine.interface", "engine.launch.launcher"},
    "Maintenance": {"engine.interface", "engine.maintenance"},
    "Prober": {"lifecycle.host", "probe.suite"},
}
"""Protocols that keep vLLM or a higher layer out of the first module, and what implements them."""

# Every pattern is written so that it does not match its own text.
MACHINE_PATH = re.compile(r"(?<![\w.~$})-])/(?:(?:work|root|farm)/|opt/(?:wheels|pypi))")
REGISTRY_HOST = re.compile(r"pypi[.]org|python[h]osted|npm[j]s|deb[.]debian[.]org")
INSTALLED_BY_NAME = re.compile(
    r"\bhold[f]ast\[[a-z]|(?:\bpip[x3]?|\buv (?:tool|pip)) install\b.*?[\s'\"]hold[f]ast(?![-/.\w])"
    r"|pkg:py[p]i/|\binstall hold[f]ast in\b"
)
"""In package indexes, that name is another project's: users install Holdfast from a checkout."""
UNFINISHED = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X])\b")


def committed_files() -> Iterator[Path]:
    """Every file but what .gitignore keeps out; without git, which an archive does not need."""
    ignored = (ROOT / ".gitignore").read_text().split()
    patterns = [pattern.rstrip("/") for pattern in [".git", *ignored]]
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not any(fnmatch(name, p) for p in patterns)]
        # In a work tree of git's, .git is a file.
        yield from (Path(folder, n) for n in names if not n.endswith((".pyc", ".git")))


def matches(pattern: re.Pattern[str]) -> list[str]:
    """Every line of the tree that matches, as `file:line: text`; pictures and weights have none."""
    return [
        f"{path}:{number}: {line.strip()}"
        for path in committed_files()
        if path.suffix not in {".png", ".safetensors"}
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]


def booleans(path: Path) -> Iterator[str]:
    """The name of each field, argument and property of a module that is a bool."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="bool")):
                yield name
            case ast.AnnAssign(target=ast.Attribute(attr=name), annotation=ast.Name(id="bool")):
                yield name
            case ast.arg(arg=name, annotation=ast.Name(id="bool")):
                yield name
            case ast.FunctionDef(
                name=name, returns=ast.Name(id="bool"), decorator_list=[ast.Name(id="property")]
            ):
                yield name


def requirements(name: str) -> list[Requirement]:
    """The pins of one requirement file."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [
        Requirement(line.partition(" --hash=")[0]) for line in lines if not line.startswith("#")
    ]


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY_HOST, INSTALLED_BY_NAME, UNFINISHED])
def test_no_file_names_what_it_must_not(pattern: re.Pattern[str]) -> None:
    """No file names a path of one machine, a registry, a stranger's package, or unfinished work."""
    assert matches(pattern) == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (MACHINE_PATH, "cd /" + "work/main"),
        (MACHINE_PATH, "file:///" + "opt/wheels"),
        (MACHINE_PATH, '"/' + 'root/x"'),
        (REGISTRY_HOST, "https://pypi" + ".org/simple"),
        (INSTALLED_BY_NAME, "pip install hold" + "fast"),
        (INSTALLED_BY_NAME, "uv pip install 'hold" + "fast[verify]'"),
        (INSTALLED_BY_NAME, "pkg:py" + "pi/anything"),
        (UNFINISHED, "# TO" + "DO: later"),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern: re.Pattern[str], text: str) -> None:
    """Each pattern finds an example of what no file may name."""
    assert pattern.search(text)


def has_docstring(path: Path) -> bool:
    """Whether the module says what it is for, or has nothing to say: an empty `__init__.py`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return not tree.body or ast.get_docstring(tree) is not None


def test_every_module_says_what_it_is_for() -> None:
    """Every module of server, benchmarks and GPU check that has code has a docstring."""
    folders = [ROOT / "server", ROOT / "benchmarks", ROOT / "gpu_check"]
    modules = [path for folder in folders for path in folder.rglob("*.py")]
    assert [str(path) for path in modules if not has_docstring(path)] == []


def test_every_test_states_the_behaviour() -> None:
    """Every test has a docstring: the one behaviour that it shows."""
    assert [
        f"{path}:{node.lineno}: {node.name}"
        for path in committed_files()
        if path.suffix == ".py" and path.name.startswith("test_")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_") and ast.get_docstring(node) is None
    ] == []


def test_every_module_that_the_images_and_the_docs_import_exists() -> None:
    """A module that is moved is moved in what no type checker reads, too."""
    texts = [p.read_text() for p in (ROOT / "Dockerfile", *sorted((ROOT / "docs").glob("*.md")))]
    named = {
        name for text in texts for name in re.findall(r"(?:import|from) (holdfast[.\w]+)", text)
    }
    assert named
    assert [name for name in sorted(named) if find_spec(name) is None] == []


def test_no_module_is_too_long_to_read_at_once() -> None:
    """A module has at most 350 lines, except two tables that have a row for each thing."""
    tables = {"patches/__init__.py", "telemetry/metrics.py"}
    long = {
        path.relative_to(MAP.parent).as_posix()
        for path in MAP.parent.rglob("*.py")
        if len(path.read_text().splitlines()) > 350
    }
    assert long == tables


def test_every_boolean_is_a_question() -> None:
    """Its name can be answered with yes or no, unless others have given it."""
    asked = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "server").rglob("*.py")
        for name in booleans(path)
        if name not in FOREIGN_BOOLEANS and not QUESTION.match(name)
    }
    assert asked == set()


def type_name(node: ast.stmt) -> str:
    """The public name of a class, an alias of a type, a type variable or a closed set of values.

    Empty for any other statement. Constants are written in capitals.
    """
    match node:
        case ast.ClassDef(name=name):
            pass
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            if name.upper() == name or not name.lstrip("_")[0].isupper():
                return ""
        case _:
            return ""
    return "" if name.startswith("_") else name


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("class Answer: ...", "Answer"),
        ('Answer = TypeVar("Answer")', "Answer"),
        ("Answer = Callable[[Status], bool]", "Answer"),
        ('Answer: TypeAlias = Literal["yes", "no"]', "Answer"),
        ("_Answer = dict[str, str]", ""),
        ('ANSWER = "yes"', ""),
        ("answer = ask()", ""),
    ],
)
def test_a_name_of_a_type_is_known(statement: str, name: str) -> None:
    """However it is declared; what is private is read in one module only."""
    (node,) = ast.parse(statement).body
    assert type_name(node) == name


def test_every_type_of_the_package_has_a_name_of_its_own() -> None:
    """A name that is read anywhere is one thing, except a protocol and what implements it."""
    modules = defaultdict(set)
    for path in MAP.parent.rglob("*.py"):
        module = ".".join(path.relative_to(MAP.parent).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if name := type_name(node):
                modules[name].add(module)
    assert {name: found for name, found in modules.items() if len(found) > 1} == INTERFACES


@pytest.mark.parametrize("name", ["cpu.txt", "dev.txt"])
def test_every_requirement_is_one_exact_version(name: str) -> None:
    """Each line pins one package with `==`, and none twice."""
    pins = requirements(name)
    assert [str(pin) for pin in pins if not re.fullmatch(r"==[^*,]+", str(pin.specifier))] == []
    assert len({(normalised(pin.name), str(pin.marker)) for pin in pins}) == len(pins)


@pytest.mark.parametrize("name", ["cpu.txt", "dev.txt", "ops.txt", "browser.txt", "routers.txt"])
def test_every_pin_has_the_hashes_of_its_files(name: str) -> None:
    """pip accepts no other file, except for a build of torch that only other machines download."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    bare = [
        line
        for line in lines
        if not line.startswith("#") and not re.search(r"( --hash=sha256:[0-9a-f]{64})+$", line)
    ]
    assert bare == (
        ['torch==2.13.0+cpu ; platform_machine != "x86_64"'] if name == "cpu.txt" else []
    )


def test_what_is_installed_has_to_have_its_hash() -> None:
    """Each command that installs the lists tells pip to refuse what has none."""
    scripts = ("scripts/setup", "scripts/ops-tools", "scripts/browser-tools")
    for path in ("Dockerfile", *scripts):
        text = (ROOT / path).read_text().replace("\\\n", " ")
        lists = r"(-r|--requirement)[ =]\S*((cpu|ops|ours|browser)\.txt|\$pins)|\]/#/--requirement="
        asked = [line for line in text.splitlines() if re.search(lists, line)]
        assert asked
        assert [line for line in asked if "--require-hashes" not in line] == []


def test_the_pins_satisfy_the_package() -> None:
    """What pyproject.toml asks for at run time is pinned, in a version that it accepts."""
    pinned = {normalised(pin.name): pin.specifier for pin in requirements("cpu.txt")}
    wanted = [Requirement(text) for text in requires("holdfast") or () if "extra" not in text]
    assert wanted
    for requirement in wanted:
        version = str(pinned[normalised(requirement.name)]).removeprefix("==")
        assert requirement.specifier.contains(version), requirement


def test_builds_that_break_the_import_of_transformers_are_not_pinned() -> None:
    """torchvision, torchaudio and torchcodec stay out: their usual builds want CUDA."""
    names = {normalised(pin.name) for pin in [*requirements("cpu.txt"), *requirements("dev.txt")]}
    assert names & {"torchvision", "torchaudio", "torchcodec"} == set()


def normalised(name: str) -> str:
    """The name as the packaging standard compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
