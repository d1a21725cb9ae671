"""`--record` and `--against` as their users meet them: files, lines, exit codes."""

from __future__ import annotations

import asyncio
import gzip
import os
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response

from holdfast.errors import HoldfastError, UsageError
from holdfast.verify.baseline import Baseline, Origin, Score, read_baseline, write_baseline
from holdfast.verify.options import Options
from holdfast.verify.recorder import keep, options_of, require_one_model, require_same_model
from holdfast.verify.records import CheckResult, CheckStatus, Number, Report, Server, Tool, Verdict
from obstruction import Obstruction
from openai_double import OpenAIDouble
from scoring_double import ScoringDouble
from several_models import Several
from verified import Run, verified

ORIGIN = Origin("double", "0.33.0", 640, "", "1.0", "")
SERVER = Server(
    url="http://x",
    model="double",
    models=("double", "adapter"),
    max_model_len=640,
    owner="tests",
    vllm="",
    abilities=(),
    routes=(),
)
SHARE = Number("sums", 90.0, "%", of=40)
REPORT = Report(
    tool=Tool("1.0", {}),
    profile="quick",
    started_at="2026-11-23T11:00:00+00:00",
    duration_seconds=1.0,
    server=SERVER,
    verdict=Verdict.FAILED,
    reason="failed: skill.sums",
    is_interrupted=False,
    checks=(
        CheckResult("sums", "skill", "x", CheckStatus.FAILED, numbers=(SHARE, Number("n", 3))),
    ),
)


def run(app: OpenAIDouble, directory: Path, *arguments: str) -> Run:
    """A whole run."""
    return asyncio.run(verified(app, directory, *arguments))


def test_a_baseline_is_recorded_and_met(tmp_path: Path) -> None:
    """There are two runs; only the second has the checks that compare."""
    path = tmp_path / "baselines" / "double"
    first = run(ScoringDouble(), tmp_path, f"--record={path}")
    assert first.output.splitlines()[-1] == f"baseline: {path}"
    origin = read_baseline(path).origin
    assert origin is not None
    verdict = first.report["verdict"]
    assert origin == replace(ORIGIN, vllm="0.0.0", tool=origin.tool, verdict=verdict)
    second = run(ScoringDouble(), tmp_path, f"--against={path}")
    oracle = {name for name in second.named(*CheckStatus) if name.startswith("oracle.")}
    assert oracle == {f"oracle.{name}" for name in ("prompts", "scores", "answers", "first_tokens")}
    assert oracle <= set(second.named(CheckStatus.PASSED))


def test_what_cannot_be_recorded_leaves_the_file(tmp_path: Path) -> None:
    """The run is inconclusive, and says where to look."""
    path = tmp_path / "baseline"
    path.write_bytes(b"as it was")
    done = run(OpenAIDouble(), tmp_path, f"--record={path}")
    assert done.code == 8
    assert done.output.splitlines()[-1].startswith("baseline: not written")
    assert path.read_bytes() == b"as it was"


def test_a_baseline_has_scores_and_verdict(tmp_path: Path) -> None:
    """Also those of a run that failed, which the file says."""
    path = tmp_path / "baseline"
    assert keep(Baseline(origin=ORIGIN), REPORT, path, Options()) == f"baseline: {path}"
    found = read_baseline(path)
    assert found.scores == {"sums (profile quick)": Score(90.0, 40)}
    assert found.recorded_at == REPORT.started_at
    assert found.origin == replace(ORIGIN, verdict="failed")


def test_an_interrupted_run_leaves_the_file(tmp_path: Path) -> None:
    """Its scores are not all there."""
    path = tmp_path / "baseline"
    said = keep(Baseline(origin=ORIGIN), replace(REPORT, is_interrupted=True), path, Options())
    assert said.startswith("baseline: not written")
    assert not path.exists()


def test_a_baseline_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """It names the flag."""
    with pytest.raises(HoldfastError) as caught:
        keep(Baseline(origin=ORIGIN), REPORT, tmp_path, Options())
    assert "--record" in caught.value.remedy


@pytest.mark.parametrize("path", [Path("/dev/null/x"), Path("/"), Path("/proc/x")])
def test_a_path_that_cannot_be_written_is_refused_before_the_run(path: Path) -> None:
    """A run takes minutes."""
    with pytest.raises(UsageError, match="--record: "):
        options_of(None, path)


