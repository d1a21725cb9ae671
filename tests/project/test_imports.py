"""The import rules: which packages may import vLLM, and the order of the layers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[2] / "server"

LAYERS = (
    {
        "",
        "atomic_files",
        "configuration_record",
        "early_signals",
        "errors",
        "labels",
        "lifecycle.states",
        "loopback",
        "races",
        "records",
        "request_context",
        "settings",
        "terminal",
        "verify.agreement",
        "verify.baseline",
        "verify.records",
        "versions",
        "workspace.plan",
    },
    {"telemetry"},
    {"workspace"},
    {"demo", "patches"},
    {"worker"},
    {"host_memory", "listener", "nodes", "processes"},
    {"engine.model", "engine.unsupported", "engine.vllm_errors"},
    {"engine.grammars", "engine.media", "engine.requests"},
    {"engine.suspects"},
    {"engine"},
    {"engine.launch"},
    {"planning", "probe"},
    {"lifecycle"},
    {"api", "configuration", "hide_keys"},
    {"status_page"},
    {"application", "doctor", "follow", "health_check", "remote_server", "serve", "top", "verify"},
    {"verify.checks.asking", "verify.checks.sampling", "verify.checks.twins", "verify.report"},
    {
        "verify.checks.chat",
        "verify.checks.oracle",
        "verify.checks.self_agreement",
        "verify.checks.skill",
        "verify.checks.soak",
        "verify.checks.survive",
        "verify.checks.tools",
        "verify.checks.wire",
    },
    {"verify.checks"},
    {"verify.command", "verify.comparison", "verify.diff"},
    {"cli"},
    {"__main__"},
)
"""From the bottom up; a module belongs to its longest prefix here, and `""` is holdfast itself."""

MAY_IMPORT_VLLM = {"demo", "engine", "patches", "planning", "worker", "workspace"}

DEMO_MAY_IMPORT = {"demo", "workspace.reservers"}
"""Beside the bottom layer: the demo model is a model like any other, made by another package."""

MAY_IMPORT_DEMO = {"demo", "engine.launch", "serve", "cli"}
"""Reservers, probe and ledger must not know the demo model."""

HEAVY = {"vllm", "torch", "transformers", "numpy", "fastapi", "starlette", "pydantic", "uvicorn"}


@dataclass(frozen=True, slots=True)
class Import:
    """One import of one module."""

    path: Path
    line: int
    importer: str
    """Below holdfast: `engine.client`, or `""` for holdfast itself."""
    imported: str
    """In full: `vllm.config`, `holdfast.errors`."""

    def violation(self, rule: str) -> str:
        """What is wrong, found by a click on `file:line`."""
        return f"{self.path}:{self.line}: imports {self.imported}: {rule}"


def area(module: str) -> str:
    """The longest prefix of `module` that is named in LAYERS, or its first word."""
    parts = module.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((p for p in prefixes if any(p in layer for layer in LAYERS)), parts[0])


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Every import in the file at `path`, those within functions and by name included."""
    parts = path.relative_to(root).with_suffix("").parts
    package = parts[:-1]
    importer = ".".join(package[1:] if parts[-1] == "__init__" else parts[1:])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for name in _imported(node, package):
            yield Import(path, getattr(node, "lineno", 0), importer, name)


