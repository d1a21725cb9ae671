"""The documentation says what the code does."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from english import slips
from holdfast import cli
from holdfast.api.admin import admin_app
from holdfast.api.body_cost import COSTLY_VALUES
from holdfast.api.follower_health import follower_routes
from holdfast.api.health import health_routes, report
from holdfast.api.key_lines import key_lines
from holdfast.api.limits import MAX_JSON_VALUES
from holdfast.api.load import routing_route
from holdfast.api.metrics import metrics_route
from holdfast.api.usage_files import LOCK_FILE as USAGE_LOCK
from holdfast.api.usage_files import usage_file, usage_kept
from holdfast.doctor.findings import HAZARDS
from holdfast.errors import ExitCode
from holdfast.host_memory.guard import INTERVAL_SECONDS, READINGS_TO_END
from holdfast.labels import (
    DEATH_CAUSES,
    LOSS_REASONS,
    PROBE_STEPS,
    RECYCLE_REASONS,
    REFUSAL_REASONS,
)
from holdfast.lifecycle.states import HEALTHY, HOPELESS, SERVING, State
from holdfast.nodes.command_line import StopSettings, follow_parser, read_follow
from holdfast.nodes.follower import FollowerState
from holdfast.planning import DEVICE_NAMES
from holdfast.records import FollowerStatus
from holdfast.settings import flags, variable_names
from holdfast.settings.recycling import recycle_limits
from holdfast.settings.variable_names import IMAGE_VARIABLE, NOT_THE_KEY
from holdfast.status_page.feed import Feed
from holdfast.status_page.shell import StaticFiles, shell_routes
from holdfast.status_page.stream import stream_route
from holdfast.telemetry.key_usage import KeyUsage, Used
from holdfast.telemetry.load import Load
from holdfast.telemetry.metrics import FOLLOWER_METRICS, METRICS
from holdfast.telemetry.routing import ROUTING_SERIES, Routing
from holdfast.top.command import top_parser
from holdfast.verify.checks import ALL
from holdfast.verify.checks.tools.keywords import cases
from holdfast.verify.checks.wire.routes import ROUTES
from holdfast.verify.command import EXIT_CODES, verify_parser
from holdfast.verify.diff import diff_parser
from holdfast.verify.records import GROUPS, Group, Profile
from sample_status import a_status
from schema_keywords import limiting, used_by
from scripted_page import no_text
from scripts import reference

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
README = ROOT / "README.md"
REFERENCE = reference.PAGE
OPERATING = ROOT / "docs" / "operating.md"
DEPLOYING = ROOT / "docs" / "deploying.md"
HOW_IT_WORKS = ROOT / "docs" / "how-it-works.md"
DASHBOARDS = ROOT / "docs" / "dashboards.md"
ADMIN = ROOT / "docs" / "admin.md"
GPU_CHECK = ROOT / "docs" / "gpu-check.md"
GPU_REPORT = ROOT / "docs" / "gpu-report.md"
VERIFYING = ROOT / "docs" / "verifying.md"
SEVERAL_NODES = ROOT / "docs" / "several-nodes.md"
STATUS_PAGE = ROOT / "docs" / "status-page.md"
BEHIND_A_ROUTER = ROOT / "docs" / "behind-a-router.md"
DEMO_MODEL = ROOT / "docs" / "demo-model.md"
PAGES = (
    README,
    REFERENCE,
    GPU_CHECK,
    GPU_REPORT,
    HOW_IT_WORKS,
    DEPLOYING,
    OPERATING,
    DASHBOARDS,
    ADMIN,
    VERIFYING,
    SEVERAL_NODES,
    STATUS_PAGE,
    BEHIND_A_ROUTER,
    DEMO_MODEL,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
)

Row = tuple[str, ...]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"(?:\]\(|\bsrc(?:set)?=\")([^)\s\"]+)[)\"]")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FLAG = re.compile(r"--[a-z][a-z-]*")


CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|^ {4}[^\n]*$", re.MULTILINE | re.DOTALL)
RUNBOOKS = ROOT / "deploy" / "runbooks"
FOLLOW_FLAGS = "### Flags of `holdfast follow`"
VARIABLES = "## Environment variables"
FOLLOWER_ROUTES = "### Routes of a follower"
PROFILES: Mapping[str, tuple[Profile, ...]] = {
    "`quick`": ("quick", "standard", "full", "soak"),
    "`standard`": ("standard", "full"),
    "`full`": ("full",),
    "`soak`": ("soak",),
}
"""The profiles that run a check, by the one that its row names."""
A_FOLLOWER = FollowerStatus("b", "waiting", "h:29600", is_connected=True)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}: {self.text[:60]!r}"


def table(page: Path, heading: str) -> list[Row]:
    """The rows of the first table below a heading, without its head, with escaped bars undone."""
    _, found, section = page.read_text().partition(f"\n{heading}\n")
    assert found, f"{page.name} has no heading {heading!r}"
    table_lines: list[str] = []
    for line in section.splitlines():
        if line.startswith("|"):
            table_lines.append(line)
        elif table_lines:
            break
    return [_cells(line) for line in table_lines[2:]]


def _cells(line: str) -> Row:
    cells = re.split(r"(?<!\\)\|", line)[1:-1]
    return tuple(cell.strip().replace(r"\|", "|") for cell in cells)


def blocks(*languages: str) -> list[Block]:
    """Every fenced block of these languages, on any page."""
    return [
        Block(page, language, text)
        for page in PAGES
        for language, text in BLOCK.findall(page.read_text())
        if language in languages
    ]


def commands() -> Iterator[tuple[Path, list[str]]]:
    """Every command after a `$` prompt, with the lines that it is continued on."""
    for block in blocks("console"):
        text = block.text.replace("\\\n", " ")
        yield from (
            (block.page, shlex.split(line.removeprefix("$ ")))
            for line in text.splitlines()
            if line.startswith("$ ")
        )


def route_paths() -> set[str]:
    """The paths that the front end answers itself."""
    routes = health_routes(a_status, queue=lambda: (0, 0))
    page = [stream_route(Feed(dict)), *shell_routes(StaticFiles.read(), no_text)]
    scraped = [metrics_route(lambda: ()), routing_route(lambda: Routing(Load(), is_ready=True))]
    return {route.path for route in [*routes, *page, *scraped]}


def test_the_tables_of_flags_and_metrics_are_those_of_the_code() -> None:
    """Every flag and metric has its row, in the words of `--help` and of `/metrics`."""
    page = REFERENCE.read_text()
    assert page == reference.written(page), "run `make reference`"


def test_the_commands_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command of `holdfast --help` has its row, in its order."""
    with pytest.raises(SystemExit):
        cli._command(["--help"])
    known = re.findall(r"^    ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)
    named = [row[0].split()[1].strip("`") for row in table(REFERENCE, "## Commands")]
    assert list(dict.fromkeys(named)) == known


def test_the_devices_of_a_plan_are_named() -> None:
    """The row of `holdfast plan` has every value of `--device`, in the order of the code."""
    (row,) = (row for row in table(REFERENCE, "## Commands") if row[0].startswith("`holdfast plan"))
    assert tuple(name for name in INLINE.findall(row[1]) if name in DEVICE_NAMES) == DEVICE_NAMES


def test_the_files_are_those_of_the_code() -> None:
    """Every kind of file that the code names in the state directory has its row, and no other."""
    sources = "\n".join(path.read_text() for path in (ROOT / "server").rglob("*.py"))
    written = set(re.findall(r'f"([a-z]+)-\{[^"\n]*\.json"', sources))
    rows = table(REFERENCE, "## Files")
    named = {name.split("-")[0] for row in rows for name in INLINE.findall(row[0])}
    assert written <= named
    assert [kind for kind in sorted(named) if f'f"{kind}-{{' not in sources] == []


def test_the_exit_codes_are_those_of_the_help() -> None:
    """The reference has every exit code, in the words of `--help`."""
    rows = table(REFERENCE, "## Exit codes")
    assert [row[0] for row in rows] == [str(int(code)) for code in ExitCode]
    listed = ", ".join(" ".join(row) for row in rows)
    assert f"Exit codes: {listed}." in " ".join(cli._SERVE_EPILOG.split())


def test_the_states_of_a_follower_are_those_of_the_code() -> None:
    """Each is named, and none is called as what the proof does, which no follower has."""
    (listed,) = re.findall(
        r"^Its states are (.*?)\.$", REFERENCE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert tuple(INLINE.findall(listed)) == get_args(FollowerState)
    assert not any(state.startswith("prov") for state in get_args(FollowerState))


def codes_of(text: str) -> list[str]:
    """The exit codes in a list of them and their meanings."""
    return re.findall(r"\b(\d)(?= |$)", text)


def test_the_other_commands_have_their_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Each but `serve` and `follow` has a row, with the codes of its help or of its guide."""
    _, _, section = REFERENCE.read_text().partition("\n## Exit codes\n")
    rows = dict(re.findall(r"^\| `holdfast (\w+)[^`]*` \| (.*) \|$", section, re.MULTILINE))
    assert rows.keys() == {*cli._OTHER_COMMANDS}
    guide = [row[0] for row in table(ROOT / "docs" / "verifying.md", "## Exit codes")]
    (verified,) = re.findall(r"`holdfast verify` \| (.*) \|", section)
    assert codes_of(verified) == guide
    assert {*map(str, EXIT_CODES.values())} <= {*guide}
    rows["verify"] = verified  # that of `verify diff` comes later, and has other codes
    for name in rows.keys() - {"version"}:
        with pytest.raises(SystemExit):
            cli._OTHER_COMMANDS[name](["--help"])
        said = " ".join(capsys.readouterr().out.split()).partition("Exit codes:")[2]
        assert codes_of(rows[name]) == codes_of(said), name


def test_every_exit_code_has_its_advice() -> None:
    """The operating guide says for every exit code what to do."""
    rows = table(OPERATING, "## Exit codes")
    assert [row[0] for row in rows] == [str(int(code)) for code in ExitCode]


def test_every_cause_of_a_death_is_explained() -> None:
    """The operating guide has every cause and what to look at, in the order of the code."""
    rows = table(OPERATING, "### Causes of a death")
    assert [row[0].strip("`") for row in rows] == [*DEATH_CAUSES]


def test_the_key_file_of_the_guide_is_one() -> None:
    """What an operator copies is accepted, and has names and limits as explained there."""
    _, _, section = OPERATING.read_text().partition("\n### Names and limits of keys\n")
    language, text = BLOCK.findall(section)[0]
    assert language == "text"
    alice, bob, unnamed = key_lines(text.encode())
    assert [alice.name, bob.name, unnamed.name] == ["alice", "bob", ""]
    assert alice.limits.max_tokens_per_day
    assert alice.limits.max_requests_per_minute


def test_the_line_of_usage_in_the_guide_is_one(tmp_path: Path) -> None:
    """A program that reads such lines reads those of the server."""
    (line,) = (block.text for block in blocks("json") if '"prompt_tokens"' in block.text)
    usage = KeyUsage(clock=lambda: 1_795_435_200.0)
    usage.restore(usage.day, {"alice": Used(3, 90, 210)})
    with usage_kept(usage, tmp_path):
        usage.restore(usage.day, {"alice": Used(3, 90, 210)})
    assert usage_file(tmp_path, usage.day).read_text() == line


def test_the_files_of_usage_have_the_names_of_the_code() -> None:
    """The table has the lock beside the file of a day and the copy of a broken one."""
    place = f"`usage-<date>.broken`, `{USAGE_LOCK}` in that directory"
    assert place in {row[0] for row in table(REFERENCE, "Elsewhere:")}


def test_every_reason_of_a_loss_is_explained() -> None:
    """The operating guide has every way in which a death costs a request its answer."""
    rows = table(OPERATING, "### Lost requests")
    assert [row[0].strip("`") for row in rows] == [*LOSS_REASONS]


def test_every_reason_of_a_planned_restart_is_explained() -> None:
    """The operating guide has every limit that an engine may reach, with one that is accepted."""
    rows = table(OPERATING, "## Planned restarts")
    assert [row[0].strip("`") for row in rows] == [*RECYCLE_REASONS]
    assert all(recycle_limits(limit).are_set for row in rows for limit in INLINE.findall(row[1]))


def test_every_reason_of_a_refusal_is_explained() -> None:
    """The operating guide has every reason to turn a request away, in the order of the code."""
    rows = table(OPERATING, "## Refused requests")
    assert [row[0].strip("`") for row in rows] == [*REFUSAL_REASONS]


def test_a_server_that_is_ready_refuses_nothing_with_503_but_connections() -> None:
    """Routers take a replica out for it; one without a free connection serves nobody else."""
    rows = table(OPERATING, "## Refused requests")
    with_503 = {row[0].strip("`") for row in rows if "503" in row[1]}
    assert with_503 == {"not_ready", "draining", "failed", "too_many_connections"}


def test_the_state_table_is_that_of_the_code() -> None:
    """Every state has its row, with what the health routes answer in it."""

    def answers(state: State) -> Row:
        are_well = (state in SERVING, state in HEALTHY, state not in HOPELESS)
        return tuple("200" if is_well else "503" for is_well in are_well)

    rows = {row[0]: row[2:] for row in table(REFERENCE, "## States")}
    assert rows == {f"`{state}`": answers(state) for state in State}


def test_the_route_table_is_that_of_the_code() -> None:
    """Every route of ours has its row, under the one for those of vLLM."""
    vllm, *ours = (row[0] for row in table(REFERENCE, "## Routes"))
    assert vllm.startswith("`/v1/*`")
    assert {path.strip("`") for path in ours} == route_paths() | {"/admin/*"}


def test_the_routes_of_a_follower_are_those_of_the_code() -> None:
    """Every route that a follower answers has its row, and no other."""
    routes = [*follower_routes(lambda: A_FOLLOWER), metrics_route(lambda: ())]
    named = {path for row in table(REFERENCE, FOLLOWER_ROUTES) for path in INLINE.findall(row[0])}
    assert named == {route.path for route in routes}


def test_every_flag_of_follow_is_explained() -> None:
    """The table has what the parser takes, in its order, with its choices or its value."""
    actions = [one for one in follow_parser()._actions if one.dest != "help"]
    known = [
        f"`{' '.join((*one.option_strings[:1], str(one.metavar or '|'.join(one.choices or ()))))}`"
        for one in actions
    ]
    assert [row[0] for row in table(REFERENCE, FOLLOW_FLAGS)] == known


def test_the_readme_is_short() -> None:
    """It has at most 180 lines; what exceeds them belongs on a page of docs/."""
    assert len(README.read_text().splitlines()) <= 180


def test_the_example_of_a_health_body_has_its_fields() -> None:
    """README shows the whole body, as anyone gets it."""
    (block,) = (block for block in blocks("json") if block.page == README)
    shown = json.loads(block.text)
    real = report(a_status(), running=0, waiting=0, now_seconds=0.0, is_full=False)
    assert list(shown) == list(real)
    assert [list(shown[name]) for name in ("progress", "probe")] == [
        list(real[name]) for name in ("progress", "probe")
    ]


def test_the_table_of_admin_routes_is_that_of_the_document() -> None:
    """Every route in its order, with the fields of its body."""
    nobody: Any = None
    document = admin_app(nobody, lambda: None, command_deadline_seconds=1.0).openapi()
    schemas = document["components"]["schemas"]

    def fields(operation: dict[str, Any]) -> list[str]:
        if "requestBody" not in operation:
            return []
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        return list(schemas[schema["$ref"].rpartition("/")[2]]["properties"])

    documented = [
        (f"`{method.upper()} {path}`", fields(operation))
        for path, its in document["paths"].items()
        for method, operation in its.items()
    ]
    rows = [(route, INLINE.findall(body)) for route, body, _ in table(ADMIN, "## Admin routes")]
    assert rows == documented


def test_every_long_check_of_verify_is_named() -> None:
    """Of those that may take more than an hour."""
    told = VERIFYING.read_text().partition("ends at its deadline")[2].partition("\n\n")[0]
    long = {check.full_name for check in ALL if check.deadline_seconds > 3600}
    assert long == {*INLINE.findall(told)}


def test_every_step_of_the_probe_is_explained() -> None:
    """The table of steps is complete and in the order in which they run."""
    assert [row[0].strip("`") for row in table(HOW_IT_WORKS, "## Probe")] == [*PROBE_STEPS]


def test_every_command_of_holdfast_parses() -> None:
    """Each `holdfast` command that a reader may copy is accepted by the parser."""
    found = [words for _, words in commands() if words[0] == "holdfast"]
    assert any(words[1] == "serve" for words in found)
    for words in found:
        command, rest = cli._command(words[1:])
        if command == "serve":
            cli.parse_serve(rest, {})
        if command == "follow":
            read_follow(rest, {})
        if command == "verify":
            is_diff = rest[0] == "diff"
            parser = diff_parser() if is_diff else verify_parser()
            parser.parse_args(rest[is_diff:])
        if command == "top":
            top_parser().parse_args(rest)


@pytest.mark.parametrize("page", [*PAGES, *sorted(RUNBOOKS.glob("*.md"))], ids=lambda p: p.name)
def test_no_command_needs_a_new_curl(page: Path) -> None:
    """Ubuntu 22.04, DGX OS 6 and RHEL 9 have a curl without `--json`."""
    text = page.read_text().replace("\\\n", " ")
    curls = [line for line in text.splitlines() if re.search(r"\bcurl\b", line)]
    assert [line for line in curls if "--json" in line] == []


def test_the_command_in_the_container_parses() -> None:
    """What `docker run` starts is accepted by the parser, and its timeout covers the drain."""
    (docker,) = (words for _, words in commands() if words[:2] == ["docker", "run"])
    command = docker[docker.index("serve") + 1 :]
    settings = cli.parse_serve(command, {})
    stop_seconds = int(docker[docker.index("--stop-timeout") + 1])
    assert stop_seconds >= settings.supervision.drain_timeout_seconds + 30


def test_the_log_of_the_container_has_a_bound() -> None:
    """Docker's driver `local` keeps 100 MB; by default Docker keeps all of a log."""
    (docker,) = (words for _, words in commands() if words[:2] == ["docker", "run"])
    assert docker[docker.index("--log-driver") + 1] == "local"


def test_every_image_that_is_run_is_built_before() -> None:
    """`docker run` names a tag that `docker build` makes, from a target that exists."""
    built = {
        words[words.index("--tag") + 1]: words[words.index("--target") + 1]
        for _, words in commands()
        if words[:2] == ["docker", "build"]
    }
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE.read_text(), re.MULTILINE))
    run = {word for _, words in commands() if words[:2] == ["docker", "run"] for word in words}
    assert set(built.values()) <= targets
    assert run & set(built)


