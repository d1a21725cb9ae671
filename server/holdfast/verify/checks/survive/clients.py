"""Do clients of another make get all their answers? guidellm and aiperf load the server a little.

They count tokens themselves, so they need the model's tokenizer on this machine.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.verify.answers import dig_or
from holdfast.verify.check import Check
from holdfast.verify.other_programs import OtherProgram, path_of, results_of
from holdfast.verify.records import equal_to
from holdfast.verify.tokenizer_files import tokenizer_directory
from holdfast.verify.trial import CHAT, COMPLETIONS, InconclusiveError, SkippedError, Trial

_STREAMS = 4
_REQUESTS = 40
_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 16
_NOWHERE = "http://127.0.0.1:9"
_PLAIN = re.compile(r"[\w./:@+-]+")

GUIDELLM = OtherProgram(
    "guidellm",
    "pip install guidellm",
    results="results.json",
    key_variable="GUIDELLM__SPEC__BACKEND__API_KEY",
)
AIPERF = OtherProgram(
    "aiperf",
    "pip install aiperf",
    results="**/profile_export_aiperf.json",
    complaint=" ERROR ",
    # Offline, it takes a directory for the name of a repository.
    variables={"HF_ENDPOINT": _NOWHERE, "HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""},
)


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """What a client saw; a number that it does not give is None."""

    answered: float | None
    errors: float
    median_ms: float | None
    """The median time to the first token."""
    p99_ms: float | None
    tokens_per_second: float | None


async def guidellm(trial: Trial) -> None:
    """A load by guidellm."""
    tokenizer = _tokenizer(trial, GUIDELLM)
    found = await results_of(GUIDELLM, trial, lambda out: _for_guidellm(trial, tokenizer, out))
    _judge(trial, _of_guidellm(found))


async def aiperf(trial: Trial) -> None:
    """A load by aiperf."""
    tokenizer = _tokenizer(trial, AIPERF)
    found = await results_of(AIPERF, trial, lambda out: _for_aiperf(trial, tokenizer, out))
    _judge(trial, _of_aiperf(found))


def _judge(trial: Trial, load: ClientLoad) -> None:
    """Only answers are required: how fast they are depends on the machine.

    Raises:
        InconclusiveError: the client's results have another shape than that of a known version.
    """
    if load.answered is None:
        raise InconclusiveError("the client does not say how many requests were answered")
    trial.measure("answered", load.answered, limit=equal_to(_REQUESTS))
    trial.measure("errors", load.errors, limit=equal_to(0))
    told = {
        ("first token, median", "ms"): load.median_ms,
        ("first token, p99", "ms"): load.p99_ms,
        ("output", "tokens/s"): load.tokens_per_second,
    }
    for (name, unit), value in told.items():
        if value is not None and load.answered:
            trial.measure(name, value, unit)


def _tokenizer(trial: Trial, program: OtherProgram) -> str:
    """The directory of the tokenizer.

    Raises:
        SkippedError: the program cannot be run.
    """
    if path_of(program) is None:
        raise SkippedError(f"{program.name} is not installed", program.remedy)
    if not {"chat", "completions"} & set(trial.server.abilities):
        raise SkippedError("the server generates no text")
    found = tokenizer_directory(trial.server)
    if found is None:
        raise SkippedError(
            "the tokenizer of the model is not on this machine",
            "run it where the files of the model are",
        )
    # aiperf fills in templates in its file, and a server could name its model like one.
    if not all(map(_PLAIN.fullmatch, (trial.server.model, trial.server.url, str(found)))):
        raise SkippedError(f"{program.name} would not take the model's name or directory as it is")
    return str(found)


def _for_guidellm(trial: Trial, tokenizer: str, directory: Path) -> Sequence[str]:
    """Its arguments; the rest is in a file."""
    spec = {
        "backend": {
            "kind": "openai_http",
            "target": trial.server.url,
            "model": trial.server.model,
            "request_format": _path(trial),
            "follow_redirects": False,
            "validate_backend": False,  # which asks for /health, and that is not of the API
            "verify": True,
        },
        "profile": {"kind": "concurrent", "streams": _STREAMS},
        "constraints": [{"kind": "max_requests", "count": _REQUESTS}],
        "tokenizer": {"kind": "hf_auto", "model": tokenizer},
        "data": [
            {
                "kind": "synthetic_text",
                "prompt_tokens": _PROMPT_TOKENS,
                "output_tokens": _ANSWER_TOKENS,
            }
        ],
        "outputs": [{"kind": "json", "path": str(directory / GUIDELLM.results)}],
    }
    plan = directory / "plan.json"
    plan.write_text(json.dumps({"spec": spec}))
    return ["run", f"--config={plan}", "--disable-progress"]


def _of_guidellm(results: Mapping[str, Any]) -> ClientLoad:
    path = ("benchmarks", 0, "metrics")
    requests = (*path, "request_totals")
    first, output = (*path, "time_to_first_token_ms"), (*path, "output_tokens_per_second")
    unfinished = [_number(results, *requests, one) or 0 for one in ("errored", "incomplete")]
    return ClientLoad(
        answered=_number(results, *requests, "successful"),
        errors=sum(unfinished),
        median_ms=_number(results, *first, "successful", "median"),
        p99_ms=_number(results, *first, "successful", "percentiles", "p99"),
        tokens_per_second=_number(results, *output, "successful", "mean"),
    )


def _for_aiperf(trial: Trial, tokenizer: str, directory: Path) -> Sequence[str]:
    """Its arguments, and a file in which it fills in the key: it has no variable for that."""
    endpoint: dict[str, Any] = {"url": trial.server.url, "streaming": True}
    endpoint["type"] = "chat" if _path(trial) == CHAT else "completions"
    if trial.target.api_key:
        endpoint["api_key"] = f"${{{AIPERF.key_variable}}}"
    benchmark = {
        "model": trial.server.model,
        "endpoint": endpoint,
        "tokenizer": {"name": tokenizer},
        "dataset": {
            "type": "synthetic",
            "entries": _REQUESTS,
            "prompts": {"isl": _PROMPT_TOKENS, "osl": _ANSWER_TOKENS},
        },
        "phases": {"type": "concurrency", "concurrency": _STREAMS, "requests": _REQUESTS},
    }
    plan = directory / "plan.yaml"
    plan.write_text(json.dumps({"schemaVersion": "2.0", "benchmark": benchmark}))
    return [
        "profile",
        f"--config={plan}",
        f"--artifact-dir={directory}",
        "--ui=none",
        "--no-gpu-telemetry",
        "--no-server-metrics",
    ]


def _of_aiperf(results: Mapping[str, Any]) -> ClientLoad:
    return ClientLoad(
        answered=_number(results, "request_count", "avg"),
        errors=_number(results, "error_request_count", "avg") or 0,
        median_ms=_number(results, "time_to_first_token", "p50"),
        p99_ms=_number(results, "time_to_first_token", "p99"),
        tokens_per_second=_number(results, "output_token_throughput", "avg"),
    )


def _path(trial: Trial) -> str:
    return CHAT if "chat" in trial.server.abilities else COMPLETIONS


def _number(results: Mapping[str, Any], *path: str | int) -> float | None:
    """The number there; None if there is none."""
    whole = dig_or(results, *path, default=-1)
    found = dig_or(results, *path, default=float(whole))
    return found if math.isfinite(found) and found >= 0 else None


CHECKS = (
    Check(
        "guidellm",
        "survive",
        guidellm,
        "Under a small load, guidellm gets every answer.",
        profiles=("full",),
        deadline_seconds=1800.0,
        is_asked_elsewhere=True,
    ),
    Check(
        "aiperf",
        "survive",
        aiperf,
        "Under a small load, aiperf gets every answer.",
        profiles=("full",),
        deadline_seconds=1800.0,
        is_asked_elsewhere=True,
    ),
)
