"""How well does the model do in tasks of lm-eval? That program asks and scores: `--lm-eval`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from holdfast.errors import UsageError
from holdfast.verify.answers import dig_or, excerpt
from holdfast.verify.baseline import LM_EVAL
from holdfast.verify.check import Check
from holdfast.verify.other_programs import OtherProgram, path_of, results_of
from holdfast.verify.target import PATIENT_SECONDS
from holdfast.verify.tokenizer_files import tokenizer_directory
from holdfast.verify.trial import CHAT, COMPLETIONS, InconclusiveError, SkippedError, Trial

PROGRAM = OtherProgram(
    "lm_eval", "pip install 'lm-eval[api]' transformers", results="**/results_*.json"
)
_REMEDY = "correct the tasks; nothing is downloaded, so their data must be in Hugging Face's cache"
_AT_ONCE = 8
_DEADLINE_SECONDS = 21_600.0
_RUN_SECONDS = _DEADLINE_SECONDS - 60.0
"""What a user asks may take longer, which is not the server's fault."""
_NAME = re.compile(r"[^\s,-][^\s,]*")
_DIGEST_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class TaskMetric:
    """One number that lm-eval gives for a task."""

    name: str
    value: float
    """As lm-eval has it: a share is from 0 to 1."""
    error: float | None
    """The standard error; None if there is none."""
    of: int
    """How many questions it is the share of right answers to; 0 if it is another number."""


def tasks_of(given: str) -> str:
    """The tasks that `--lm-eval` names, as lm-eval takes them.

    Raises:
        UsageError: they are not names, or lm-eval is not installed.
    """
    directory = Path(given)
    is_directory = os.path.isdir(given)  # noqa: PTH112 - Path raises OSError for a long list
    if is_directory and not any(directory.glob("*.yaml")):
        raise UsageError(
            f"--lm-eval: {given} contains no task.", remedy="put *.yaml files of lm-eval there."
        )
    if not is_directory and not all(map(_NAME.fullmatch, given.split(","))):
        raise UsageError(
            f"--lm-eval: {given!r} names no tasks.",
            remedy="give names of lm-eval's tasks with commas between them, or a directory.",
        )
    if path_of(PROGRAM) is None:
        raise UsageError("--lm-eval: lm_eval is not installed.", remedy=f"{PROGRAM.remedy}.")
    return str(directory.absolute()) if is_directory else given


async def lm_eval(trial: Trial) -> None:
    """The scores of the tasks of `--lm-eval`."""
    tasks = trial.options.lm_eval
    if not tasks:
        raise SkippedError("--lm-eval was not given", "name tasks of lm-eval with --lm-eval TASKS")
    model = _model(trial)
    try:
        async with asyncio.timeout(_RUN_SECONDS):
            found = await results_of(PROGRAM, trial, lambda out: _arguments(tasks, model, out))
    except TimeoutError:
        why = f"lm_eval did not end within {_RUN_SECONDS:.0f} s"
        raise SkippedError(why, "name fewer tasks, or tasks with fewer questions") from None
    except InconclusiveError as error:  # as which it counts, because a flag asks for it
        raise SkippedError(str(error), _REMEDY) from None
    for metric in metrics_of(found):
        _note(trial, metric)
    if not trial.numbers:
        raise InconclusiveError("lm_eval gives no number for these tasks")


def metrics_of(results: Mapping[str, Any]) -> Iterator[TaskMetric]:
    """The numbers of each task; a group that has its own stands for its tasks."""
    every: dict[str, Any] = dig_or(results, "results", default={})
    for task in sorted(every.keys() - _members(results)):
        entry: dict[str, Any] = dig_or(every, task, default={})
        for key, value in entry.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not _is_number(value):
                continue
            error = entry.get(f"{metric}_stderr,{kind}")
            is_share = _is_share(results, task, metric, value)
            yield TaskMetric(
                name=excerpt(f"{LM_EVAL}{task}: {key}{_asked(results, task)}"),
                value=float(value),
                error=float(error) if _is_number(error) else None,
                of=_count(results, task, key) if is_share else 0,
            )


def _is_number(value: Any) -> TypeGuard[int | float]:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and math.isfinite(value)


