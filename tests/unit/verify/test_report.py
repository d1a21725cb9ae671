"""The forms of a report: each is whole, true to the same facts and safe to open."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from asgi_server import serving
from holdfast.configuration_record import Configuration, ModelFile
from holdfast.errors import HoldfastError
from holdfast.verify.records import (
    GROUPS,
    PROFILES,
    SCHEMA,
    CheckResult,
    CheckStatus,
    Fault,
    HoldfastFacts,
    Number,
    Relation,
    Report,
    Request,
    Series,
    Server,
    Source,
    Tool,
    Verdict,
    at_least,
    at_most,
    equal_to,
)
from holdfast.verify.report import (
    FORMS,
    as_json,
    charts,
    in_toto,
    junit,
    markdown,
    page,
    set_aside,
    wording,
    write,
)
from holdfast.verify.report.markup import html
from openai_double import OpenAIDouble
from verified import REPORT_SCHEMA, require_report

HOSTILE = "</style><script>alert(1)</script> | \x1b[31m \ud800 & ]]>"
REQUEST = Request("POST", "/v1/completions", {"model": "it's", "prompt": [1, 2]})
FACTS = HoldfastFacts(
    state="READY",
    proof={"passed": True, "limited": False, "proven_tokens": 8191},
    generation=1,
    restarts=0,
    growths=0,
    rejections=0,
    running=0,
)
CONFIGURATION = Configuration(
    image=f"registry/holdfast@sha256:{'cd' * 32}",
    versions={"holdfast": "1.0", "vllm": "0.33.0", "torch": "2.13.0"},
    flags=("<b>Qwen3</b>", "--hf-overrides", HOSTILE),
    variables={"VLLM_USE_V1": "1"},
    fingerprint="0123abcd",
    devices=("NVIDIA GB10", "NVIDIA GB10"),
    driver="580.95.05",
    model="<b>Qwen3</b>",
    revision="c" * 40,
    files=(
        ModelFile("config.json", 700, "ab" * 32, "holdfast"),
        ModelFile("model-1.safetensors", 4_000_000_000, "ef" * 32, "hub"),
        ModelFile("model-2.safetensors", 1_000_000_000),
    ),
)
CHECKS = (
    CheckResult(
        "models", "wire", "The list has its form.", CheckStatus.PASSED, duration_seconds=0.2
    ),
    CheckResult(
        "capital",
        "chat",
        "The model knows a capital.",
        CheckStatus.FAILED,
        reason=HOSTILE,
        duration_seconds=1.5,
        faults=(Fault("it says nothing", REQUEST, HOSTILE),),
        requests=(REQUEST, Request("GET", "/v1/models"), Request("POST", "/x", None, "{")),
    ),
    CheckResult(
        "tone", "chat", "It is polite.", CheckStatus.WARNED, "rude", warnings=(Fault("rude"),)
    ),
    CheckResult(
        "prefix",
        "self",
        "Every path gives the same.",
        CheckStatus.INCONCLUSIVE,
        "too noisy",
        duration_seconds=3.0,
        numbers=(
            Number("median difference", 0.25, "nat", at_most(0.5, "A/A")),
            Number("rows", math.nan, "", equal_to(math.inf)),
            Number("tokens", 12_000),
            Number("right answers", 80, "%", at_least(75, "baseline"), of=100),
        ),
        series=(
            Series("by position", "position", "difference [nat]", ((0, 0.1), (9, math.nan)), None),
            Series("none", "x", "y", ()),
            Series("flat", "x", "y", ((1, 5), (1, 5)), at_most(4, "baseline")),
        ),
    ),
    CheckResult("kill", "survive", "It lives on.", CheckStatus.SKIPPED, "not Holdfast", "serve it"),
)
REPORT = Report(
    tool=Tool("1.0", {"openai": "3"}),
    profile="standard",
    started_at="2026-11-23T11:00:00+00:00",
    duration_seconds=4.7,
    server=Server(
        url="http://spark:8000",
        model="<b>Qwen3</b>",
        models=("<b>Qwen3</b>",),
        max_model_len=32768,
        owner="vllm",
        vllm="0.33.0",
        abilities=("chat", "holdfast"),
        routes=("/v1/models",),
        holdfast=FACTS,
        configuration=CONFIGURATION,
    ),
    verdict=Verdict.FAILED,
    reason="failed: chat.capital",
    is_interrupted=False,
    checks=CHECKS,
    after=FACTS,
)

OTHER = replace(REPORT.server, holdfast=None, configuration=None)
"""A server that is not Holdfast."""
KEY, ADMIN_KEY = "sk-the-$HOME-key", "sk-the-admin-key"
REPEATING = ("report.md", "report.html", "junit.xml")
"""The forms that have commands."""


def commands_of(name: str, report: Report) -> list[str]:
    """The commands in a form, as a reader copies them."""
    return re.findall(r"curl -sS [^\n<]*", unescape(FORMS[name](report)))


def shown_by_shell(line: str, key: str) -> str:
    """What a line prints in a shell that knows the keys."""
    done = subprocess.run(
        ["/bin/sh", "-c", line],
        env={"KEY": key, "ADMIN_KEY": ADMIN_KEY, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    return done.stdout


def written(report: Report) -> dict[str, Any]:
    """report.json, read back by a reader that knows no NaN."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return dict(json.loads(as_json.rendered(report), parse_constant=refuse))


