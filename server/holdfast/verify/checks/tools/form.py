"""Do calls of functions come as clients read them, at once and as a stream?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.verify.answers import dig, dig_or
from holdfast.verify.check import Check
from holdfast.verify.checks.tools.asking import ANSWER_TOKENS, MARKUP, is_chosen, taken
from holdfast.verify.checks.tools.calls import (
    Turn,
    as_read,
    is_cut,
    is_object,
    merge,
    raw_calls,
    streamed_turn,
    whole_turn,
)
from holdfast.verify.checks.twins import compare
from holdfast.verify.streams import StreamedAnswer
from holdfast.verify.target import Answer
from holdfast.verify.trial import CHAT, SkippedError, Trial

_CALLING = ("tool_calls", "function_call")
"""The finish reasons that tell a client to run functions."""


async def form(trial: Trial) -> None:
    """Each call has an id of its own and a name; the parts of a stream follow their indices.

    An answer says at its end that it calls, because clients read there what to do next.
    """
    seen = 0
    for body in await taken(trial):
        whole = await trial.post(CHAT, body)
        with trial.demanding_form(whole):
            seen += len(raw_calls(whole))
            _judge_whole(trial, whole)
            _judge_end(trial, body, whole_turn(whole), whole)
        stream = await trial.stream(CHAT, body)
        with trial.demanding_form(stream):
            merged = merge(stream)
            for fault in merged.faults:
                trial.blame(fault, stream)
            _judge_ids(trial, [call.identity for call in merged.calls.values()], stream)
            _judge_end(trial, body, streamed_turn(stream), stream)
    _require_calls(seen)
    trial.measure("calls", seen)


async def stream_twin(trial: Trial) -> None:
    """Greedy answers with calls as a stream, against the same at once."""
    seen = 0
    for body in await taken(trial):
        if is_cut(await trial.post(CHAT, body), body):
            continue  # half a call is a text to one parser and a call to another
        turn = await compare(
            trial,
            CHAT,
            body,
            lambda answer: as_read(whole_turn(answer)),
            lambda answer: as_read(streamed_turn(answer)),
        )
        seen += len(turn.calls)
    _require_calls(seen)
    trial.measure("calls compared", seen)


async def markup(trial: Trial) -> None:
    """What the model wrote to call a function is not left in the text."""
    judged = 0
    for body in await taken(trial):
        whole = await trial.post(CHAT, body)
        stream = await trial.stream(CHAT, body)
        for answer, said in ((whole, whole.content()), (stream, stream.said().content)):
            if is_cut(answer, body):
                continue  # half a call is a text
            judged += 1
            left = [one for one in MARKUP if one in said]
            trial.require(not left, f"the text has {' and '.join(left)} in it", answer)
    if not judged:
        raise SkippedError(f"the model ends no answer within {ANSWER_TOKENS} tokens")
    trial.measure("answers", judged)


def _judge_whole(trial: Trial, answer: Answer) -> None:
    calls = raw_calls(answer)
    for call in calls:
        dig(call, "function", "arguments", kind=str)
        has_name = dig(call, "function", "name", kind=str)
        trial.require(has_name, "a call has no name", answer)
        trial.require(call.get("type") == "function", "a call is not of type function", answer)
    _judge_ids(trial, [dig_or(call, "id", default="") for call in calls], answer)


def _judge_ids(trial: Trial, ids: Sequence[str], answer: Answer | StreamedAnswer) -> None:
    trial.require(all(ids), "a call has no id, so no result can be sent back", answer)
    trial.require(len(set(ids)) == len(ids), "two calls have the same id", answer)


def _judge_end(
    trial: Trial, body: Mapping[str, Any], turn: Turn, answer: Answer | StreamedAnswer
) -> None:
    """Note a finish reason by which a client would do the wrong thing next.

    `stop` is right where a function was demanded. vLLM says `tool_calls` where any is required,
    even if the model ends without a call in its thoughts.
    """
    reason = turn.finish_reason
    if not turn.calls:
        note = trial.blame if is_chosen(body) else trial.warn
        if reason in _CALLING:
            note(f"an answer without a call ends by {reason}", answer)
    elif reason == "stop":
        note = trial.blame if trial.server.is_vllm else trial.warn
        said = "an answer whose calls the model chose to make ends by stop, and not by tool_calls"
        if is_chosen(body):
            note(said, answer)
    elif reason != "tool_calls":
        is_whole = all(is_object(call.arguments) for call in turn.calls)
        # A server may have a limit of its own that is lower than that of the request.
        note = trial.warn if reason == "length" else trial.blame
        if is_whole and not is_cut(answer, body):
            note(f"an answer with calls that nothing cut ends by {reason}", answer)


def _require_calls(seen: int) -> None:
    if not seen:
        raise SkippedError(f"the model makes no call within {ANSWER_TOKENS} tokens")


CHECKS = (
    Check(
        "form",
        "tools",
        form,
        "Each call has a name and a unique id, the answer has the right finish reason, and "
        "streamed calls are indexed from 0.",
        needs=("tools",),
    ),
    Check(
        "stream_twin",
        "tools",
        stream_twin,
        "A stream calls the same functions with the same arguments as the same answer at once.",
        needs=("tools",),
    ),
    Check(
        "markup",
        "tools",
        markup,
        "No markup of a call is left in the text of an answer.",
        needs=("tools",),
    ),
)
