"""Does a client that disconnects free the engine?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.verify.answers import is_absent
from holdfast.verify.check import Check
from holdfast.verify.checks.asking import judge_each
from holdfast.verify.records import Request
from holdfast.verify.survey import ask_holdfast
from holdfast.verify.target import NoAnswerError
from holdfast.verify.trial import InconclusiveError, Trial
from holdfast.verify.vitals import Vitals, read_vitals

_OK = 200
_SERVER_ERROR = 500
_SGLANG_OWNER = "sglang"
"""`owned_by` of every model that SGLang serves."""
LONG_PROMPT = "Count from one to one thousand in words: one, two, three, four,"
"""It takes many tokens to answer."""
_LONG_TOKENS = 512
_ENDLESS_TOKENS = 4096
"""With `ignore_eos`: a small model on a CPU also takes several seconds for them."""
_TIMED_TOKENS = (32, 256)
"""These tell how long all of them take. The second count is for servers that write the first in
less than a second: a pause of the machine would be a large part of that."""
_TIMED_SECONDS = 1.0
_LEAVING = 4
"""Clients."""
_STARTED_BYTES = 256
_FREED_SECONDS = 30.0
_GAUGED_SECONDS = 60.0
"""The wait for other servers: SGLang may update its gauges only after it has been idle for 30 s."""
_ABORTED_SECONDS = 5.0
"""vLLM ends a request at its next step, however long the answer would take."""
_EARLY_END_SHARE = 2 / 3
"""The share of an answer's time: requests that end by then did not end by themselves."""
_SETTLED_SECONDS = 600.0
"""The longest wait for requests of clients that left: both APIs have to fit into the deadline."""
_TELLING_SECONDS = 1.0
"""A busy client may find requests ended as late as this, though the server has ended them."""
_TELLING_OTHERS_SECONDS = 5.0
"""SGLang ends a request 2 s after its client has left."""
_REFRESHED_FROM_SECONDS = 5.0
"""A gauge of SGLang keeps its value until a request begins, which is of use only after the 2 s."""
_REFRESHED_EACH_SECONDS = 1.0
_LOST_COUNT = "the server did not answer how many requests it has"
_UNCOUNTED = (
    "the server does not report how many requests it has, so the check saw only that it answers "
    "after its clients left, and not that their requests ended"
)
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class _Pace:
    """How fast the server writes the answer that clients leave."""

    first_seconds: float
    """The time until its first event: no step of the engine takes longer for these requests."""
    whole_seconds: float
    """The time from its first event to its last."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """What came of the requests whose clients left."""

    ran_seconds: float
    """They certainly ran this long after their clients had left."""
    waited_seconds: float
    is_freed: bool
    has_others: bool
    """Whether other clients also had requests."""
    may_lag: bool
    """Whether a gauge may be that of an engine to which none of the later requests went."""


async def client_leaves(trial: Trial) -> None:
    """What a client no longer waits for is not worked on, and does not hinder others."""
    is_endless = trial.server.is_vllm or trial.server.owner == _SGLANG_OWNER
    longest = trial.server.max_model_len
    most = _ENDLESS_TOKENS if is_endless and longest else _LONG_TOKENS
    tokens = min(most, longest // 2) if longest else most
    options = {"ignore_eos": True} if is_endless else {}
    await judge_each(trial, _judge_leaving, LONG_PROMPT, max_tokens=tokens, **options)


async def _judge_leaving(trial: Trial, path: str, body: dict[str, Any]) -> None:
    ask_for_one = partial(trial.post, path, {**body, "max_tokens": 1})
    before = await _requests_before(trial)
    if before is None:
        await _leave(trial, path, body)
        await ask_for_one()
        if not trial.warnings:  # once is enough for both APIs
            trial.warn(_UNCOUNTED)
        return
    pace = await _measured_pace(trial, path, body)
    fresh = None if trial.server.is_vllm else await _fresh_requests(trial, ask_for_one)
    before = before if fresh is None else fresh
    await _leave(trial, path, body)
    wait = await _wait_until_freed(trial, before, 0.0, ask_for_one)
    if _fault_in(wait, pace, trial):
        # Another client's request may have begun meanwhile; a server that goes on does it again.
        again = await _settled_requests(trial, before, pace, ask_for_one)
        own = again - before if again <= before + _LEAVING else 0.0
        await _leave(trial, path, body)
        wait = await _wait_until_freed(trial, again, own, ask_for_one)
    _judge_wait(trial, path, wait, pace)
    await ask_for_one()


async def _settled_requests(
    trial: Trial, before: float, pace: _Pace, refresh: Callable[[], Awaitable[object]]
) -> float:
    """How many requests there are once those whose clients left can have ended by themselves.

    One that ends only while others are judged would hide that one of those goes on.

    Raises:
        InconclusiveError: the server does not say how many there are.
    """
    limit_seconds = min(_LEAVING * pace.whole_seconds, _SETTLED_SECONDS)
    began_seconds = time.monotonic()
    while True:
        waited_seconds = time.monotonic() - began_seconds
        now = await _fresh_requests(trial, refresh)
        if now is not None and now <= before:
            return now
        if waited_seconds > limit_seconds:
            if now is None:
                raise InconclusiveError(_LOST_COUNT)
            return now
        await asyncio.sleep(_POLL_SECONDS)


async def _fresh_requests(trial: Trial, refresh: Callable[[], Awaitable[object]]) -> float | None:
    """How many requests the server has now; None if it does not say."""
    if not trial.server.is_vllm:
        await refresh()
        await asyncio.sleep(_POLL_SECONDS)
    return (await _told_now(trial)).requests


async def _leave(trial: Trial, path: str, body: dict[str, Any]) -> None:
    for _ in range(_LEAVING):
        status = await trial.leave(path, body, after_bytes=_STARTED_BYTES)
        if status != _OK:
            raise InconclusiveError(f"a stream got {status}, so no client left one")


async def _measured_pace(trial: Trial, path: str, body: dict[str, Any]) -> _Pace:
    """How long the answer that clients leave would take.

    The rest of an answer that no end of a text ends takes as long as its beginning, token by token.
    """
    if "ignore_eos" not in body:
        return await _timed(trial, path, body, body["max_tokens"])
    few, many = (min(count, body["max_tokens"]) for count in _TIMED_TOKENS)
    pace = await _timed(trial, path, body, few)
    is_told = pace.whole_seconds * few / body["max_tokens"] >= _TIMED_SECONDS
    return pace if is_told else await _timed(trial, path, body, many)


async def _timed(trial: Trial, path: str, body: dict[str, Any], tokens: int) -> _Pace:
    stream = await trial.stream(path, {**body, "max_tokens": tokens})
    times = [event.at_seconds for event in stream.frames.events] or [0.0]
    return _Pace(times[0], (times[-1] - times[0]) * body["max_tokens"] / tokens)


async def _wait_until_freed(
    trial: Trial,
    before: float,
    own: float,
    refresh: Callable[[], Awaitable[object]],
) -> _Wait:
    """Wait until the server has no more requests than before, or for too long.

    The clients have just left. `own` of the requests before may be those of clients that left then.

    vLLM counts at each step, so it is asked for nothing else: where it has room for one request, an
    answer would come only after those whose clients left.
    """
    limit_seconds = _FREED_SECONDS if trial.server.holdfast else _GAUGED_SECONDS
    left_at_seconds = time.monotonic()
    refreshed_seconds = ran_seconds = most = 0.0
    refreshes_at_seconds = _REFRESHED_FROM_SECONDS
    while True:
        asked_seconds = time.monotonic() - left_at_seconds
        told = await _told_now(trial)
        waited_seconds = time.monotonic() - left_at_seconds
        now = told.requests
        is_freed = now is not None and now <= before
        if now is not None and not is_freed:
            ran_seconds = asked_seconds if trial.server.is_vllm else refreshed_seconds
            most = max(most, now)
        if is_freed or waited_seconds > limit_seconds:
            if now is None:
                raise InconclusiveError(_LOST_COUNT)
            has_others = before > own or most > before + _LEAVING
            may_lag = told.engines > 1 and not trial.server.is_vllm
            return _Wait(ran_seconds, waited_seconds, is_freed, has_others, may_lag)
        if not trial.server.is_vllm and asked_seconds >= refreshes_at_seconds:
            refreshed_seconds = time.monotonic() - left_at_seconds
            await refresh()
            refreshes_at_seconds = refreshed_seconds + _REFRESHED_EACH_SECONDS
        await asyncio.sleep(_POLL_SECONDS)


def _judge_wait(trial: Trial, path: str, wait: _Wait, pace: _Pace) -> None:
    if wait.is_freed:
        trial.measure(f"freed after, {path}", wait.waited_seconds, "s")
    if fault := _fault_in(wait, pace, trial):
        trial.blame(f"{path}: {fault}")
    elif not _is_early(wait, pace):
        said = f"requests had ended {wait.waited_seconds:.1f} s after their clients left"
        unknown = "so the check does not know whether the server ended them"
        trial.warn(f"{path}: {said}, and {_would_end(pace)}, {unknown}")


def _fault_in(wait: _Wait, pace: _Pace, trial: Trial) -> str:
    """What the server is to be blamed for; empty if for nothing.

    Raises:
        InconclusiveError: it may be the requests of other clients.
    """
    would_take_seconds = pace.whole_seconds
    is_vllm = trial.server.is_vllm
    is_overdue = is_vllm and wait.ran_seconds > _ABORTED_SECONDS + pace.first_seconds
    if wait.is_freed and _is_early(wait, pace) and not is_overdue:
        return ""
    is_long = would_take_seconds >= (_TELLING_SECONDS if is_vllm else _TELLING_OTHERS_SECONDS)
    is_whole = wait.ran_seconds >= _EARLY_END_SHARE * would_take_seconds
    is_written = is_long and is_whole and not wait.may_lag
    if wait.has_others and (not wait.is_freed or is_written or is_overdue):
        raise InconclusiveError("other clients also have requests in the engine")
    ran = f"requests ran for {wait.ran_seconds:.1f} s after their clients left"
    if not wait.is_freed:
        return f"requests still run {wait.waited_seconds:.0f} s after their clients left"
    if is_written:
        return f"{ran}, and {_would_end(pace)}"
    return f"{ran}, though the engine can end them at its next step" if is_overdue else ""


def _is_early(wait: _Wait, pace: _Pace) -> bool:
    return wait.waited_seconds < _EARLY_END_SHARE * pace.whole_seconds


def _would_end(pace: _Pace) -> str:
    return f"would have ended by themselves after about {pace.whole_seconds:.1f} s"


async def _requests_before(trial: Trial) -> float | None:
    """How many requests the server has before clients leave; None if it never says.

    Raises:
        InconclusiveError: it does not say now.
    """
    try:
        before = (await _told(trial)).requests
    except NoAnswerError as error:
        raise InconclusiveError(f"{_LOST_COUNT}: {error}") from None
    if before is None and trial.server.holdfast is not None:
        raise InconclusiveError(_LOST_COUNT)
    return before


async def _told_now(trial: Trial) -> Vitals:
    """What the server says of its requests; nothing if it does not answer now."""
    try:
        return await _told(trial)
    except NoAnswerError:
        return Vitals()


async def _told(trial: Trial) -> Vitals:
    """What the server says of its requests.

    Raises:
        NoAnswerError: it does not answer, or not now.
        InconclusiveError: it lets no request in.
    """
    if trial.server.holdfast is not None:
        facts = await ask_holdfast(trial.target)
        return Vitals(requests=facts.running if facts else None)
    request = Request("GET", "/metrics")
    answer = await trial.admitted(partial(trial.target.ask, request), _FREED_SECONDS)
    if answer.status >= _SERVER_ERROR and not is_absent(answer.status):
        raise NoAnswerError(request, f"it answered {answer.status}")
    return read_vitals(answer.text, is_holdfast=False) if answer.status == _OK else Vitals()


CHECKS = (
    Check(
        "client_leaves",
        "wire",
        client_leaves,
        "Clients that disconnect during a stream do not affect others, and free the engine.",
    ),
)