def test_a_share_is_told_with_its_standard_error() -> None:
    """So that a reader sees how much a difference means."""
    assert "80 % of 100, standard error 4.0 %" in markdown.rendered(REPORT)


def test_the_schema_is_one() -> None:
    """Draft 2020-12 says so."""
    jsonschema.Draft202012Validator.check_schema(REPORT_SCHEMA)


@pytest.mark.parametrize(
    "report", [REPORT, replace(REPORT, server=OTHER, after=None)], ids=["Holdfast", "another"]
)
def test_the_report_keeps_to_its_schema(report: Report) -> None:
    """With every kind of result in it."""
    require_report(written(report))


def test_the_schema_has_the_words_of_the_code() -> None:
    """Groups, profiles, statuses, verdicts, relations and sources are those that there are."""
    check = REPORT_SCHEMA["$defs"]["CheckResult"]["properties"]
    limit = REPORT_SCHEMA["$defs"]["Limit"]["properties"]
    assert REPORT_SCHEMA["properties"]["schema"]["const"] == SCHEMA
    assert REPORT_SCHEMA["properties"]["profile"]["enum"] == [*PROFILES]
    assert REPORT_SCHEMA["properties"]["verdict"]["enum"] == [*Verdict]
    assert check["group"]["enum"] == [*GROUPS]
    assert check["status"]["enum"] == [*CheckStatus]
    assert limit["relation"]["enum"] == [*get_args(Relation)]
    assert limit["source"]["enum"] == [*get_args(Source)]


def test_numbers_that_are_not_finite_are_kept() -> None:
    """As strings, since JSON has no such numbers."""
    numbers = written(REPORT)["checks"][3]["numbers"]
    assert (numbers[1]["value"], numbers[1]["limit"]["value"]) == ("NaN", "Infinity")