def test_what_is_not_a_file_is_not_replaced(tmp_path: Path) -> None:
    """A baseline would take the place of a device, a pipe or a directory."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (Path("/dev/null"), tmp_path, *tmp_path.iterdir()):
        with pytest.raises(UsageError, match=r"--record: .* is not a regular file"):
            options_of(None, path)


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    """As one to the baseline of a version."""
    link, path = tmp_path / "link", tmp_path / "file"
    link.symlink_to(path)
    assert options_of(None, link).records
    assert keep(Baseline(origin=ORIGIN), REPORT, link, Options()) == f"baseline: {link}"
    assert link.readlink() == path
    assert path.is_file()


def test_a_file_that_is_not_a_baseline_is_refused_before_the_run(tmp_path: Path) -> None:
    """In one line; nothing is asked."""
    path = tmp_path / "other"
    path.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(UsageError, match=r"--against: .* is not a baseline"):
        options_of(path, None)


def test_the_baseline_of_another_model_is_refused(tmp_path: Path) -> None:
    """Exit 2, with both names."""
    path = tmp_path / "baseline"
    write_baseline(Baseline(origin=replace(ORIGIN, model="qwen")), path)
    done = run(OpenAIDouble(), tmp_path, f"--against={path}")
    assert done.code == 2
    assert "the baseline is one of 'qwen', and the server serves 'double'" in done.errors


def test_a_model_that_is_named_is_that_of_the_baseline() -> None:
    """One run cannot verify one model and compare another."""
    options = Options(Baseline(origin=ORIGIN))
    require_one_model(options)
    require_one_model(Options(model="qwen"))
    require_one_model(replace(options, model=ORIGIN.model))
    with pytest.raises(UsageError, match="the baseline is one of 'double', and --model names 'q'"):
        require_one_model(replace(options, model="q"))


def test_a_model_is_one_by_any_of_its_names() -> None:
    """A server may list several."""
    options = Options(Baseline(origin=replace(ORIGIN, model="adapter")))
    require_same_model(SERVER, options, ())
    require_same_model(SERVER, Options(), ())


def test_a_model_that_is_named_like_the_key_is_not_shown() -> None:
    """A server hears the key, and may list it."""
    server = replace(SERVER, models=("a-secret-key", "x" * 100_000))
    options = Options(Baseline(origin=replace(ORIGIN, model="qwen")))
    with pytest.raises(UsageError) as refused:
        require_same_model(server, options, ("a-secret-key",))
    assert "a-secret-key" not in str(refused.value)
    assert len(str(refused.value)) < 1000


class HalfNamed(ScoringDouble):
    """Has half of a surrogate pair in its version."""

    async def _version(self, _request: Request) -> Response:
        return Response(b'{"version": "\\ud800"}', media_type="application/json")


def test_a_baseline_that_cannot_be_written_costs_no_report(tmp_path: Path) -> None:
    """The verdict stands; one line says what is missing."""
    path = tmp_path / "baseline"
    done = run(HalfNamed(), tmp_path, f"--record={path}")
    assert "baseline: not written" in done.output
    assert done.report["checks"]
    assert not path.exists()


def test_the_model_of_the_baseline_is_verified(tmp_path: Path) -> None:
    """Not the first that the server lists."""
    path = tmp_path / "baseline"
    write_baseline(Baseline(origin=ORIGIN), path)
    done = run(Several(), tmp_path, f"--against={path}")
    assert done.report["server"]["model"] == ORIGIN.model


class ObstructiveScoring(Obstruction, ScoringDouble):
    """Has what a baseline records."""


def test_a_baseline_is_written_without_a_report(tmp_path: Path) -> None:
    """It has a place of its own; the exit code and the last line are those of the report."""
    path = tmp_path / "baseline"
    app = ObstructiveScoring().obstructing(tmp_path / "out" / "report.json")
    done = run(app, tmp_path, f"--record={path}")
    assert done.code == 1
    assert "report.json could not be written" in done.errors
    assert done.output.splitlines()[-1] == f"baseline: {path}"
    assert read_baseline(path).origin is not None
