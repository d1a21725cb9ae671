"""`wire.client_leaves` on servers that end requests late, or count them late, or not at all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from double_defects import Defect
from holdfast.verify.checks import wire
from holdfast.verify.checks.wire import leaving
from holdfast.verify.records import CheckResult, CheckStatus
from openai_double import Body, OpenAIDouble
from verified import results

LEAVES = [check for check in wire.CHECKS if check.name == "client_leaves"]
MAKES = ("Holdfast", "vLLM")
WRITTEN: Defect = "streams that are written to their end without their client"
FEW_TIMED_TOKENS = (16, 32)
TOKEN_SECONDS = 0.012
"""Then the 256 tokens that half of the double's context has room for take three seconds."""


@pytest.fixture
def _few_timed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which a wrong estimate of the time of an answer is harmless."""
    monkeypatch.setattr(leaving, "_TIMED_TOKENS", FEW_TIMED_TOKENS)


class Completing(OpenAIDouble):
    """Has no chats, and takes a while for a token."""

    def __init__(self, defect: Defect | Literal[""] = "") -> None:
        super().__init__(defect)
        self.without("/v1/chat/completions")
        self.token_seconds = TOKEN_SECONDS
        self.streams = 0

    async def _completion(self, request: Request) -> Response:
        self.streams += "stream" in await request.json()
        return await super()._completion(request)


def left(app: OpenAIDouble) -> CheckResult:
    (made,) = results(app, LEAVES).values()
    return made


class Accelerating(Completing):
    """Is slow in its first two streams, and so looks as if all of them took longer than they do."""

    async def _completion(self, request: Request) -> Response:
        answer = await super()._completion(request)
        self.token_seconds = TOKEN_SECONDS if self.streams <= 2 else TOKEN_SECONDS / 3
        return answer


@pytest.mark.usefixtures("_few_timed_tokens")
@pytest.mark.parametrize(
    "app", [Accelerating(WRITTEN), Accelerating(WRITTEN).owned_by("vllm")], ids=MAKES
)
def test_a_wrong_estimate_hides_no_requests_that_go_on(
    app: OpenAIDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM ends requests at once, however long their answers would take."""
    monkeypatch.setattr(leaving, "_ABORTED_SECONDS", 0.4)
    made = left(app)
    assert made.status is CheckStatus.FAILED, made.reason
    assert made.reason.endswith("though the engine can end them at its next step")


class Lingering(Completing):
    """Ends a request some time after its client has left."""

    lingering_seconds = 0.4
    lingering_each = 1
    """Of this many requests whose clients have left, one ends late."""
    first_seconds = 0.0
    """Until a stream begins."""
    _abandoned = 0

    async def _events(self, parts: Iterator[Body], **options: bool) -> AsyncIterator[bytes]:
        await asyncio.sleep(self.first_seconds)
        is_whole = False
        try:
            async for event in super()._events(parts, **options):
                yield event
            is_whole = True
        finally:
            self._abandoned += not is_whole
            if not is_whole and self._abandoned % self.lingering_each == 0:
                self._running += 1
                asyncio.get_running_loop().call_later(self.lingering_seconds, self._end)

    def _end(self) -> None:
        self._running -= 1