def _imported(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom():
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            # A name may be a module of its own: `from holdfast.lifecycle import states`.
            return [f"{module}.{alias.name}" for alias in node.names]
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return [name]
        case _:
            return []


def violations(root: Path) -> list[str]:
    """Every breach of the import rule below `root`, as `file:line: what`."""
    found = (item for path in sorted(root.rglob("*.py")) for item in imports_of(path, root))
    return [item.violation(rule) for item in found if (rule := broken_rule(item))]


def broken_rule(item: Import) -> str:
    """The rule that the import breaks; empty if it breaks none."""
    package, _, rest = item.imported.partition(".")
    source = area(item.importer)
    if package == "vllm":
        is_allowed = source.partition(".")[0] in MAY_IMPORT_VLLM and source != "workspace.plan"
        return "" if is_allowed else f"only {sorted(MAY_IMPORT_VLLM)} import vLLM"
    return _broken_layer_rule(source, rest) if package == "holdfast" else ""


def _broken_layer_rule(source: str, imported: str) -> str:
    # What is in no known area is a name of holdfast itself, like `__version__`.
    target = area(imported) if _layer(area(imported)) is not None else ""
    source_layer, target_layer = _layer(source), _layer(target) or 0
    if source_layer is None:
        return f"{source} has no layer; give it one in LAYERS"
    if target_layer > source_layer:
        return f"{source or 'holdfast'} is below {target}"
    if source == "demo" and target_layer > 0 and not _is_within(imported, DEMO_MAY_IMPORT):
        return "demo/ knows only what another package could know"
    if target == "demo" and source not in MAY_IMPORT_DEMO:
        return f"{source} must not know the demo model"
    return ""


def _layer(name: str) -> int | None:
    return next((index for index, layer in enumerate(LAYERS) if name in layer), None)


def _is_within(module: str, areas: set[str]) -> bool:
    return any(module == area or module.startswith(f"{area}.") for area in areas)


def write_module(root: Path, module: str, lines: str) -> Path:
    path = root / "holdfast" / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{lines}\n")
    return path


def test_the_server_keeps_the_import_rule() -> None:
    """No module of the server imports vLLM or a layer that it must not."""
    assert violations(SERVER) == []


def own_imports(root: Path) -> Iterator[tuple[str, str]]:
    """Every import of a module of holdfast by another one: the importer and the imported."""
    paths = sorted((root / "holdfast").rglob("*.py"))
    names = {".".join(path.relative_to(root).with_suffix("").parts[1:]) for path in paths}
    modules = {name.removesuffix("__init__").removesuffix(".") for name in names}
    for item in (one for path in paths for one in imports_of(path, root)):
        package, _, name = item.imported.partition(".")
        if package == "holdfast":
            # `imports_of` also names what is in a module.
            module = name if name in modules else name.rpartition(".")[0]
            yield item.importer, module


def processes_of_packages() -> dict[str, frozenset[str]]:
    """The last column of the map, by package; empty for what runs in every process."""
    text = ast.get_docstring(ast.parse((SERVER / "holdfast" / "__init__.py").read_text())) or ""
    rows = re.findall(r"^ {4}(\w+)/ +.+? {2,}(\w[\w, ]*)$", text, re.MULTILINE)
    return {name: frozenset(column.split(", ")) - {"all"} for name, column in rows}


def test_a_package_runs_in_a_process_of_each_package_that_imports_it() -> None:
    """The map names it. Commands do not count, since they use what they need of any package."""
    processes = processes_of_packages()
    assert processes.keys() == {path.parent.name for path in (SERVER / "holdfast").glob("*/*.py")}
    strangers = {
        (importer, imported)
        for importer, imported in own_imports(SERVER)
        if (users := processes.get(importer.partition(".")[0], frozenset()) - {"command"})
        and (used := processes.get(imported.partition(".")[0]))
        and users.isdisjoint(used)
    }
    assert strangers == set()


def a_cycle(imports: Iterable[tuple[str, str]], node_of: Callable[[str], str]) -> list[str]:
    """Return modules or areas that import each other in a ring; empty if none do."""
    graph = defaultdict(set)
    for importer, imported in imports:
        if node_of(importer) != node_of(imported):
            graph[node_of(importer)].add(node_of(imported))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("node_of", [str, area], ids=["module", "area"])
def test_no_imports_form_a_cycle(node_of: Callable[[str], str]) -> None:
    """Within a layer, too: neither modules nor the packages of LAYERS import each other."""
    assert a_cycle(own_imports(SERVER), node_of) == []


@pytest.mark.parametrize(("node_of", "cycle"), [(str, set()), (area, {"api", "probe"})])
def test_a_cycle_is_named(tmp_path: Path, node_of: Callable[[str], str], cycle: set[str]) -> None:
    """Two packages that import modules of each other form one, though no two modules do."""
    write_module(tmp_path, "api/gate.py", "from holdfast.probe import sizes")
    write_module(tmp_path, "api/errors.py", "")
    write_module(tmp_path, "probe/sizes.py", "")
    write_module(
        tmp_path, "probe/client.py", "def f():\n    from holdfast.api.errors import refuse"
    )
    assert set(a_cycle(own_imports(tmp_path), node_of)) == cycle


def test_every_module_has_a_layer() -> None:
    """A new package or module is placed in LAYERS before it is used."""
    paths = sorted((SERVER / "holdfast").rglob("*.py"))
    names = [".".join(path.relative_to(SERVER).with_suffix("").parts[1:]) for path in paths]
    assert [name for name in names if _layer(area(name.removesuffix("__init__"))) is None] == []


@pytest.mark.parametrize(
    ("module", "line", "rule"),
    [
        ("probe.py", "import vllm", "import vLLM"),
        ("api/gate.py", "def f():\n    from vllm.config import VllmConfig", "import vLLM"),
        ("telemetry/logs.py", "import importlib\nimportlib.import_module('vllm')", "import vLLM"),
        ("workspace/plan.py", "import vllm", "import vLLM"),
        ("errors.py", "from holdfast.engine import proxy", "errors is below engine"),
        ("workspace/plan.py", "from holdfast.workspace.stats import f", "is below workspace"),
        ("engine/proxy.py", "from holdfast import lifecycle", "engine is below lifecycle"),
        ("engine/proxy.py", "from ..lifecycle.supervisor import f", "engine is below lifecycle"),
        ("lifecycle/supervisor.py", "import holdfast.api.gate", "lifecycle is below api"),
        ("api/gate.py", "from holdfast.serve import serve", "api is below serve"),
        ("serve.py", "from . import cli", "serve is below cli"),
        ("demo/model.py", "from holdfast.telemetry.logs import f", "demo/ knows only"),
        ("demo/model.py", "from holdfast.workspace import manager", "demo/ knows only"),
        ("probe/sizes.py", "from holdfast import demo", "must not know the demo"),
        (
            "verify/trial.py",
            "from holdfast.verify.report import page",
            "verify is below verify.report",
        ),
        (
            "verify/checks/sampling.py",
            "from holdfast.verify.checks.wire.streams import f",
            "verify.checks.sampling is below verify.checks.wire",
        ),
        ("surprise.py", "from holdfast.errors import f", "surprise has no layer"),
    ],
)
def test_a_breach_is_named_with_file_and_line(
    tmp_path: Path, module: str, line: str, rule: str
) -> None:
    """Each breach of the rule is reported once, at the line of the import."""
    path = write_module(tmp_path, module, line)
    (found,) = violations(tmp_path)
    assert found.startswith(f"{path}:{1 + line.count(chr(10))}: ")
    assert rule in found


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("engine/proxy.py", "from vllm.config import VllmConfig"),
        ("engine/proxy.py", "from holdfast.lifecycle import states"),
        ("engine/proxy.py", "from holdfast.workspace.stats import read_all"),
        ("demo/reserver.py", "from holdfast.workspace.reservers import Declaration"),
        ("demo/files.py", "from holdfast.workspace.plan import MIB"),
        ("demo/__init__.py", "from . import model"),
        ("serve.py", "from holdfast import __version__, demo"),
        ("__main__.py", "from holdfast.cli import main"),
    ],
)
def test_what_the_rule_allows_is_not_reported(tmp_path: Path, module: str, line: str) -> None:
    """Imports down the layers, and the exceptions that the rule names, break nothing."""
    write_module(tmp_path, module, line)
    assert violations(tmp_path) == []


@pytest.mark.parametrize("arguments", [("-c", "import holdfast.cli"), ("-m", "holdfast", "--help")])
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    """The command line and its help are read without vLLM, torch or the web stack."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "holdfast.cli" in imported or "-m" in arguments
    assert {name.partition(".")[0] for name in imported} & HEAVY == set()
