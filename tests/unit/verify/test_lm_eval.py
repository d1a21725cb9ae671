"""`--lm-eval`: what lm-eval is asked for, and what becomes of its numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.verify.baseline import Baseline, Score, read_baseline
from holdfast.verify.checks import skill
from holdfast.verify.checks.skill.lm_eval import TaskMetric, metrics_of, tasks_of
from holdfast.verify.options import Options
from holdfast.verify.records import CheckResult, CheckStatus
from openai_double import OpenAIDouble
from scoring_double import ScoringDouble
from stand_in_programs import install, install_none
from verified import results, verified

LM_EVAL = [check for check in skill.CHECKS if check.name == "lm_eval"]
ARC: dict[str, Any] = {
    "results": {
        "arc": {
            "name": "arc",
            "alias": "arc",
            "sample_len": 400,
            "acc,none": 0.9,
            "acc_stderr,none": 0.015,
        }
    },
    "group_subtasks": {},
    "configs": {"arc": {"metric_list": [{"metric": "acc", "aggregation": "mean"}]}},
    "higher_is_better": {"arc": {"acc": True}},
    "n-samples": {"arc": {"original": 400, "effective": 400}},
    "task_hashes": {"arc": "f3a51f70"},
}
"""What lm-eval 0.4.13 writes, without what is not read."""
NAME = "lm-eval arc: acc,none (questions 70c821c9)"
WRITES = """
place = Path(given("--output_path"), "double")
place.mkdir()
told = {told!r}
(place / "results_2026-11-29T04-27-22.json").write_text(json.dumps(told))
"""


def made(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    told: Mapping[str, Any] = ARC,
    baseline: Baseline | None = None,
) -> CheckResult:
    """What comes of the check if lm-eval writes this."""
    install(monkeypatch, directory, "lm_eval", WRITES.format(told=dict(told)))
    return result_of(OpenAIDouble(), Options(baseline, lm_eval="arc"))


def result_of(app: OpenAIDouble, options: Options) -> CheckResult:
    (result,) = results(app, LM_EVAL, options=options).values()
    return result


def test_a_score_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With its n, which gives its standard error, and without a limit."""
    result = made(monkeypatch, tmp_path)
    assert result.status is CheckStatus.PASSED, result.reason
    (number,) = result.numbers
    assert (number.name, number.value, number.of, number.limit) == (NAME, 90, 400, None)
    assert number.standard_error == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("recorded", "status"),
    [(Score(90, 400), CheckStatus.PASSED), (Score(99, 400), CheckStatus.FAILED)],
)
def test_a_score_keeps_to_the_baseline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: Score, status: CheckStatus
) -> None:
    """Of any profile, because the profile does not decide what lm-eval asks."""
    assert made(monkeypatch, tmp_path, baseline=Baseline({NAME: recorded})).status is status


def test_other_questions_are_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a task with the same name; the check warns that nothing limits the score."""
    other = ARC | {"task_hashes": {"arc": "00000000"}}
    result = made(monkeypatch, tmp_path, other, Baseline({NAME: Score(99, 400)}))
    assert result.status is CheckStatus.WARNED
    assert "the baseline has no score of the same questions" in result.reason


def test_a_score_is_recorded_and_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By two runs of the command, in different profiles."""
    install(monkeypatch, tmp_path, "lm_eval", WRITES.format(told=ARC))
    path = tmp_path / "baseline"

    def run(*arguments: str) -> list[str]:
        done = asyncio.run(verified(ScoringDouble(), tmp_path, "--lm-eval=arc", *arguments))
        return done.named(CheckStatus.PASSED)

    assert "skill.lm_eval" in run(f"--record={path}")
    assert read_baseline(path).scores[NAME] == Score(90, 400)
    assert "skill.lm_eval" in run(f"--against={path}")


def test_a_number_that_is_no_share_is_only_reported() -> None:
    """A perplexity, a mean that is not one, a number that is better if it is lower."""
    told = {
        "results": {
            "wiki": {"sample_len": 62, "ppl,none": 12.5, "ppl_stderr,none": "N/A"},
            "mt": {"bleu,none": 0.7, "bleu_stderr,none": 0.1, "ter,none": float("nan")},
            "brier": {"brier,none": 0.2, "brier_stderr,none": 0.01},
        },
        "higher_is_better": {
            "wiki": {"ppl": True},
            "mt": {"bleu": True},
            "brier": {"brier": False},
        },
        "configs": {"mt": {"metric_list": [{"metric": "bleu", "aggregation": "bleu"}]}},
        "n-samples": {"brier": {"effective": 9}, "mt": {"effective": 9}},
    }
    assert list(metrics_of(told)) == [
        TaskMetric("lm-eval brier: brier,none", 0.2, 0.01, 0),
        TaskMetric("lm-eval mt: bleu,none", 0.7, 0.1, 0),
        TaskMetric("lm-eval wiki: ppl,none", 12.5, None, 0),
    ]


