"""Do forced calls keep to the schema of their function, at once and as a stream?

A call in error is of one of the classes that OpenRouter counts: arguments that are not a JSON
object, a name that was not offered, arguments that the schema refuses.
https://openrouter.ai/docs/guides/routing/auto-exacto
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from enum import StrEnum
from typing import Any

from holdfast.verify.answers import beginning
from holdfast.verify.check import FROM_STANDARD, Check
from holdfast.verify.checks.tools.asking import (
    ANSWER_TOKENS,
    ASKED,
    ToolBody,
    function,
    named,
    refused_choices,
)
from holdfast.verify.checks.tools.calls import (
    Turn,
    is_cut,
    streamed_turn,
    whole_turn,
)
from holdfast.verify.checks.tools.keywords import Case, cases
from holdfast.verify.records import at_least, equal_to
from holdfast.verify.streams import StreamedAnswer
from holdfast.verify.target import Answer
from holdfast.verify.trial import (
    CHAT,
    InconclusiveError,
    SkippedError,
    Trial,
    UnexpectedStatusError,
)
from holdfast.verify.waiting import together

_AT_ONCE = 8
_STANDARD_CASES, _FULL_CASES = 30, 200
_MIN_VALID_PERCENT = 98
_NAME = "record"
_SHOWN_CHARACTERS = 80


class CallOutcome(StrEnum):
    """What came of one forced call."""

    VALID = "valid"
    INVALID_JSON = "InvalidJson"
    UNKNOWN_NAME = "UnknownName"
    SCHEMA_MISMATCH = "SchemaMismatch"
    NO_CALL = "NoCall"
    CUT = "cut by max_tokens"
    REFUSED = "refused by the server"


_WHOLE = (
    CallOutcome.VALID,
    CallOutcome.INVALID_JSON,
    CallOutcome.UNKNOWN_NAME,
    CallOutcome.SCHEMA_MISMATCH,
    CallOutcome.NO_CALL,
)
"""What is judged: the others are not calls that have ended."""


async def schemas(trial: Trial) -> None:
    """Each case once at once and once as a stream."""
    if said := (await trial.once(refused_choices)).get(str(named(ASKED))):
        raise SkippedError(f"no function can be forced: {said}")
    known = cases(_FULL_CASES if trial.profile == "full" else _STANDARD_CASES)
    room = asyncio.Semaphore(_AT_ONCE)

    async def judged(case: Case, *, is_streamed: bool) -> CallOutcome:
        async with room:
            return await _judge(trial, case, is_streamed=is_streamed)

    outcomes = Counter(
        await together(*(judged(case, is_streamed=way) for case in known for way in (False, True)))
    )
    _report(trial, outcomes)


def _report(trial: Trial, outcomes: Counter[CallOutcome]) -> None:
    whole = sum(outcomes[one] for one in _WHOLE)
    if not whole:
        most = outcomes.most_common(1)[0][0]
        why = f"no forced call finished: {most}"
        # A model that ends no call is nobody's fault; a server that refuses them all is no better
        # than one that refuses half.
        raise InconclusiveError(why) if most is CallOutcome.REFUSED else SkippedError(why)
    trial.measure("calls", whole)
    limit = at_least(_MIN_VALID_PERCENT)
    trial.measure("valid calls", 100 * outcomes[CallOutcome.VALID] / whole, "%", limit)
    for error in (CallOutcome.INVALID_JSON, CallOutcome.UNKNOWN_NAME, CallOutcome.NO_CALL):
        trial.measure(error, outcomes[error], limit=equal_to(0))
    for other in (CallOutcome.SCHEMA_MISMATCH, CallOutcome.CUT, CallOutcome.REFUSED):
        trial.measure(other, outcomes[other])
    if 2 * whole < outcomes.total():
        raise InconclusiveError(f"only {whole} of {outcomes.total()} forced calls came to an end")


async def _judge(trial: Trial, case: Case, *, is_streamed: bool) -> CallOutcome:
    """Ask for one call, and note what is wrong with it."""
    body = _body(trial, case)
    answer: Answer | StreamedAnswer
    try:
        if is_streamed:
            answer = await trial.stream(CHAT, body)
        else:
            answer = await trial.post(CHAT, body)
    except UnexpectedStatusError as error:
        if not 400 <= error.status < 500:
            raise
        trial.warn(f"{case.name}: {error}")  # it says what it cannot do, which is fair
        return CallOutcome.REFUSED
    if is_cut(answer, body):
        return CallOutcome.CUT
    turn = streamed_turn(answer) if isinstance(answer, StreamedAnswer) else whole_turn(answer)
    outcome, why = _outcome(turn, case)
    if outcome is not CallOutcome.VALID:
        # Mismatches are judged by their share.
        note = trial.warn if outcome is CallOutcome.SCHEMA_MISMATCH else trial.blame
        note(f"{case.name}: {outcome}: {why}", answer)
    return outcome


def _body(trial: Trial, case: Case) -> ToolBody:
    values = json.dumps(case.arguments, ensure_ascii=False)
    tool = function(_NAME, "Record values.", case.parameters)
    tool["function"]["strict"] = True  # without it a server need not keep to the schema
    return trial.chat_body(
        f"Call {_NAME} with these arguments: {values}",
        tools=[tool],
        tool_choice=named(_NAME),
        max_tokens=ANSWER_TOKENS,
    )


def _outcome(turn: Turn, case: Case) -> tuple[CallOutcome, str]:
    if not turn.calls:
        return CallOutcome.NO_CALL, "the answer has no call, though `tool_choice` demands one"
    for call in turn.calls:
        if call.name != _NAME:
            return CallOutcome.UNKNOWN_NAME, f"it calls {call.name!r}"
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            said = beginning(call.arguments, _SHOWN_CHARACTERS)
            return CallOutcome.INVALID_JSON, f"the arguments are {said!r}"
        if refusal := _refusal(case, arguments):
            return CallOutcome.SCHEMA_MISMATCH, refusal
    return CallOutcome.VALID, ""


def _refusal(case: Case, arguments: Any) -> str:
    """Why the schema refuses the arguments; empty if it takes them.

    Of the formats that `keywords` uses, `date`, `email` and `uuid` are checked, `email` only for
    its "@". `date-time` is not: that needs the package rfc3339-validator.
    """
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - here only if the extra is

    validator = Draft202012Validator(
        case.parameters, format_checker=Draft202012Validator.FORMAT_CHECKER
    )
    errors = validator.iter_errors(arguments)
    return next((f"{error.json_path}: {error.message}" for error in errors), "")


CHECKS = (
    Check(
        "schemas",
        "tools",
        schemas,
        "Forced calls keep to their schema, at once and as a stream.",
        profiles=FROM_STANDARD,
        needs=("tools",),
        packages=("jsonschema",),
        deadline_seconds=1800.0,
    ),
)
