"""`PATCHES` is all of it: no line of the server puts anything else in the place of other code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import pytest

from holdfast.patches import PATCHES
from holdfast.patches.patch import Patch, owner_of
from overrides import Override, overrides_in, site_of
from replacements import Change, changes_in

SERVER = Path(__file__).parents[2] / "server"

WITHOUT_NUMBER = {
    # They gain something other than speed.
    "engine.requests.continuation.restore",
    "patches.log_lines.escape_controls",
    "patches.continued.resume_answers",
    "worker.crash_records.record_causes",
    "worker.ipc_names.name_ipc_after",
    # What they save takes several GPUs, or weights of many gigabytes, to measure.
    "patches.engine.find_weight_cache",
    "patches.engine.keep_builds",
}

SETTINGS = {"atexit.register", "faulthandler.register"} | {
    *("sys.argv", "sys.orig_argv", "tempfile.tempdir")
}
"""What may be set or called, as its documentation says."""

ROOMS = ("demo", "engine", "patches", "planning", "worker", "workspace")
"""The packages that import vLLM, and so have its objects."""

NOT_LISTED = {
    "an object of ours, of a type that the syntax does not show": {
        "api.admin.errors: app",
        "engine.requests.aborts: request",
        "engine.requests.arrivals: context",
        "engine.requests.arrivals: request",
        "engine.suspects.blame: request",
        "engine.launch.configure: self.launcher",
        "engine.grammars.checker: trial",
        "engine.launch.late_engine: launcher",
        "engine.launch.launcher: self.requests",
        "engine.launch.launcher: self.requests.aborts",
        "engine.launch.launcher: self.requests.presence",
        "engine.launch.launcher: self.requests.progress",
        "engine.requests.long_prompts: request",
        "engine.loras: proxy.adapters",
        "engine.media.budgets: context",
        "engine.media.public_fetch: budgets",
        "engine.replay: context",
        "engine.replay: request",
        "engine.replay: request.context",
        "engine.requests.request: request.context",
        "engine.requests.sequence_queue: context",
        "engine.requests.sequence_queue: sequence",
        "engine.requests.sequence_queue: sequence.context",
        "engine.suspects.presence: request",
        "engine.suspects.trials: request",
        "patches.answer_parsing: current_request()",
        "patches.request_bodies: current_request()",
        "patches.stat_logger: cls.shared",
        "patches.stat_logger: self.shared",
        "worker.steps: step",
        "workspace.manager: rule",
        "workspace.manager: self._gate.rule",
    },
    "a new object or a copy, which nothing else has yet": {
        "demo.tokenizer: tokenizer",
        "engine.checked_llm: error",
        "engine.requests.continuation: parameters",
        "engine.model.facts: common",
        "engine.model.facts: common.speculative_config",
        "engine.media.clips: counting",
        "engine.outputs: parameters",
        "engine.requests.missing_vectors: output",
        "engine.proxy: method",
        "patches.answer_parsing: error",
        "patches.chunks: model",
        "patches.engine: compiled",
        "patches.parameters: limited",
        "worker.agreement: changed",
        "worker.agreement: changed.model_config",
        "worker.agreement: options",
    },
    "the command line, or what a flag sets": {
        "engine.launch.arguments: namespace",
        "engine.grammars.compiler: self._model",
        "engine.launch.head_node: config.model_config",
        "engine.launch.head_node: parallel",
        "engine.launch.node_executor: namespace",
        "planning.command: namespace",
        "planning.config: attention",
    },
    "a logger's handlers and records, and an application's state, which are there to be set": {
        "engine.openai_app: app.state",
        "patches.log_lines: record",
        "worker.crash_records: logger",
        "worker.crash_records: record",
    },
    "in the list, with another function or by names in a variable": {
        "engine.checked_llm: self.input_processor",
        "engine.grammars.checker: constraint",
        "engine.media.limits: self._media_io",
        "patches.front_end: request",
        "patches.log_lines: vllm_logger",
        "patches.broken_responses: stored",
        "patches.media_names: chat_message",
        "patches.tokenizer: tokenizer",
        "worker.hooks: self._worker",
    },
    "the layers of the embedded model, which is built as one from outside of Holdfast is": {
        "demo.model: LlamaForCausalLM",
        "demo.model: self.attn",
        "demo.model: self.attn.impl",
    },
    "how everything in the list is replaced": {"patches.patch: owner"},
}
"""What is changed without a site in the list, as `module: owner`, by the reason for it."""


@cache
def listed(module: str = "") -> frozenset[str]:
    """The names that the list has, dotted; or what a module alone makes."""
    return frozenset(
        place.replace(":", ".")
        for patch in PATCHES
        for site in patch.sites
        for place in site.split(" or ")
        if not module or patch.by.rpartition(".")[0] == module
    )


def is_ours(name: str) -> bool:
    """What is added under a name of our own replaces nothing."""
    return "holdfast" in name


def is_listed(change: Change, module: str) -> bool:
    """Whether the list has it: in full, or by its name for a change that this module makes."""
    if change.imported:
        owner = change.imported.rpartition(".")[0] if change.is_call else ""
        return bool({change.imported, owner} & listed())
    return change.name in {place.rpartition(".")[2] for place in listed(module)}


def is_override_listed(override: Override, module: str) -> bool:
    """Whether the list has it: in full, also by another name of its class, or as a whole class."""
    name = override.site.rpartition(".")[2]
    if name == override.site:  # what it is depends on a variable
        return name in {place.rpartition(".")[2] for place in listed(module)}
    owner = override.site.rpartition(".")[0].replace(":", ".")
    same = {site_of(place) for place in listed() if place.rpartition(".")[2] == name}
    return owner in listed() or override.site in same


@cache
def unlisted_overrides() -> tuple[tuple[str, str], ...]:
    """Each override that the list does not have, as `module: base`, with where it is."""
    return tuple(
        (f"{module}: {override.base}", f"{path}:{override.line}: {override.site}")
        for path in sorted(SERVER.rglob("*.py"))
        for full in [".".join(path.relative_to(SERVER).with_suffix("").parts)]
        for module in [full.partition(".")[2]]
        for override in overrides_in(path.read_text(encoding="utf-8"), full)
        if not (is_ours(override.site) or is_override_listed(override, module))
    )


@cache
def unlisted() -> tuple[tuple[str, str], ...]:
    """Each change that the list does not have, as `module: owner`, with where it is."""
    return tuple(
        (f"{module}: {change.owner}", f"{path}:{change.line}: {change.name}")
        for path in sorted(SERVER.rglob("*.py"))
        for module in [".".join(path.relative_to(SERVER / "holdfast").with_suffix("").parts)]
        for change in changes_in(path.read_text(encoding="utf-8"))
        if change.imported or change.is_call or module.partition(".")[0] in ROOMS
        if not (is_ours(change.name) or change.imported in SETTINGS)
        if not is_listed(change, module)
    )


def test_every_replacement_is_in_the_list() -> None:
    """A change of what another package has made is a patch, and is listed."""
    known = set().union(*NOT_LISTED.values())
    found = unlisted() + unlisted_overrides()
    assert [f"{place} of {owner}" for owner, place in found if owner not in known] == []


def test_what_need_not_be_in_the_list_is_there() -> None:
    """A line for a change that is gone would hide the next one."""
    assert (
        set().union(*NOT_LISTED.values())
        - {owner for owner, _ in unlisted() + unlisted_overrides()}
        == set()
    )


@pytest.mark.parametrize(
    "line",
    [
        "import vllm.x\nvllm.x.Y.z = 1",
        "from vllm import x\nx.Y.z = 1",
        "from vllm.x import Y as y\ny.z, other = 1, 2",
        "def f():\n    from vllm import x\n    x.Y.z = 1",
        "from vllm import x\nsetattr(x.Y, 'z', 1)",
        "NAME = 'z'\nfrom vllm import x\nsetattr(x.Y, NAME, 1)",
        "from vllm import x\nreplace(x.Y, 'z', 1)",
        "from vllm import x\ndel x.Y.z",
    ],
)
def test_a_replacement_is_seen_however_it_is_written(line: str) -> None:
    """As an assignment of any form, and by the functions that make one."""
    assert [change.imported for change in changes_in(line)] == ["vllm.x.Y.z"]


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("def f(x):\n    x.y.z = 1", "x.y z"),
        ("def f(x: Any):\n    setattr(x, 'z', 1)", "x z"),
        ("def f(x):\n    for name in 'ab':\n        setattr(x, name, 1)", "x ?"),
        ("class A:\n    def f(self):\n        self.x.y = 1", "self.x y"),
        ("from holdfast.x import B\nfor b in B():\n    b.y = 1", "b y"),
        ("from holdfast.x import B\ndef f(x):\n    x = B()\n    x.y = 1", "x y"),
    ],
)
def test_a_change_of_any_object_is_seen(line: str, seen: str) -> None:
    """Through a parameter, an attribute, or a variable that may be anything."""
    assert [f"{change.owner} {change.name}" for change in changes_in(line)] == [seen]


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("from vllm.x import Y\nY.register(1)", "Y register"),
        ("import logging\nlogging.setLogRecordFactory(1)", "logging setLogRecordFactory"),
        ("def f(app):\n    app.add_exception_handler(1, 2)", "app add_exception_handler"),
        ("def f(app):\n    app.add_middleware(1)", "app add_middleware"),
        ("def f(app):\n    app.router.routes.insert(0, 1)", "app.router routes"),
    ],
)
def test_a_call_that_changes_its_object_is_seen(line: str, seen: str) -> None:
    """It puts something in front of other code without an assignment."""
    [change] = changes_in(line)
    assert change.is_call
    assert f"{change.owner} {change.name}" == seen


@pytest.mark.parametrize(
    "line",
    [
        "from holdfast import x\nx.y = 1",
        "class X:\n    def f(self):\n        self.x = 1",
        "from holdfast.x import X\ndef f(x: X | None):\n    x.y = 1",
        "from holdfast.x import X\ndef f():\n    x = X()\n    x.y = 1",
        "from holdfast.x import X\nclass A:\n def f(self, x: X):\n  self.x = x\n  self.x.y = 1",
        "import os\nos.environ['X'] = '1'",
        "from dataclasses import replace\nfrom vllm import x\nreplace(x, y=1)",
    ],
)
def test_what_is_our_own_is_no_replacement(line: str) -> None:
    """An object or a class of ours, an item of a mapping, and a copy of a record."""
    assert changes_in(line) == []


_PROTOCOL = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        (
            "import uvicorn\nclass A(uvicorn.Server):\n async def startup(self): 0",
            "uvicorn.server:Server.startup",
        ),
        (
            "def f():\n from uvicorn import Server as S\n class A(S):\n  def startup(self): 0",
            "uvicorn.server:Server.startup",
        ),
        (
            (
                "from holdfast.listener.bounded_connection import BoundedConnection as B\n"
                "class A(B):\n def on_url(self, url): 0"
            ),
            f"{_PROTOCOL}.on_url",
        ),
        (
            (
                "from multiprocessing import context\nclass A(context.ForkServerProcess):\n"
                " @staticmethod\n def _Popen(process): 0"
            ),
            "multiprocessing.context:ForkServerProcess._Popen",
        ),
        (
            "import asyncio\nclass A(asyncio.Queue[int]):\n def _get(self): 0",
            "asyncio.queues:Queue._get",
        ),
        (
            (
                "from multiprocessing.context import SpawnProcess\nclass A(SpawnProcess):\n"
                " _start_method: str = 'x'"
            ),
            "multiprocessing.context:SpawnProcess._start_method",
        ),
        ("def f(kind):\n class A(kind):\n  ours = 1\n  def g(self): 0", "g"),
    ],
)
def test_an_override_is_seen(line: str, seen: str) -> None:
    """Of a private name, or in a class of a package that promises none to derive from."""
    assert [override.site for override in overrides_in(line, "x")] == [seen]


@pytest.mark.parametrize(
    "line",
    [
        "import logging\nclass A(logging.Handler):\n def emit(self, record): 0",
        "import threading\nclass A(threading.Thread):\n def run(self): 0",
        "import uvicorn\nclass A(uvicorn.Server):\n def __init__(self): 0",
        "import uvicorn\nclass A(uvicorn.Server):\n def _ours(self): 0",
        "from vllm.platforms.interface import Platform\nclass A(Platform):\n def ours(self): 0",
        (
            "from holdfast.processes.forkserver import ForkedProcess\nclass A(ForkedProcess):\n"
            " def _Popen(process): 0"
        ),
        (
            "from prometheus_client.registry import Collector\nclass A(Collector):\n"
            " def collect(self): 0"
        ),
        "from vllm.engine.protocol import EngineClient as E\nclass A(E):\n def abort(self): 0",
        "from typing import NamedTuple\nclass A(NamedTuple):\n a: int = 1",
        "class A(Exception):\n def g(self): 0",
    ],
)
def test_what_a_library_lets_others_override_is_no_replacement(line: str) -> None:
    """A public method, a constructor, a new name, an abstract method, and a method of ours."""
    assert overrides_in(line, "x") == []


def test_no_patch_is_listed_twice() -> None:
    """Each is asked for by name."""
    assert len({patch.by for patch in PATCHES}) == len(PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.by)
def test_each_patch_says_why_since_when_and_where(patch: Patch) -> None:
    """It has a reason, versions, and the address of an issue or none."""
    assert patch.reason
    seen = r"(vLLM 0\.32, 0\.33|Python 3\.11 to 3\.13|[\w-]+ \d+(\.\d+)+)"
    assert re.fullmatch(rf"{seen}( with {seen})*", patch.seen_in)
    assert re.fullmatch(r"(https://github\.com/[\w-]+/[\w-]+/issues/\d+)?", patch.upstream)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.by)
def test_each_patch_says_which_version_of_each_owner_it_was_seen_in(patch: Patch) -> None:
    """The remedy for a site that is missing is that version."""
    seen = {one.partition(" ")[0] for one in patch.seen_in.split(" with ")}
    assert {owner_of(site) for site in patch.sites} <= seen
    assert all(name in {"vLLM", "Python"} or distribution(name).name == name for name in seen)


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