def test_junit_counts_what_is_wrong() -> None:
    """Failed is a failure, inconclusive an error; totals and groups agree."""
    root = ET.fromstring(junit.rendered(REPORT).encode("utf-8", "strict"))  # noqa: S314 - ours
    totals = [root.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert totals == ["5", "1", "1", "1"]
    assert [suite.get("name") for suite in root] == ["wire", "chat", "self", "survive"]
    (failure,) = root.iter("failure")
    assert "curl" in (failure.text or "")
    (skipped,) = root.iter("skipped")
    assert skipped.get("message") == "not Holdfast"


def test_the_statement_is_in_totos() -> None:
    """With the type, the subject, the result and the names that a gate reads."""
    statement = json.loads(in_toto.rendered(REPORT))
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    server = written(REPORT)["server"]
    deployed = {name: server[name] for name in ("model", "configuration")}
    text = json.dumps(deployed, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert statement["subject"] == [{"name": "<b>Qwen3</b>", "digest": {"sha256": digest}}]
    predicate = statement["predicate"]
    assert predicate["failedTests"] == ["chat.capital"]
    assert predicate["warnedTests"] == ["chat.tone", "self.prefix"]
    tool, *served = predicate["configuration"]
    assert tool["uri"] == "pkg:generic/holdfast@1.0"
    assert served == [
        {"name": "registry/holdfast", "digest": {"sha256": "cd" * 32}},
        {"name": "config.json", "digest": {"sha256": "ab" * 32}},
        {"name": "model-1.safetensors", "digest": {"sha256": "ef" * 32}},
    ]


def subject_of(server: Server) -> Any:
    """What the statement of a run against a server is about."""
    return json.loads(in_toto.rendered(replace(REPORT, server=server)))["subject"]


@pytest.mark.parametrize("server", [REPORT.server, OTHER], ids=["Holdfast", "another"])
def test_a_deployment_is_one_subject(server: Server) -> None:
    """Whatever it has gone through since the last run, and whatever else it serves by now."""
    later = replace(
        FACTS,
        proof={"passed": True, "limited": True, "proven_tokens": 4096},
        generation=4,
        restarts=3,
        growths=2,
        rejections=1,
        running=7,
        deaths=2.0,
        memory_bytes=1e9,
        started_at_seconds=1.8e9,
    )
    now = replace(
        server,
        holdfast=server.holdfast and later,
        models=(*server.models, "adapter"),
        abilities=("chat",),
        refusals={"tools": "request 7 has no tools"},
    )
    assert subject_of(now) == subject_of(server)


def test_the_address_does_not_change_a_subject_that_is_told() -> None:
    """A gate may reach a deployment by another one; else it is all that identifies a server."""
    address = "http://another:8000"
    assert subject_of(replace(REPORT.server, url=address)) == subject_of(REPORT.server)
    assert subject_of(replace(OTHER, url=address)) != subject_of(OTHER)


@pytest.mark.parametrize(
    "changed",
    [
        replace(CONFIGURATION, flags=(*CONFIGURATION.flags, "--enforce-eager")),
        replace(CONFIGURATION, versions={**CONFIGURATION.versions, "vllm": "0.33.1"}),
        replace(CONFIGURATION, image="registry/another"),
        replace(CONFIGURATION, fingerprint="another"),
        replace(CONFIGURATION, devices=("NVIDIA GB10",)),
        replace(CONFIGURATION, variables={}),
        replace(
            CONFIGURATION,
            files=(
                replace(CONFIGURATION.files[0], sha256="ba" * 32),
                *CONFIGURATION.files[1:],
            ),
        ),
    ],
    ids=["flag", "version", "image", "fingerprint", "devices", "variable", "model file"],
)
def test_another_deployment_is_another_subject(changed: Configuration) -> None:
    """By anything that may make it answer differently."""
    other = replace(REPORT.server, configuration=changed)
    assert subject_of(other) != subject_of(REPORT.server)


@pytest.mark.parametrize(
    ("verdict", "status", "result"),
    [
        (Verdict.PASSED, CheckStatus.PASSED, "PASSED"),
        (Verdict.PASSED, CheckStatus.WARNED, "WARNED"),
        (Verdict.INCONCLUSIVE, CheckStatus.INCONCLUSIVE, "FAILED"),
        (Verdict.FAILED, CheckStatus.FAILED, "FAILED"),
    ],
)
def test_a_gate_lets_only_what_passed_through(
    verdict: Verdict, status: CheckStatus, result: str
) -> None:
    """The statement knows three results."""
    report = replace(REPORT, verdict=verdict, checks=(replace(CHECKS[0], status=status),))
    assert json.loads(in_toto.rendered(report))["predicate"]["result"] == result


class Elements(HTMLParser):
    """The elements of a page, and those that were not closed in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") or name in {"src", "href"} for name, _ in attrs)
        self.names.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_without_scripts() -> None:
    """It is well-formed, loads nothing, and what the server said stays text."""
    text = page.rendered(REPORT)
    elements = Elements(text)
    assert elements.open == []
    assert {"style", "svg", "details"} <= set(elements.names)
    assert not {"script", "link", "img", "iframe", "b>Qwen3"} & set(elements.names)
    assert "url(" not in text
    assert "&lt;script&gt;" in text


def test_the_page_draws_what_was_measured() -> None:
    """A plot for each series, a gauge for the number that has one, the time of each check."""
    text = page.rendered(REPORT)
    labels = re.findall(r'aria-label="([^"]*)"', text)
    assert {"by position", "none", "flat", "How long each check took"} <= set(labels)
    assert "0.25 nat, at most 0.5 nat (A/A)" in labels
    assert "1 not finite" in text


def test_a_long_curve_has_dots_only_where_it_is_wrong() -> None:
    """More would hide it."""
    points = tuple((float(x), 2.0 if x == 70 else 0.5) for x in range(100))
    drawn = html(charts.plot(Series("many", "x", "y", points, at_most(1))))
    assert drawn.count("<circle") == 1
    assert "<title>70: 2</title>" in drawn


def test_markdown_stays_text() -> None:
    """What the server said makes no cell, no element and no line of its own."""
    text = markdown.rendered(REPORT)
    assert "<script" not in text
    assert "<b>" not in text
    row = next(line for line in text.splitlines() if line.startswith("| `chat.capital`"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 5


@pytest.mark.parametrize("name", ["report.json", "report.md", "report.html", "junit.xml"])
@pytest.mark.parametrize(
    "fact",
    [CONFIGURATION.image, "2.13.0", "NVIDIA GB10", "580.95.05", "0123abcd", CONFIGURATION.revision],
)
def test_every_form_names_what_was_verified(name: str, fact: str) -> None:
    """Image, versions, devices, driver, fingerprint and revision."""
    assert fact in FORMS[name](REPORT)


@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_people_see_flags_variables_and_files(name: str) -> None:
    """A file has its hash, and who made it."""
    text = FORMS[name](REPORT)
    assert "--hf-overrides" in text
    assert "VLLM_USE_V1" in text
    assert f"4.0 GB, SHA-256 of the Hub {'ef' * 32}" in text
    assert "1.0 GB, SHA-256 unknown" in text


def test_the_files_have_one_digest() -> None:
    """It changes with a name, a size or a hash; what has no hash is counted."""
    first, second, third = CONFIGURATION.files
    told = wording.model_files(CONFIGURATION.files)
    assert told.startswith("3 files, 5.0 GB, digest ")
    assert told.endswith(", 1 of them without a hash")
    others = (replace(third, name="x"), replace(third, size_bytes=999_999_999), replace(second))
    changed = {wording.model_files((first, second, one)) for one in (third, *others)}
    assert len(changed) == 4
    assert wording.model_files(()) == ""


def test_a_form_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    """The run may have taken hours; the error names the file."""
    (tmp_path / "report.json").mkdir()
    with pytest.raises(HoldfastError, match=r"report\.json could not be written: Is a directory"):
        write(REPORT, tmp_path)
    assert {one.name for one in tmp_path.iterdir() if one.is_file()} == set(FORMS) - {"report.json"}


def test_an_earlier_report_is_set_aside_and_stays_until_there_is_another(tmp_path: Path) -> None:
    """Runs without a report do not replace it; whatever a user has beside it stays."""
    write(replace(REPORT, profile="soak"), tmp_path)
    (tmp_path / "baseline").touch()
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").symlink_to("baseline")
    for _ in range(2):
        set_aside(tmp_path)
        assert {one.name for one in tmp_path.iterdir()} == {
            "baseline",
            *(f"{name}.earlier" for name in FORMS),
        }
        assert as_json.read(tmp_path / "report.json.earlier").profile == "soak"
        assert (tmp_path / "report.html.earlier").is_symlink()
    write(REPORT, tmp_path)
    (tmp_path / "junit.xml").unlink()
    set_aside(tmp_path)
    assert as_json.read(tmp_path / "report.json.earlier").profile == REPORT.profile
    assert not (tmp_path / "junit.xml.earlier").exists()


OF_PYTEST = '<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests"></testsuites>'


@pytest.mark.parametrize("content", [None, "", "{}", '{"schema": "other/1"}', '{"tests": 3}'])
def test_files_of_another_program_stay(tmp_path: Path, content: str | None) -> None:
    """pytest writes a junit.xml, too."""
    (tmp_path / "junit.xml").write_text(OF_PYTEST)
    (tmp_path / "test-result.json").write_text('{"_type": "https://in-toto.io/Statement/v1"}')
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    before = {*tmp_path.iterdir()}
    set_aside(tmp_path)
    assert {*tmp_path.iterdir()} == before


@pytest.mark.parametrize("is_first", [True, False], ids=("the first", "a later one"))
@pytest.mark.parametrize("name", FORMS)
def test_what_cannot_be_set_aside_leaves_a_report_to_set_aside(
    tmp_path: Path, name: str, *, is_first: bool
) -> None:
    """Once the obstacle is gone, the next run finds it, and loses no part of it."""
    if not is_first:
        write(replace(REPORT, profile="soak"), tmp_path)
        set_aside(tmp_path)
    write(REPORT, tmp_path)
    obstacle = tmp_path / f"{name}.earlier"
    obstacle.unlink(missing_ok=True)
    obstacle.mkdir()
    with pytest.raises(OSError, match=obstacle.name):
        set_aside(tmp_path)
    assert as_json.read(tmp_path).profile == REPORT.profile
    obstacle.rmdir()
    set_aside(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {f"{form}.earlier" for form in FORMS}
    assert as_json.read(tmp_path / "report.json.earlier").profile == REPORT.profile


@pytest.mark.parametrize("left", ["report.json", "junit.xml", "test-result.json"])
def test_what_programs_read_is_set_aside_by_itself(tmp_path: Path, left: str) -> None:
    """A build may have moved the rest away, or it could not be written; it says "passed", too."""
    model = "a model of a long name " * 400
    write(replace(REPORT, server=replace(REPORT.server, model=model)), tmp_path)
    for name in {"report.json", "junit.xml", "test-result.json"} - {left}:
        (tmp_path / name).unlink()
    set_aside(tmp_path)
    kept = {left, "report.md", "report.html"}
    assert {one.name for one in tmp_path.iterdir()} == {f"{name}.earlier" for name in kept}


def test_a_part_of_a_report_costs_no_earlier_one(tmp_path: Path) -> None:
    """The disk may have been full when it was written."""
    write(replace(REPORT, profile="soak"), tmp_path)
    set_aside(tmp_path)
    write(REPORT, tmp_path)
    for name in FORMS:
        if name != "junit.xml":
            (tmp_path / name).unlink()
    set_aside(tmp_path)
    assert as_json.read(tmp_path / "report.json.earlier").profile == "soak"
    assert {one.name for one in tmp_path.iterdir()} == {f"{name}.earlier" for name in FORMS}


def test_results_of_another_program_stay_beside_a_report(tmp_path: Path) -> None:
    """pytest may write its own where the report had one."""
    write(REPORT, tmp_path)
    (tmp_path / "junit.xml").write_text(OF_PYTEST)
    set_aside(tmp_path)
    kept = {f"{name}.earlier" for name in FORMS if name != "junit.xml"}
    assert {one.name for one in tmp_path.iterdir()} == {"junit.xml", *kept}


def test_a_file_that_nobody_may_change_is_replaced(tmp_path: Path) -> None:
    """An earlier run, as another user, may have left it; others may read the new one as ever."""
    for name in FORMS:
        (tmp_path / name).symlink_to("/dev/full")  # which not even root can write to
    assert write(REPORT, tmp_path) == tmp_path / "report.html"
    (tmp_path / "other").touch()
    modes = {one.lstat().st_mode for one in tmp_path.iterdir()}
    assert modes == {(tmp_path / "other").stat().st_mode}


@pytest.mark.parametrize("name", REPEATING)
def test_a_shell_puts_the_key_into_the_command(name: str) -> None:
    """As it is in the variable, however it looks to a shell."""
    commands = commands_of(name, replace(REPORT, has_key=True))
    assert len(commands) == len(CHECKS[1].requests)
    for command in commands:
        words = shown_by_shell(f"printf '%s\\n' {command}", KEY).splitlines()
        assert words[words.index(f"Authorization: Bearer {KEY}") - 1] == "-H"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("name", REPEATING)
def test_the_command_is_let_in_by_a_server_that_wants_a_key(name: str) -> None:
    """With the right key in the variable, and not with another one."""

    async def statuses(key: str) -> Sequence[str]:
        async with serving(OpenAIDouble(api_key=KEY)) as client:
            server = replace(REPORT.server, url=str(client.base_url))
            commands = commands_of(name, replace(REPORT, has_key=True, server=server))
            lines = [f"{one} -o /dev/null -w '%{{http_code}}'" for one in commands]
            return [await asyncio.to_thread(shown_by_shell, one, key) for one in lines]

    assert asyncio.run(statuses(KEY))[1] == "200"
    assert "401" not in asyncio.run(statuses(KEY))
    assert asyncio.run(statuses("another"))[1] == "401"


@pytest.mark.parametrize("name", REPEATING)
def test_a_fault_has_the_command_that_shows_it(name: str) -> None:
    """It may be the fortieth request of the check; one of the first few is not told twice."""
    late, odd = (Request("POST", "/v1/completions", {"prompt": it}) for it in ("late", "odd"))
    faults = (*CHECKS[1].faults, Fault("it stops early", late), Fault("it says so"))
    check = replace(CHECKS[1], faults=faults, warnings=(Fault("it is rude", odd),))
    report = replace(REPORT, checks=(check,))
    told = commands_of(name, report)
    requests = (*check.requests, late, odd)
    assert sorted(told) == sorted(wording.command(report, one) for one in requests)


def test_a_command_has_the_key_that_its_path_takes() -> None:
    """The admin key below `/admin/`, as in the run; none if the run used none."""
    report = replace(REPORT, has_key=True, has_admin_key=True)
    restart, chat = Request("POST", "/admin/restart", {}), Request("POST", "/v1/chat/completions")
    assert '-H "Authorization: Bearer $ADMIN_KEY"' in wording.command(report, restart)
    assert '-H "Authorization: Bearer $KEY"' in wording.command(report, chat)
    assert "Bearer" not in wording.command(replace(report, has_key=False), chat)
    assert "Bearer" not in wording.command(REPORT, restart)


def test_a_long_command_keeps_its_key() -> None:
    """What is cut is the body."""
    long = Request("POST", "/v1/completions", {"prompt": "a" * 5000})
    command = wording.command(replace(REPORT, has_key=True), long)
    assert "$KEY" in command
    assert command.endswith("(report.json has all of it)")


@pytest.mark.parametrize("name", FORMS)
def test_no_form_has_what_a_terminal_obeys(name: str) -> None:
    """No control character but the end of a line."""
    text = FORMS[name](REPORT)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
