"""What does canitoolcall's probe of a running server say? It is part of `holdfast[verify]`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from holdfast.verify.check import Check
from holdfast.verify.checks.tools.asking import ANSWER_TOKENS
from holdfast.verify.target import REQUEST_SECONDS
from holdfast.verify.trial import SkippedError, Trial

_OF_THE_MODEL = ("expected ", "hint: ", "argument values lost", "call ")
"""How the probe begins what it says about a model that calls another function, or none."""
_STOP = "finish_reason is 'stop'"
"""What it warns of where a named function is demanded; OpenAI and vLLM say `stop` there."""


async def probe(trial: Trial) -> None:
    """Its scenarios, each at once and as a stream.

    What a server does wrong fails: markup in the text, a stream that differs, a broken protocol.
    What may as well be the model's is warned of: no call, another one, arguments beside the schema.
    """
    from canitoolcall import probe as canitoolcall  # noqa: PLC0415 - here only if the extra is

    scenarios = [
        replace(one, extra_body={**one.extra_body, "max_tokens": ANSWER_TOKENS})
        for one in canitoolcall.BUILTIN_SCENARIOS
    ]
    if urlsplit(trial.target.url).username is not None:
        raise SkippedError(
            "canitoolcall does not accept a user name in the URL", "give --api-key-file"
        )

    async def probed(asked: Sequence[Any]) -> Sequence[Any]:
        done = await asyncio.to_thread(
            canitoolcall.probe,
            f"{trial.target.url}/v1",
            trial.server.model,
            api_key=trial.target.api_key or None,
            scenarios=asked,
            timeout_s=REQUEST_SECONDS,
        )
        rows: Sequence[Any] = done.outcomes
        return rows

    forced = {one.id for one in scenarios if not isinstance(one.tool_choice, str)}
    rows = await probed(scenarios)
    differing = {row.scenario_id for row in rows if _is_twin(row) and row.status == "fail"}
    again = [one for one in scenarios if one.id in differing]
    # A server that batches may say something else each time.
    lasting = {row.scenario_id for row in await probed(again) if _is_twin(row) and _is_bad(row)}
    for row in rows:
        way = "as a stream" if row.stream else "at once"
        for warning in row.warnings:
            if not (row.scenario_id in forced and warning.startswith(_STOP)):
                trial.warn(f"{row.scenario_id}, {way}: {warning}")
        if _is_twin(row) and _is_bad(row):
            differs = trial.blame if row.scenario_id in lasting else trial.warn
            differs(f"{row.scenario_id}, as a stream and at once: {row.detail}")
        elif _is_bad(row):
            _note(trial, f"{row.scenario_id}, {way}", row)
    trial.measure("scenarios passed", sum(row.status == "pass" for row in rows))


def _is_twin(row: Any) -> bool:
    """Whether the row compares a stream with the answer at once."""
    return bool(row.check == "stream_equals_nonstream")


def _is_bad(row: Any) -> bool:
    return row.status in ("fail", "error")


def _note(trial: Trial, where: str, row: Any) -> None:
    for said in (row.detail or "no reason").split("; "):
        is_of_the_model = said.startswith(_OF_THE_MODEL) or " call is missing argument" in said
        (trial.warn if is_of_the_model else trial.blame)(f"{where}: {said}")


CHECKS = (
    Check(
        "probe",
        "tools",
        probe,
        "canitoolcall's probe finds no markup, no broken protocol and no stream that differs.",
        needs=("tools",),
        packages=("canitoolcall",),
        deadline_seconds=900.0,
    ),
)
