"""What does canitoolcall's probe of a running server say? It is part of the extra `verify`."""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import urlsplit

from holdfast.verify.check import Check
from holdfast.verify.checks.self_agreement.sequences import longest_tokens
from holdfast.verify.checks.tools.asking import ANSWER_TOKENS
from holdfast.verify.other_tools import Row, Wish, rows_of
from holdfast.verify.target import PATIENT_SECONDS
from holdfast.verify.trial import SkippedError, Trial

_ANSWER_TOKENS = 1024
"""Room for a model that thinks first: the probe takes half a call for markup in the text."""
_OF_THE_MODEL = ("expected ", "hint: ", "argument values lost", "call ")
"""How the probe begins what it says about a model that calls another function, or none."""
_REFUSED = re.compile(r"HTTP 4(?!29)\d\d ")
"""How it begins what it says about a request that the server refuses."""
_FOR_THOUGHTS = re.compile(r"reasoning|think|thought", re.IGNORECASE)
"""What a server names that demands the thoughts before a call, which the probe does not have."""
_STOP = "finish_reason is 'stop'"
"""What it warns of where a named function is demanded; OpenAI and vLLM say `stop` there."""


async def probe(trial: Trial) -> None:
    """Its scenarios, each at once and as a stream.

    What a server does wrong fails: markup in the text, a stream that differs, a broken protocol.
    What may as well be the model's is warned of: no call, another one, arguments beside the schema.
    """
    if urlsplit(trial.target.url).username is not None:
        raise SkippedError(
            "canitoolcall does not accept a user name in the URL", "give --api-key-file"
        )
    wish = Wish(
        "canitoolcall",
        trial.target.url,
        trial.server.model,
        trial.target.api_key,
        trial.target.secrets,
        max_tokens=max(min(_ANSWER_TOKENS, longest_tokens(trial) // 2), ANSWER_TOKENS),
        timeout_seconds=PATIENT_SECONDS,
    )
    rows = await rows_of(wish)
    differing = tuple(row.name for row in rows if row.is_twin and row.status == "fail")
    # A server that batches may say something else each time.
    again = await rows_of(replace(wish, scenarios=differing)) if differing else ()
    lasting = {row.name for row in again if row.is_twin and _is_bad(row)}
    for row in rows:
        way = "as a stream" if row.is_streamed else "at once"
        for warning in row.warnings:
            if not (row.is_forced and warning.startswith(_STOP)):
                trial.warn(f"{row.name}, {way}: {warning}")
        if row.is_twin and _is_bad(row):
            differs = trial.blame if row.name in lasting else trial.warn
            differs(f"{row.name}, as a stream and at once: {row.said}")
        elif _is_refused(row):
            trial.warn(f"{row.name}, {way}: {row.said}")
        elif _is_bad(row):
            _note(trial, f"{row.name}, {way}", row)
    trial.measure("scenarios passed", sum(row.status == "pass" for row in rows))


def _is_bad(row: Row) -> bool:
    return row.status in ("fail", "error")


def _is_refused(row: Row) -> bool:
    """Whether the server says that it cannot do this, as those of models that think may."""
    is_fair = row.is_forced or (row.is_continued and _FOR_THOUGHTS.search(row.said))
    return bool(is_fair and _REFUSED.match(row.said))


def _note(trial: Trial, where: str, row: Row) -> None:
    for said in (row.said or "no reason").split("; "):
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
        deadline_seconds=3600.0,
        is_asked_elsewhere=True,
    ),
)
