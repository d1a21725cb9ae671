"""Is a stream framed as clients read it, and does it come while it is written?"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.verify.answers import dig, dig_or, is_absent
from holdfast.verify.check import Check
from holdfast.verify.checks.wire.asking import PROMPT, each, judge_each
from holdfast.verify.checks.wire.forms import FINISH_REASONS
from holdfast.verify.records import Request
from holdfast.verify.streams import StreamedAnswer, delta_reasoning, delta_text
from holdfast.verify.survey import ask_holdfast
from holdfast.verify.target import NoAnswerError
from holdfast.verify.trial import CHAT, InconclusiveError, SkippedError, Trial
from holdfast.verify.vitals import read_vitals

_OK = 200
_SERVER_ERROR = 500
_KINDS = {True: "chat.completion.chunk", False: "text_completion"}
"""By whether it is a chat."""
_MIN_EVENTS = 8
"""With text: a client that has no time may read fewer at once three times."""
_LONG_CHARACTERS = 48
"""No server that writes a few tokens at a time has this much text in its first event."""
_EARLY_SHARE = 1 / 3
"""Of the events with text: as many at least come before the last arrival."""
_TRIES = 3
LONG_PROMPT = "Count from one to one thousand in words: one, two, three, four,"
"""It takes many tokens to answer."""
_LONG_TOKENS = 512
_ENDLESS_TOKENS = 4096
"""With `ignore_eos`: a small model on a CPU also takes several seconds for them."""
_TIMED_TOKENS = 32
"""These tell how long all of them take."""
_LEAVING = 4
"""Clients."""
_STARTED_BYTES = 256
_FREED_SECONDS = 30.0
_GAUGED_SECONDS = 60.0
"""For other servers: SGLang may update its gauges only after it has been idle for 30 s."""
_EARLY_END_SHARE = 2 / 3
"""Of the time that an answer takes: requests that end by then did not end by themselves."""
_TELLING_SECONDS = 1.0
"""A busy client may find requests ended as late as this, though the server has ended them."""
_TELLING_OTHERS_SECONDS = 5.0
"""SGLang ends a request 2 s after its client has left."""
_LAG_SECONDS = 25.0
"""A gauge that falls after more may be one that SGLang updates late."""
_LOST_COUNT = "the server did not answer how many requests it has"
_UNCOUNTED = (
    "the server does not report how many requests it has, so the check saw only that it answers "
    "after its clients left, and not that their requests ended"
)
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class _Wait:
    """What came of the requests whose clients left."""

    ran_seconds: float
    """They were last seen to run this long after their clients had left."""
    waited_seconds: float
    is_freed: bool
    has_others: bool
    """Whether other clients also had requests."""


async def events(trial: Trial) -> None:
    """Frames, order, ids, ends and usage of the events."""
    for path, body in each(trial, PROMPT, max_tokens=12):
        stream = await trial.stream(path, body)
        is_sse = stream.content_type.startswith("text/event-stream")
        trial.require(is_sse, f"its type is {stream.content_type!r}", stream)
        for fault in stream.frames.faults:
            trial.blame(fault, stream)
        with trial.demanding_form(stream):
            _require_order(trial, stream, is_chat=path == CHAT)
        _count_empty(trial, stream, path)


def _require_order(trial: Trial, stream: StreamedAnswer, *, is_chat: bool) -> None:
    documents = stream.documents
    for name in ("id", "model", "object"):
        found = {dig(document, name, kind=str) for document in documents}
        trial.require(len(found) == 1, f"its events have {len(found)} values of {name!r}", stream)
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
    await judge_each(trial, _judge_pace, PROMPT, max_tokens=32)


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


async def client_leaves(trial: Trial) -> None:
    """What a client no longer waits for is not worked on, and does not hinder others."""
    is_vllm = trial.server.is_vllm
    most = _ENDLESS_TOKENS if is_vllm else _LONG_TOKENS
    tokens = min(most, (trial.server.max_model_len or most) // 2)
    options = {"ignore_eos": True} if is_vllm else {}
    await judge_each(trial, _judge_leaving, LONG_PROMPT, max_tokens=tokens, **options)


async def _judge_leaving(trial: Trial, path: str, body: dict[str, Any]) -> None:
    before = await _requests_before(trial)
    would_take_seconds = 0.0
    if before is not None:
        would_take_seconds = await _whole_seconds(trial, path, body)
    for _ in range(_LEAVING):
        status = await trial.leave(path, body, after_bytes=_STARTED_BYTES)
        if status != _OK:
            raise InconclusiveError(f"a stream was answered {status}, so no client left one")
    left_at_seconds = time.monotonic()
    await trial.post(path, {**body, "max_tokens": 1})
    if before is None:
        if not trial.warnings:  # once is enough for both APIs
            trial.warn(_UNCOUNTED)
        return
    wait = await _wait_until_freed(trial, before, left_at_seconds)
    _judge_wait(trial, path, wait, would_take_seconds)


async def _whole_seconds(trial: Trial, path: str, body: dict[str, Any]) -> float:
    """How long the answer that clients leave would take, from its first event to its last.

    The rest of an answer that no end of a text ends takes as long as its beginning, token by token.
    """
    tokens = body["max_tokens"]
    timed_tokens = min(_TIMED_TOKENS, tokens) if "ignore_eos" in body else tokens
    stream = await trial.stream(path, {**body, "max_tokens": timed_tokens})
    times = [event.at_seconds for event in stream.frames.events]
    return (times[-1] - times[0]) * tokens / timed_tokens if times else 0.0


async def _wait_until_freed(trial: Trial, before: float, left_at_seconds: float) -> _Wait:
    """Wait until the server has no more requests than before, or for too long."""
    limit_seconds = _FREED_SECONDS if trial.server.holdfast else _GAUGED_SECONDS
    ran_seconds = most = 0.0
    while True:
        now = await _requests_now(trial)
        waited_seconds = time.monotonic() - left_at_seconds
        is_freed = now is not None and now <= before
        if now is not None and not is_freed:
            ran_seconds, most = waited_seconds, max(most, now)
        if is_freed or waited_seconds > limit_seconds:
            if now is None:
                raise InconclusiveError(_LOST_COUNT)
            return _Wait(ran_seconds, waited_seconds, is_freed, bool(before) or most > _LEAVING)
        await asyncio.sleep(_POLL_SECONDS)


def _judge_wait(trial: Trial, path: str, wait: _Wait, would_take_seconds: float) -> None:
    if wait.is_freed:
        trial.measure(f"freed after, {path}", wait.waited_seconds, "s")
        if wait.waited_seconds < _EARLY_END_SHARE * would_take_seconds:
            return
    is_vllm = trial.server.is_vllm
    is_long = would_take_seconds >= (_TELLING_SECONDS if is_vllm else _TELLING_OTHERS_SECONDS)
    may_lag = not is_vllm and wait.ran_seconds > _LAG_SECONDS
    is_late = wait.ran_seconds >= _EARLY_END_SHARE * would_take_seconds
    is_leak = not wait.is_freed or (is_long and is_late and not may_lag)
    if is_leak and wait.has_others:
        raise InconclusiveError("other clients also have requests in the engine")
    would_end = f"would have ended by themselves after about {would_take_seconds:.1f} s"
    if not wait.is_freed:
        said = f"requests still run {wait.waited_seconds:.0f} s after their clients left"
        trial.blame(f"{path}: {said}")
    elif is_leak:
        said = f"requests ran for {wait.ran_seconds:.1f} s after their clients left"
        trial.blame(f"{path}: {said}, and {would_end}")
    else:
        said = f"requests had ended {wait.waited_seconds:.1f} s after their clients left"
        unknown = "so the check does not know whether the server ended them"
        trial.warn(f"{path}: {said}, and {would_end}, {unknown}")


async def _requests_before(trial: Trial) -> float | None:
    """How many requests the server has before clients leave; None if it never says.

    Raises:
        InconclusiveError: it does not say now.
    """
    try:
        before = await _requests(trial)
    except NoAnswerError as error:
        raise InconclusiveError(f"{_LOST_COUNT}: {error}") from None
    if before is None and trial.server.holdfast is not None:
        raise InconclusiveError(_LOST_COUNT)
    return before


async def _requests_now(trial: Trial) -> float | None:
    """How many requests the server says that it has; None if it does not say now."""
    try:
        return await _requests(trial)
    except NoAnswerError:
        return None


async def _requests(trial: Trial) -> float | None:
    """How many requests the server says that it has; None if what it answers does not say it.

    Raises:
        NoAnswerError: it does not answer, or not now.
        InconclusiveError: it lets no request in.
    """
    if trial.server.holdfast is not None:
        facts = await ask_holdfast(trial.target)
        return facts.running if facts else None
    request = Request("GET", "/metrics")
    answer = await trial.admitted(partial(trial.target.ask, request), _FREED_SECONDS)
    if answer.status >= _SERVER_ERROR and not is_absent(answer.status):
        raise NoAnswerError(request, f"it answered {answer.status}")
    return read_vitals(answer.text, is_holdfast=False).requests if answer.status == _OK else None


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
    Check(
        "client_leaves",
        "wire",
        client_leaves,
        "Clients that disconnect during a stream do not affect others, and free the engine.",
    ),
)