def test_every_file_that_is_deployed_exists() -> None:
    """Each path below deploy/ in a command is in the tree."""
    named = {word for _, words in commands() for word in words if word.startswith("deploy/")}
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_hazard_is_explained() -> None:
    """The table of the doctor is complete and in order, and says how bad each may be."""
    rows = table(DEPLOYING, "## Doctor")
    assert [row[0].strip("`") for row in rows] == [*HAZARDS]
    assert all("failure" in row[2] or "warning" in row[2] for row in rows)


def test_every_check_of_verify_is_explained() -> None:
    """The table is complete, in order, in the words of the report, and right about profiles."""
    rows = table(VERIFYING, "## Checks")
    told = [(name, PROFILES[profile], proves) for name, profile, proves in rows]
    assert told == [(f"`{check.full_name}`", check.profiles, check.proves) for check in ALL]


@pytest.mark.parametrize("group", GROUPS)
def test_every_check_of_verify_has_its_limits_explained(group: Group) -> None:
    """Each check of the group, in order, with one sentence of its own on what it cannot show."""
    rows = table(VERIFYING, f"### What the checks of `{group}` cannot show")
    assert [row[0] for row in rows] == [f"`{one.full_name}`" for one in ALL if one.group == group]
    sentences = [row[1] for row in rows]
    assert [one for one in sentences if not one.endswith(".") or ". " in one] == []
    assert len(set(sentences)) == len(sentences)