def test_a_group_stands_for_its_tasks() -> None:
    """Of 57 scores that each have a limit, one would often be beyond it by chance."""
    score = {"acc,none": 0.5, "acc_stderr,none": 0.1}
    told = {
        "results": {
            "mmlu": {**score, "sample_count": {"acc,none": 30}},
            "mmlu_stem": {**score, "sample_count": {"acc,none": 20}},
            "mmlu_maths": {**score, "sample_len": 20},
            "mmlu_law": {**score, "sample_len": 10},
            "other": {**score, "sample_len": 7},
        },
        "groups": {"mmlu": {}, "mmlu_stem": {}},
        "group_subtasks": {"mmlu": ["mmlu_stem", "mmlu_law"], "mmlu_stem": ["mmlu_maths"]},
        "higher_is_better": {"mmlu": {"acc": True}, "other": {"acc": True}},
    }
    assert [(one.name, one.of) for one in metrics_of(told)] == [
        ("lm-eval mmlu: acc,none", 30),
        ("lm-eval other: acc,none", 7),
    ]


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_it_asks_as_the_server_can_be_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_tokenizer: bool
) -> None:
    """With completions of token ids; with chats where the tokenizer is not on this machine."""
    noted = tmp_path / "noted"
    install(monkeypatch, tmp_path, "lm_eval", f"Path({str(noted)!r}).write_text(repr(sys.argv))")
    app = OpenAIDouble()
    if has_tokenizer:
        app.configuration = replace(app.configuration, model=str(tmp_path), files=())
    result_of(app, Options(lm_eval="arc,hellaswag"))
    said = noted.read_text()
    assert "--tasks=arc,hellaswag" in said
    assert ("--model=local-completions" in said) is has_tokenizer
    assert ("--apply_chat_template" in said) is not has_tokenizer
    assert (f'"tokenizer": "{tmp_path}"' in said) is has_tokenizer
    assert '"model": "double"' in said


def test_a_server_that_it_cannot_ask_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It answers no chats, and its tokenizer is not here; a flag asks for the check."""
    install(monkeypatch, tmp_path, "lm_eval", "")
    app = OpenAIDouble().without("/v1/chat/completions")
    result = result_of(app, Options(lm_eval="arc"))
    assert result.status is CheckStatus.INCONCLUSIVE
    assert "tokenizer" in result.reason
    assert result.remedy


@pytest.mark.parametrize("told", [{}, {"results": {"arc": {"alias": "arc"}}}])
def test_no_number_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: Mapping[str, Any]
) -> None:
    """An empty task has no score."""
    result = made(monkeypatch, tmp_path, told)
    assert (result.status, result.reason) == (
        CheckStatus.INCONCLUSIVE,
        "lm_eval gives no number for these tasks",
    )


def test_what_is_not_on_this_machine_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is downloaded: its last line says what it lacks, and the remedy what to do."""
    last = "ConnectionError: Couldn't reach 'gsm8k' on the Hub (OfflineModeIsEnabled)"
    install(monkeypatch, tmp_path, "lm_eval", f"print('...')\nsys.exit({last!r})")
    result = result_of(OpenAIDouble(), Options(lm_eval="gsm8k"))
    assert result.status is CheckStatus.INCONCLUSIVE
    assert result.reason == f"lm_eval ended with 1: {last}"
    assert "nothing is downloaded" in result.remedy


def test_tasks_that_take_too_long_fail_no_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A user has asked for too many."""
    install(monkeypatch, tmp_path, "lm_eval", "time.sleep(600)")
    monkeypatch.setattr("holdfast.verify.checks.skill.lm_eval._RUN_SECONDS", 0.5)
    result = result_of(OpenAIDouble(), Options(lm_eval="arc"))
    assert result.status is CheckStatus.INCONCLUSIVE
    assert "did not end within" in result.reason


def test_without_the_flag_it_is_skipped() -> None:
    """And says how to ask for it."""
    result = result_of(OpenAIDouble(), Options())
    assert result.status is CheckStatus.SKIPPED
    assert "--lm-eval" in result.remedy


def test_a_directory_of_tasks_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With its whole path, since no name of a task begins like one."""
    install(monkeypatch, tmp_path, "lm_eval", "")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "one.yaml").write_text("task: one")
    monkeypatch.chdir(tmp_path)
    assert tasks_of("own") == str(tmp_path / "own")
    assert tasks_of("arc_easy,mmlu_*") == "arc_easy,mmlu_*"


def test_a_long_list_of_tasks_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Though no file may have such a name."""
    install(monkeypatch, tmp_path, "lm_eval", "")
    given = ",".join(["arc_easy"] * 40)
    assert tasks_of(given) == given


@pytest.mark.parametrize("given", ["", "arc,,mmlu", "--limit", "two words"])
def test_what_names_no_tasks_is_bad_usage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    """An option of lm-eval is not one of them."""
    install(monkeypatch, tmp_path, "lm_eval", "")
    with pytest.raises(UsageError, match="names no tasks"):
        tasks_of(given)


def test_a_directory_without_tasks_is_bad_usage(tmp_path: Path) -> None:
    """It may be another one than was meant."""
    with pytest.raises(UsageError, match="contains no task"):
        tasks_of(str(tmp_path))


def test_without_the_program_the_flag_is_bad_usage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The remedy installs it."""
    install_none(monkeypatch, tmp_path)
    with pytest.raises(UsageError) as caught:
        tasks_of("arc_easy")
    assert "pip install 'lm-eval[api]'" in caught.value.remedy
