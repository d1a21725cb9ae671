"""Clients of another make: what they are asked for, and which of their numbers counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.verify.checks.survive import clients
from holdfast.verify.records import CheckResult, CheckStatus
from openai_double import OpenAIDouble
from stand_in_programs import install, install_none
from verified import results

NAMES = ("guidellm", "aiperf")
KEY = "sk-holdfast-0123456789"


def of_guidellm(answered: int, errored: int) -> Mapping[str, Any]:
    """What guidellm 0.8.1 writes, without what is not read."""
    first = {"successful": {"median": 20.5, "percentiles": {"p99": 70}}}
    metrics = {
        "request_totals": {"successful": answered, "errored": errored, "incomplete": 0},
        "time_to_first_token_ms": first,
        "output_tokens_per_second": {"successful": {"mean": 317.25}},
    }
    return {"benchmarks": [{"metrics": metrics}]}


def of_aiperf(answered: int, errored: int) -> Mapping[str, Any]:
    """What aiperf 0.13.0 writes, without what is not read."""
    return {
        "request_count": {"unit": "requests", "avg": float(answered)},
        "time_to_first_token": {"unit": "ms", "p50": 20.5, "p99": 70.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 317.25},
        **({"error_request_count": {"avg": float(errored)}} if errored else {}),
    }


TELLS = {"guidellm": of_guidellm, "aiperf": of_aiperf}
FILES = {"guidellm": "results.json", "aiperf": "profile_export_aiperf.json"}
WRITES = """
plan = Path(given("--config"))
Path({noted!r}).write_text(json.dumps([sys.argv[1:], plan.read_text(), dict(os.environ)]))
(plan.parent / {file!r}).write_text({told!r})
"""


def asked(name: str, app: OpenAIDouble) -> CheckResult:
    """What comes of the check."""
    checks = [check for check in clients.CHECKS if check.name == name]
    (result,) = results(app, checks, "full").values()
    return result


def double(tokenizer: Path, key: str = "", model: str = "") -> OpenAIDouble:
    """A server whose tokenizer is on this machine."""
    app = OpenAIDouble(api_key=key)
    app.configuration = replace(app.configuration, model=model or str(tokenizer), files=())
    return app


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Each program in turn."""
    return str(request.param)


def stand_in(
    monkeypatch: pytest.MonkeyPatch, directory: Path, name: str, answered: int, errored: int
) -> Path:
    """Install the program; the file will have what it was given."""
    noted = directory / "noted"
    told = json.dumps(TELLS[name](answered, errored))
    body = WRITES.format(noted=str(noted), file=FILES[name], told=told)
    install(monkeypatch, directory, name, body)
    return noted


def test_a_server_that_answers_all_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """How fast it is has no limit."""
    stand_in(monkeypatch, tmp_path, name, 40, 0)
    result = asked(name, double(tmp_path))
    assert result.status is CheckStatus.PASSED, result.reason
    assert {(one.name, one.value, one.unit, one.limit is None) for one in result.numbers} == {
        ("answered", 40, "", False),
        ("errors", 0, "", False),
        ("first token, median", 20.5, "ms", True),
        ("first token, p99", 70, "ms", True),
        ("output", 317.25, "tokens/s", True),
    }


@pytest.mark.parametrize(("answered", "errored"), [(39, 1), (39, 0), (0, 40)])
def test_an_answer_that_is_missing_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, answered: int, errored: int
) -> None:
    """Whether the client calls it an error or not."""
    stand_in(monkeypatch, tmp_path, name, answered, errored)
    result = asked(name, double(tmp_path))
    assert result.status is CheckStatus.FAILED
    assert f"answered is {answered}" in result.reason


def test_a_server_that_generates_nothing_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Such as one of embeddings: the program is not begun."""
    noted = stand_in(monkeypatch, tmp_path, name, 0, 40)
    app = double(tmp_path)
    app.without("/v1/chat/completions", "/v1/completions")
    assert asked(name, app).status is CheckStatus.SKIPPED
    assert not noted.exists()


def test_results_of_another_shape_are_no_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Another version may call them otherwise, and nothing shows that there were any."""
    body = WRITES.format(noted="/dev/null", file=FILES[name], told="{}")
    install(monkeypatch, tmp_path, name, body)
    result = asked(name, double(tmp_path))
    assert result.status is CheckStatus.INCONCLUSIVE


def test_the_key_is_neither_in_arguments_nor_in_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """It is in a variable that the program reads; the load and the tokenizer are in a file."""
    noted = stand_in(monkeypatch, tmp_path, name, 40, 0)
    asked(name, double(tmp_path, KEY))
    arguments, plan, variables = json.loads(noted.read_text())
    assert KEY not in f"{arguments} {plan}"
    assert KEY in variables.values()
    assert str(tmp_path) in plan
    assert "/v1" not in arguments
    assert json.loads(plan)


def test_it_is_skipped_without_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """It belongs to no extra; the remedy installs it."""
    install_none(monkeypatch, tmp_path)
    result = asked(name, double(tmp_path))
    assert (result.status, result.reason) == (CheckStatus.SKIPPED, f"{name} is not installed")
    assert result.remedy == f"pip install {name}"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/nowhere", "the tokenizer of the model is not on this machine"),
        ("{tokenizer}/{{{{ 7 * 7 }}}}", "would not take the model's name or directory as it is"),
        ("{tokenizer}/${{HOME}}", "would not take the model's name or directory as it is"),
    ],
)
def test_it_is_skipped_without_a_tokenizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, model: str, said: str
) -> None:
    """Or where the program would read its directory as a template, which may run code."""
    noted = stand_in(monkeypatch, tmp_path, name, 40, 0)
    place = model.format(tokenizer=tmp_path)
    if str(tmp_path) in place:
        Path(place).mkdir()
    result = asked(name, double(tmp_path, model=place))
    assert result.status is CheckStatus.SKIPPED
    assert said in result.reason
    assert not noted.exists()