def test_keywords_that_standard_leaves_out_are_named() -> None:
    """The text about `tools.schemas` has them all, and none that the cases have."""
    words = " ".join(VERIFYING.read_text().split())
    _, _, left_out = words.partition("In `standard` they have all of these except ")
    named, _, _ = left_out.partition(".")
    assert set(INLINE.findall(named)) == limiting() - used_by(cases(30))


def test_every_route_that_verify_asks_is_named() -> None:
    """The text about `wire.other_routes` has them all, and no other."""
    _, _, about = VERIFYING.read_text().partition("\n\n`wire.other_routes` asks ")
    named, _, _ = about.partition("No route is asked ")
    assert sorted(INLINE.findall(named)) == sorted(ROUTES)


def test_every_flag_of_verify_is_explained() -> None:
    """The table has each flag of the parser in its order, with its choices or its value."""
    actions = [one for one in verify_parser()._actions if one.option_strings]
    known = [
        f"`{one.option_strings[0]} {one.metavar or '|'.join(one.choices or ())}`"
        for one in actions
        if one.dest != "help"
    ]
    assert [row[0] for row in table(VERIFYING, "## Flags")] == known


def test_every_make_target_exists() -> None:
    """Each `make` command and each target named in the text is in the Makefile."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"(?:\$ |`|^    )make ([a-z0-9-]+)", text, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def beginning(name: str) -> str:
    """The first word of a flag, or the first two where flags of vLLM and Docker begin so too."""
    words = name.split("-")[2:]
    return "-".join(words[: 2 if words[0] in {"log", "max", "restart"} else 1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_flag_of_ours_that_is_named_exists(page: Path) -> None:
    """A flag that begins like one of ours is one of ours or one that the listener takes."""
    parsers = (cli._serve_parser(), follow_parser())
    known = {option for one in parsers for its in one._actions for option in its.option_strings}
    beginnings = {beginning(flag.name) for flag in flags()} | {"demo"}
    named = set(FLAG.findall(page.read_text()))
    ours = {name for name in named if beginning(name) in beginnings}
    assert ours <= known


OF_OUR_PROCESSES = {
    "HOLDFAST_EXIT_CODES",
    "HOLDFAST_OPERATORS_TMPDIR",
    "HOLDFAST_PARENT_PID",
    "HOLDFAST_WORKSPACE_SPEC",
}
"""Variables that Holdfast sets for them, and nobody else."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_variable_and_metric_that_is_named_exists(page: Path) -> None:
    """`HOLDFAST_...` is a flag's variable, `holdfast_...` a plugin or a metric with its labels."""
    variables = set(re.findall(r"\bHOLDFAST_[A-Z_]+\b", page.read_text()))
    stop = [member.metadata["flag"] for member in fields(StopSettings)]
    assert variables <= {
        *OF_OUR_PROCESSES,
        IMAGE_VARIABLE,
        NOT_THE_KEY,
        *(flag.variable for flag in (*flags(), *stop)),
    }
    labels_of = {one.full_name: one.labels for one in (*METRICS, *FOLLOWER_METRICS)}
    labels_of |= {one.name: () for one in ROUTING_SERIES}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels_of |= dict.fromkeys(project["entry-points"]["vllm.general_plugins"], ())
    for code in INLINE.findall(page.read_text()):
        for name, label in re.findall(r"\b(holdfast_\w+)(?:\{(\w+)=)?", code):
            assert name in labels_of
            assert not label or label in labels_of[name]