@pytest.mark.usefixtures("_few_timed_tokens")
@pytest.mark.parametrize("is_slow", [True, False])
def test_a_step_of_the_engine_may_take_long(
    *, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ends after it; how long one takes is seen from the first token."""
    monkeypatch.setattr(leaving, "_ABORTED_SECONDS", 0.1)
    app = Lingering()
    app.lingering_seconds, app.first_seconds = 0.6, 0.8 * is_slow
    made = left(app)
    assert made.status is (CheckStatus.PASSED if is_slow else CheckStatus.FAILED), made.reason


class Visited(Completing):
    """Gets a request of another client while clients leave, once; it may last."""

    def __init__(self, visitor_seconds: float, *, is_lasting: bool = False) -> None:
        super().__init__()
        self._visitor_seconds = visitor_seconds
        self._is_lasting = is_lasting
        self._visits = 0

    async def _completion(self, request: Request) -> Response:
        answer = await super()._completion(request)
        if self.streams == 3 and not self._visits:
            self._visits = 1
            self._running += 1
            if not self._is_lasting:
                asyncio.get_running_loop().call_later(self._visitor_seconds, self._leave)
        return answer

    def _leave(self) -> None:
        self._running -= 1


@pytest.mark.usefixtures("_few_timed_tokens")
@pytest.mark.parametrize("is_lasting", [True, False])
def test_another_clients_request_is_not_blamed(
    *, is_lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began after the count, and runs on when the clients have left, or even for long."""
    monkeypatch.setattr(leaving, "_ABORTED_SECONDS", 0.4)
    monkeypatch.setattr(leaving, "_FREED_SECONDS", 2.0)
    monkeypatch.setattr(leaving, "_SETTLED_SECONDS", 0.5)
    made = left(Visited(1.5, is_lasting=is_lasting))
    assert made.status is CheckStatus.PASSED, made.reason


class NeverFreeing(Lingering):
    """Goes on with each request forever."""

    lingering_seconds = 3600.0


@pytest.mark.usefixtures("_few_timed_tokens")
@pytest.mark.parametrize("lingering_each", [1, 4])
def test_requests_that_never_end_are_blamed(
    lingering_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first attempt are not another client's in the second one."""
    monkeypatch.setattr(leaving, "_FREED_SECONDS", 0.5)
    monkeypatch.setattr(leaving, "_SETTLED_SECONDS", 0.5)
    app = NeverFreeing()
    app.lingering_each = lingering_each
    made = left(app)
    assert made.status is CheckStatus.FAILED, made.reason
    assert "requests still run" in made.reason


class SingleSlot(Completing):
    """Computes one request at a time, so one that comes later waits for those before."""

    async def _completion(self, request: Request) -> Response:
        if "stream" not in await request.json():
            while self._running:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        return await super()._completion(request)


def test_requests_that_go_on_are_seen_where_others_wait_for_them() -> None:
    """They are counted before anything else is asked for."""
    made = left(SingleSlot(WRITTEN))
    assert made.status is CheckStatus.FAILED, made.reason


class Queueing(Completing):
    """Writes one stream at a time."""

    def __init__(self, defect: Defect) -> None:
        super().__init__(defect)
        self.token_seconds = TOKEN_SECONDS / 3

    async def _events(self, parts: Iterator[Body], **options: bool) -> AsyncIterator[bytes]:
        while self._running:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        async for event in super()._events(parts, **options):
            yield event


@pytest.mark.usefixtures("_few_timed_tokens")
@pytest.mark.parametrize(
    ("app", "limit_seconds"),
    [(Queueing(WRITTEN), 0.3), (Completing(WRITTEN).owned_by("vllm"), 1.5)],
    ids=("one slot", "vLLM"),
)
def test_answers_that_outlast_the_wait_hide_none_that_come_later(
    app: OpenAIDouble, limit_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end by themselves while clients leave once more."""
    monkeypatch.setattr(leaving, "_FREED_SECONDS", limit_seconds)
    monkeypatch.setattr(leaving, "_GAUGED_SECONDS", limit_seconds)
    made = left(app)
    assert made.status is CheckStatus.FAILED, made.reason
    assert "requests still run" in made.reason


class HoldingGauges(Lingering):
    """Keeps the value of its gauges until a request begins, as SGLang does."""

    def __init__(self, defect: Defect | Literal[""] = "") -> None:
        super().__init__(defect)
        self.owned_by("sglang")
        self.gauges = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
        self._held = 12
        if defect:  # it goes on instead
            self.lingering_seconds = 0.0

    async def _completion(self, request: Request) -> Response:
        self._held = self._running
        return await super()._completion(request)

    async def _metrics(self, request: Request) -> Response:
        running, self._running = self._running, self._held
        page = await super()._metrics(request)
        self._running = running
        return page


class Ranked(HoldingGauges):
    """Has a second engine, whose gauge no later request refreshes."""

    async def _completion(self, request: Request) -> Response:
        answer = await super()._completion(request)
        if self.streams == 2:
            self._idle_at_seconds = time.monotonic() + 256 * TOKEN_SECONDS + 2.7
        return answer

    async def _metrics(self, request: Request) -> Response:
        page = bytes((await super()._metrics(request)).body).decode()
        is_held = self.streams > 2 and time.monotonic() < self._idle_at_seconds
        row = f'sglang:num_running_reqs{{dp_rank="1"}} {float(is_held)}\n'
        return PlainTextResponse(page + row)


@pytest.mark.parametrize(
    ("app", "status"),
    [
        (HoldingGauges(), CheckStatus.PASSED),
        (HoldingGauges(WRITTEN), CheckStatus.FAILED),
        (Ranked(), CheckStatus.WARNED),
    ],
    ids=("healthy", "written to the end", "several engines"),
)
def test_a_gauge_that_keeps_its_value_is_refreshed(
    app: OpenAIDouble, status: CheckStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a request for one token, which may not reach the engine whose gauge it is."""
    monkeypatch.setattr(leaving, "_REFRESHED_FROM_SECONDS", 0.6)
    monkeypatch.setattr(leaving, "_REFRESHED_EACH_SECONDS", 0.3)
    monkeypatch.setattr(leaving, "_TELLING_OTHERS_SECONDS", 1.0)
    if status is CheckStatus.PASSED:
        monkeypatch.setattr(leaving, "_TIMED_TOKENS", FEW_TIMED_TOKENS)
    made = left(app)
    assert made.status is status, made.reason


class Unsized(Completing):
    """Does not tell its context, which has room for 700 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token_seconds = 0.004

    async def _models(self, request: Request) -> Response:
        listed = json.loads(bytes((await super()._models(request)).body))
        listed["data"][0]["max_model_len"] = None
        return JSONResponse(listed)

    async def _completion(self, request: Request) -> Response:
        if (await request.json()).get("max_tokens", 0) > 700:
            raise HTTPException(400, "max_tokens is too large")
        return await super()._completion(request)


@pytest.mark.usefixtures("_few_timed_tokens")
@pytest.mark.parametrize("owner", ["vllm", "sglang", "openai"])
def test_a_context_that_is_not_told_may_be_small(owner: str) -> None:
    """A router in front of vLLM does not tell it."""
    app = Unsized()
    app.owned_by(owner)
    assert left(app).status is CheckStatus.PASSED


class Paused(Completing):
    """Has the loop stand still in its first stream for longer than a server may take to notice."""

    pauses = 0
    """Of all servers, as those of a machine are."""

    async def _completion(self, request: Request) -> Response:
        answer = await super()._completion(request)
        if self.streams == 3 and not Paused.pauses:
            Paused.pauses += 1
            self.defect = "streams that go on without their client"
            time.sleep(0.5)  # noqa: ASYNC251 - the loop is to stand still
        return answer


def test_times_are_judged_again_after_a_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine or of this process; the server then knows nothing of the first time."""
    monkeypatch.setattr(leaving, "_TIMED_TOKENS", FEW_TIMED_TOKENS)
    monkeypatch.setattr(leaving, "_FREED_SECONDS", 0.5)
    monkeypatch.setattr(leaving, "_SETTLED_SECONDS", 0.5)
    monkeypatch.setattr(Paused, "pauses", 0)
    app = Paused()
    made = left(app)
    assert made.status is CheckStatus.PASSED, made.reason
    assert (Paused.pauses, app.defect) == (1, "")
