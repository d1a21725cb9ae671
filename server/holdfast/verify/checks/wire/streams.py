"""Is a stream framed as clients read it, and does it come while it is written?"""

from __future__ import annotations

from typing import Any

from holdfast.verify.answers import dig, dig_or
from holdfast.verify.check import Check
from holdfast.verify.checks.asking import PROMPT, each, judge_each
from holdfast.verify.checks.wire.forms import FINISH_REASONS
from holdfast.verify.checks.wire.heads import judge_name, require_strict
from holdfast.verify.streams import StreamedAnswer, delta_reasoning, delta_text
from holdfast.verify.trial import CHAT, SkippedError, Trial

_KINDS = {True: "chat.completion.chunk", False: "text_completion"}
"""The `object` of an event, by whether it is one of a chat."""
_MIN_EVENTS = 8
"""The least events with text: a client that has no time may read fewer at once three times."""
_LONG_CHARACTERS = 48
"""No server that writes a few tokens at a time has this much text in its first event."""
_EARLY_SHARE = 1 / 3
"""The share of the events with text that have to come before the last arrival."""
_TRIES = 3
PACED_TOKENS = 32
"""How many tokens have to come one by one."""


async def events(trial: Trial) -> None:
    """Frames, order, ids, ends and usage of the events."""
    for path, body in each(trial, PROMPT, max_tokens=12):
        stream = await trial.stream(path, body)
        trial.require(stream.is_of_events, f"its type is {stream.content_type!r}", stream)
        for fault in stream.frames.faults:
            trial.blame(fault, stream)
        with trial.demanding_form(stream):
            require_strict(trial, stream)
            _require_order(trial, stream, is_chat=path == CHAT)
            await judge_name(trial, stream, stream.documents[0])
        _count_empty(trial, stream, path)


def _require_order(trial: Trial, stream: StreamedAnswer, *, is_chat: bool) -> None:
    documents = stream.documents
    for name in ("id", "model", "object"):
        found = {dig(document, name, kind=str) for document in documents}
        trial.require(len(found) == 1, f"its events have {len(found)} values of {name!r}", stream)
    are_times = all(dig_or(document, "created", default=1) > 0 for document in documents)
    trial.require(are_times, "`created` of an event is not a time", stream)
    kind = dig(documents[0], "object", kind=str)
    trial.require(kind == _KINDS[is_chat], f"its events are {kind!r}", stream)
    parts = list(stream.choices(0))
    if is_chat:
        role = dig_or(parts[0], "delta", "role", default="")
        trial.require(role == "assistant", f"its first event has the role {role!r}", stream)
    ends = [i for i, part in enumerate(parts) if part.get("finish_reason") is not None]
    if trial.require(len(ends) == 1, f"{len(ends)} events have a finish reason", stream):
        reason = dig(parts[ends[0]], "finish_reason", kind=str)
        trial.require(reason in FINISH_REASONS, f"its finish reason is {reason!r}", stream)
        late = "".join(delta_text(part) for part in parts[ends[0] + 1 :])
        trial.require(not late, f"{late!r} comes after the finish reason", stream)
    others = [d for d in documents if not dig(d, "choices", kind=list)]
    is_last = others == [documents[-1]] and isinstance(documents[-1].get("usage"), dict)
    trial.require(is_last, "its last event, and no other, is not the usage", stream)


def _count_empty(trial: Trial, stream: StreamedAnswer, path: str) -> None:
    """Some clients take an event without text for the end; how many there are is told."""
    if not stream.frames.faults:
        empty = [one for one in stream.choices(0) if not _says(one)]
        trial.measure(f"events without text, {path}", len(empty))


def _says(choice: dict[str, Any]) -> bool:
    delta: dict[str, Any] = dig_or(choice, "delta", default={})
    return bool(choice.get("text") or any(delta.values()) or choice.get("finish_reason"))


async def unasked_usage(trial: Trial) -> None:
    """Without `include_usage` no event is without a choice: old clients read `choices[0]`."""
    for path, body in each(trial, PROMPT, max_tokens=3):
        stream = await trial.stream(path, {**body, "stream_options": None})
        for document in stream.documents:
            said = "an event has no choice, though no usage was asked for"
            trial.require(dig(document, "choices", kind=list), said, stream)


async def incremental(trial: Trial) -> None:
    """The first text is there before the last one is written."""
    await judge_each(trial, _judge_pace, PROMPT, max_tokens=PACED_TOKENS)


async def _judge_pace(trial: Trial, path: str, body: dict[str, Any]) -> None:
    for _ in range(_TRIES):  # a client that has no time reads at once what came one by one
        stream = await trial.stream(path, body)
        times = _text_times(stream)
        if len(times) < _MIN_EVENTS and _written_characters(stream) < _LONG_CHARACTERS:
            raise SkippedError("the model's answer is too short to tell")
        early = sum(time < times[-1] for time in times)
        if early >= _EARLY_SHARE * len(times):
            break
    trial.measure(f"first text, {path}", times[0], "s")
    trial.measure(f"last text, {path}", times[-1], "s")
    trial.measure(f"texts before the last arrival, {path}", early)
    late = len(times) - early
    said = f"{path}: {late} of {len(times)} texts arrived at once, at the end"
    trial.require(early >= _EARLY_SHARE * len(times), said, stream)


def _text_times(stream: StreamedAnswer) -> list[float]:
    """When each event with text had arrived: a role alone, or a usage, is not one."""
    events = zip(stream.frames.events, stream.documents, strict=False)  # without [DONE]
    return [event.at_seconds for event, document in events if _text_of(document)]


def _written_characters(stream: StreamedAnswer) -> int:
    """How long the text is, without what stands for bytes that are not a character.

    A server waits for the rest of a character, and tells all of it at once if none comes.
    """
    text = "".join(map(_text_of, stream.documents))
    return len(text.replace("\N{REPLACEMENT CHARACTER}", ""))


def _text_of(document: dict[str, Any]) -> str:
    """What the choices say in an event, thoughts included."""
    choices = dig(document, "choices", kind=list)
    return "".join(delta_reasoning(choice) + delta_text(choice) for choice in choices)


CHECKS = (
    Check(
        "events",
        "wire",
        events,
        "A stream is framed strictly: order, ids, one finish reason, the usage, `[DONE]`.",
    ),
    Check(
        "unasked_usage",
        "wire",
        unasked_usage,
        "Without `include_usage`, every event of a stream has a choice.",
    ),
    Check("incremental", "wire", incremental, "A stream arrives while it is written."),
)