def test_every_variable_of_vllm_that_is_named_exists() -> None:
    """Each `VLLM_...` is in the list of the installed vLLM."""
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    known = Path(vllm.origin).with_name("envs.py").read_text()
    named = {name for page in PAGES for name in re.findall(r"\bVLLM_[A-Z_]+\b", page.read_text())}
    assert sorted(name for name in named if f'"{name}"' not in known) == []


AS_IN_VLLM = {
    "it changes no fingerprint": {
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIGURE_LOGGING",
        "VLLM_CONFIG_ROOT",
        "VLLM_DO_NOT_TRACK",
        "VLLM_LOG_STATS_INTERVAL",
        "VLLM_PORT",
        "VLLM_USAGE_SOURCE",
        "VLLM_USAGE_STATS_SERVER",
    },
    "Holdfast asks what vLLM does": {
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
        "VLLM_MLA_DISABLE",
        "VLLM_USE_MODELSCOPE",
    },
}
"""Variables that mean the same to `vllm serve`, by what Holdfast does with them otherwise."""


def read_or_set_variables(source: str) -> Iterator[str]:
    """The names of variables in a module, `OMP_` for all that begin so; also what looks like one.

    A name without an underscore counts where something is taken from the environment by it.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(name)) | ast.Attribute(attr=name):
                if re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*", name) and (
                    isinstance(node, ast.Constant) or name.startswith("VLLM_")
                ):
                    yield name
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=of) | ast.Attribute(attr=of)),
                args=[ast.Constant(value=str(name)), *_],
            ) if of in {"environ", "environment"}:
                yield name


NOT_VARIABLES = {
    *("FLASHINFER_MLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV41", "FLASHMLA_SPARSE"),
    *("FLASHMLA_MEGA_ATTN_DSV41", "FLASHMLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41"),
    *("MAX_CALLERS", "MAX_SLOTS", "NAME_BYTES", "RECENT_STEPS", "TEXT_BYTES"),
    *("SHM_NOTIFY_POLL_INTERVAL_S", "KEY_VALUES_MISMATCH", "HOLDFAST_GPU_CHECK_"),
}
"""Attention backends, constants of modules and of OpenSSL, and what only `make gpu-check` sets."""


def test_the_reference_has_every_variable_that_is_read_or_set() -> None:
    """Each in the code, except those of flags, and those that only mean what they mean to vLLM."""
    used = {
        name
        for path in (ROOT / "server").rglob("*.py")
        for name in read_or_set_variables(path.read_text())
    }
    _, _, section = REFERENCE.read_text().partition(f"\n{VARIABLES}\n")
    section = section.partition("\n## ")[0]
    documented = {re.sub(r"\*$|=.*", "", name) for name in INLINE.findall(section)}
    families = tuple(name for name in documented - {"VLLM_", "HOLDFAST_"} if name.endswith("_"))
    as_in_vllm = set().union(*AS_IN_VLLM.values())
    missing = used - as_in_vllm - NOT_VARIABLES - documented - {one.variable for one in flags()}
    assert {name for name in missing if not name.startswith(families)} == set()
    assert (as_in_vllm | NOT_VARIABLES) - used == set()


def test_the_words_by_which_a_variable_is_refused_are_those_of_the_code() -> None:
    """And so are the ends of the names that have such a word and are not refused."""
    (told,) = (row[1] for row in table(REFERENCE, VARIABLES) if row[0] == "`HOLDFAST_...`")
    named = {word for word in INLINE.findall(told) if re.fullmatch("[A-Z_]+", word)}
    assert named == {*variable_names._ENDS_OF_KEYS, *variable_names._OF_ADDRESSES}


def test_a_variable_is_found_however_it_is_named() -> None:
    """In a constant, as a prefix, as an attribute of vLLM's, or where the environment is read."""
    source = (
        'NAME = "HF_HOME"\nPREFIXES = ("OMP_",)\nenvs.VLLM_PORT\nos.environ.get("TERM")\n'
        'environment.setdefault("CC", "")\nobject.A_CONSTANT\nsession.get("GET")'
    )
    found = set(read_or_set_variables(source))
    assert found == {"HF_HOME", "OMP_", "VLLM_PORT", "TERM", "CC"}