def _note(trial: Trial, metric: TaskMetric) -> None:
    if metric.of:
        trial.score(metric.name, metric.value * metric.of, metric.of)
        if trial.baseline is not None and trial.numbers[-1].limit is None:
            trial.warn(f"the baseline has no score of the same questions: {metric.name}")
    else:
        trial.measure(metric.name, metric.value)
        if metric.error is not None:
            trial.measure(f"{metric.name}, standard error", metric.error)


def _model(trial: Trial) -> Mapping[str, Any]:
    """How lm-eval asks: completions of token ids, or chats where there is no tokenizer for them."""
    server, tokenizer = trial.server, tokenizer_directory(trial.server)
    asked: dict[str, Any] = {
        "model": server.model,
        "num_concurrent": _AT_ONCE,
        "timeout": int(PATIENT_SECONDS),
    }
    if server.max_model_len:
        asked["max_length"] = server.max_model_len
    if tokenizer is not None and "completions" in server.abilities:
        own = {"tokenizer": str(tokenizer), "tokenizer_backend": "huggingface"}
        return {**asked, **own, "base_url": f"{server.url}{COMPLETIONS}"}
    if "chat" not in server.abilities:
        raise SkippedError(
            "the tokenizer of the model is not on this machine, and the server answers no chats",
            "run it where the files of the model are",
        )
    return {**asked, "base_url": f"{server.url}{CHAT}"}


def _arguments(tasks: str, model: Mapping[str, Any], directory: Path) -> Sequence[str]:
    is_chat = model["base_url"].endswith(CHAT)
    kind = "local-chat-completions" if is_chat else "local-completions"
    return [
        "run",
        f"--model={kind}",
        f"--model_args={json.dumps(model)}",
        f"--tasks={tasks}",
        f"--output_path={directory}",
        "--log_samples",  # without them it does not say which questions it asked
        *(["--apply_chat_template"] if is_chat else []),
    ]


def _members(results: Mapping[str, Any]) -> set[str]:
    """The tasks and groups within a group that has a score of its own."""
    groups: dict[str, Any] = dig_or(results, "groups", default={})
    return set().union(*(_below(results, one) for one in groups))


def _below(results: Mapping[str, Any], name: str) -> set[str]:
    """Every task and group within a group; none are within a task."""
    found: set[str] = set()
    pending = [name]
    while pending:
        inside: list[Any] = dig_or(results, "group_subtasks", pending.pop(), default=[])
        more = {one for one in inside if isinstance(one, str)} - found
        found |= more
        pending += more
    return found


def _asked(results: Mapping[str, Any], name: str) -> str:
    """A digest of the questions, so that no others are compared with them; empty if untold."""
    within = _below(results, name) or {name}
    hashes = sorted(dig_or(results, "task_hashes", one, default="") for one in within)
    told = " ".join(filter(None, hashes))
    digest = hashlib.sha256(told.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f" (questions {digest})" if told else ""


def _is_share(results: Mapping[str, Any], name: str, metric: str, value: float) -> bool:
    """Whether the number is the mean of what each answer got, from 0 to 1."""
    listed: list[Any] = dig_or(results, "configs", name, "metric_list", default=[])
    ways = {dig_or(one, "metric", default=""): one for one in listed}
    is_mean = dig_or(ways.get(metric), "aggregation", default="mean") == "mean"
    is_higher_better = dig_or(results, "higher_is_better", name, metric, default=False)
    return is_mean and is_higher_better and 0 <= value <= 1


def _count(results: Mapping[str, Any], name: str, key: str) -> int:
    """How many questions were asked; 0 if untold."""
    every = dig_or(results, "results", name, "sample_len", default=0)
    effective = dig_or(results, "n-samples", name, "effective", default=every)
    return dig_or(results, "results", name, "sample_count", key, default=effective)


CHECKS = (
    Check(
        "lm_eval",
        "skill",
        lm_eval,
        "The model does as well in tasks of lm-eval as it did when it was recorded.",
        deadline_seconds=_DEADLINE_SECONDS,
        asked_for=lambda options: bool(options.lm_eval),
    ),
)