def anchors(page: Path) -> set[str]:
    """What a link into the page may name, by GitHub's rule."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in HEADING.findall(page.read_text())
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_relative_link_resolves(page: Path) -> None:
    """Each link or picture within the tree names a file that is there, and a heading of it."""
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "docs" / "benchmarks.md", *RUNBOOKS.glob("*.md")],
    ids=lambda page: str(page.name),
)
def test_the_page_reads_as_english(page: Path) -> None:
    """None of the phrases that CONTRIBUTING rules out stands in the text; code may have them."""
    text = CODE.sub("", page.read_text())
    assert slips(text) == []


@pytest.mark.parametrize(
    "text", ["It is no path.", "worth to wait", "but for health", "sent anew", "is answered 408"]
)
def test_a_slip_is_found(text: str) -> None:
    """Each of these is refused; what is right is not."""
    assert slips(text)
    assert not slips("There is no queue, it is no longer full, and it lasts as long as this.")


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_every_python_block_compiles(block: Block) -> None:
    """An example that does not compile is worse than none."""
    compile(block.text, block.page.name, "exec")


@pytest.mark.parametrize("block", blocks("json", "yaml"), ids=str)
def test_every_data_block_parses(block: Block) -> None:
    """JSON is JSON and YAML is YAML."""
    assert json.loads(block.text) if block.language == "json" else yaml.safe_load(block.text)


def test_the_probes_of_kubernetes_name_our_routes() -> None:
    """Each probe in the guide asks a route that the front end answers itself, and its own one."""
    (block,) = (block for block in blocks("yaml") if "livenessProbe" in block.text)
    probes = {name: probe["httpGet"]["path"] for name, probe in yaml.safe_load(block.text).items()}
    assert set(probes.values()) <= route_paths()
    assert probes == {
        "startupProbe": "/startupz",
        "livenessProbe": "/livez",
        "readinessProbe": "/readyz",
    }


def test_the_pace_of_the_memory_guard_is_in_the_guide() -> None:
    """How often it looks, and how long it takes to end the engine."""
    text = " ".join(OPERATING.read_text().split())
    numbers = {2: "two", 5: "five"}
    assert f"looks at the memory {numbers[round(1 / INTERVAL_SECONDS)]} times a second" in text
    seconds = READINGS_TO_END * INTERVAL_SECONDS
    assert f"{numbers[READINGS_TO_END]} readings below the last mark, {seconds} s" in text


def test_the_bound_of_json_values_is_in_the_guide() -> None:
    """With what a value counts that costs more than a number."""
    row = next(
        line for line in OPERATING.read_text().splitlines() if "| `json_too_large` |" in line
    )
    assert f"{MAX_JSON_VALUES:,} values" in row
    assert f"count {COSTLY_VALUES} each" in row
