"""The group `wire`: each defect of a server is found by the check that is meant for it, alone."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from double_defects import Defect
from double_limits import AlternatingDouble
from double_model import Generated, stops_of
from double_typed import framed
from holdfast.verify.check import Check
from holdfast.verify.checks import wire
from holdfast.verify.checks.wire import leaving
from holdfast.verify.records import CheckResult, CheckStatus
from holdfast.verify.report import as_json
from openai_double import MODEL, Body, OpenAIDouble
from sample_reports import report
from verified import not_passed, results

OWN = [check for check in wire.CHECKS if not check.packages]
"""Other people's tools see the same defects again."""
TWIN = [check for check in OWN if check.name == "stream_twin"]
LEAVES = [check for check in OWN if check.name == "client_leaves"]
EVENTS = [check for check in OWN if check.name == "events"]
CHAT_FORM = [check for check in OWN if check.name == "chat"]
FORMS = [check for check in OWN if check.name in ("chat", "completion")]
CHOICES = [check for check in OWN if check.name == "choices"]
OWN_ANSWERS = [check for check in OWN if check.name == "own_answers"]
LOGPROBS = [check for check in OWN if check.name == "logprobs"]
PROMPT_TOKENS = [check for check in OWN if check.name == "prompt_tokens"]
REFUSALS = [check for check in OWN if check.name == "refusals"]
INCREMENTAL = [check for check in OWN if check.name == "incremental"]
STOP = [check for check in OWN if check.name == "stop"]
ROUTES = [check for check in OWN if check.name == "other_routes"]
TYPED = [check for check in OWN if check.name in ("responses", "messages")]

FOUND_BY: dict[Defect, str] = {
    "a model listed twice": "models",
    "a model without its time": "models",
    "chats without a role": "chat",
    "completions that call themselves chats": "completion",
    "choices all numbered 0": "choices",
    "choices of chats all numbered 0": "choices",
    "a logprob for all tokens but one": "logprobs",
    "a logprob that is not a number": "logprobs",
    "a logprob of a chat that is not a number": "logprobs",
    "a greedy token that is not the likeliest": "logprobs",
    "completion_tokens off by one": "usage",
    "total_tokens off by one": "usage",
    "streamed completion_tokens off by one": "usage",
    "prompt_tokens off by one": "prompt_tokens",
    "streamed prompt_tokens off by one": "prompt_tokens",
    "cut answers that end by stop": "length",
    "a stop text that is kept": "stop",
    "a stop text that chats keep": "stop",
    "a stop text that leaks into streams": "stop",
    "streams that lose what stands before a stop text": "stop",
    "an event split wrong": "events",
    "an event without its empty line": "events",
    "no [DONE]": "events",
    "bytes that are not UTF-8": "events",
    "ids that change": "events",
    "two finish reasons": "events",
    "text behind the finish reason": "events",
    "usage in the middle": "events",
    "usage nobody asked for": "unasked_usage",
    "all events at the end": "incremental",
    "all events but the first at the end": "incremental",
    "all events of a chat at the end": "incremental",
    "all text of a chat in one event": "incremental",
    "streams that go on without their client": "client_leaves",
    "chats that go on without their client": "client_leaves",
    "a stream that drops a token": "stream_twin",
    "a stream that breaks characters": "stream_twin",
    "answers mixed up": "own_answers",
    "wrong requests are 500": "refusals",
    "refusals without a form": "refusals",
    "max_tokens in words taken": "refusals",
    "responses are 500": "responses",
    "response events before their item": "responses",
    "streamed responses that drop a token": "responses",
    "streamed responses that end with another text": "responses",
    "streamed responses without an end": "responses",
    "streamed responses without usage": "responses",
    "messages from the user": "messages",
    "streamed messages that drop a token": "messages",
    "streamed messages whose block stays open": "messages",
    "streamed messages without an end": "messages",
    "streamed messages without names of events": "messages",
    "streamed messages without usage": "messages",
    "embeddings are 500": "other_routes",
}


def assert_fails(app: OpenAIDouble, checks: Sequence[Check], reason: str) -> None:
    """The one check fails, for a reason that begins so."""
    (made,) = results(app, checks).values()
    assert made.status is CheckStatus.FAILED
    assert made.reason.startswith(reason)


def test_a_server_that_is_well_passes() -> None:
    """Nothing is blamed, warned of or skipped."""
    made = results(OpenAIDouble(), OWN)
    assert {name: (one.status, one.reason) for name, one in made.items() if one.reason} == {}


@pytest.mark.parametrize("defect", FOUND_BY)
def test_a_defect_is_found_by_its_check(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other one fails; those that need what is broken are inconclusive."""
    monkeypatch.setattr(leaving, "_FREED_SECONDS", 0.5)
    monkeypatch.setattr(leaving, "_TIMED_TOKENS", (16, 32))
    monkeypatch.setattr(leaving, "_SETTLED_SECONDS", 0.5)
    made = results(OpenAIDouble(defect), OWN)
    failed = {name for name, status in not_passed(made).items() if status is CheckStatus.FAILED}
    assert failed == {f"wire.{FOUND_BY[defect]}"}
    warned = {name for name, status in not_passed(made).items() if status is CheckStatus.WARNED}
    # Nobody can leave in the middle of a stream that comes whole.
    is_whole = defect in ("all events at the end", "all events of a chat at the end")
    assert warned == ({"wire.client_leaves"} if is_whole else set())


def test_a_server_without_a_route_is_not_blamed() -> None:
    """What it does not offer is skipped, with the reason."""
    app = OpenAIDouble()
    gone = ("/v1/completions", "/tokenize", "/openapi.json", "/statusz")
    app.router.routes = [one for one in app.router.routes if getattr(one, "path", "") not in gone]
    made = results(app, OWN)
    skipped = {name for name, status in not_passed(made).items() if status is CheckStatus.SKIPPED}
    assert skipped == not_passed(made).keys()
    assert {"wire.completion", "wire.prompt_tokens", "wire.responses"} <= skipped
    assert all(made[name].reason for name in skipped)
    assert made["wire.completion"].remedy


class Verbose(OpenAIDouble):
    """Names a reason of megabytes for the end of an answer."""

    def _choice(self, index: int, made: Generated, body: Body, *, is_chat: bool) -> Body:
        choice = super()._choice(index, made, body, is_chat=is_chat)
        return {**choice, "finish_reason": "because " * 1_000_000}


def test_a_finish_reason_of_megabytes_is_not_repeated() -> None:
    """Its beginning is, and how much is left out."""
    made = results(Verbose(), CHAT_FORM)
    assert not_passed(made) == {"wire.chat": CheckStatus.FAILED}
    assert len(json.dumps(as_json.document(report(*made.values())))) < 10_000
    assert made["wire.chat"].reason.endswith("characters left out)")


class Faltering(OpenAIDouble):
    """Loses the last token of the first stream, and of no other."""

    def __init__(self) -> None:
        super().__init__()
        self._has_faltered = False

    def _generate(self, body: Body, prompt: str) -> Generated:
        made = super()._generate(body, prompt)
        if not body.get("stream") or self._has_faltered:
            return made
        self._has_faltered = True
        return replace(made, tokens=made.tokens[:-1])


def test_a_stream_that_differs_once_is_warned_of() -> None:
    """The answers at once were all the same, so it is not the model that cannot decide."""
    (made,) = results(Faltering(), TWIN).values()
    assert made.status is CheckStatus.WARNED
    assert made.reason.endswith("as a stream, content differed in 1 of 2 tries")


class Shared(OpenAIDouble):
    """Has requests of others, and more of them once clients have left."""

    def __init__(self, others: int, later: int = 0, defect: Defect | Literal[""] = "") -> None:
        super().__init__(defect)
        self._running = others
        self._later = later
        self._streams = 0

    async def _completion(self, request: Request) -> Response:
        self._streams += "stream" in await request.json()
        if self._streams == 5:  # the last that a client leaves, after one that is only timed
            self._running += self._later
        return await super()._completion(request)


@pytest.mark.parametrize(
    ("app", "status"),
    [
        (Shared(3), CheckStatus.PASSED),
        (Shared(0, 9), CheckStatus.INCONCLUSIVE),
        (Shared(3, 1), CheckStatus.INCONCLUSIVE),
        (Shared(0, 0, "streams that go on without their client"), CheckStatus.FAILED),
    ],
)
def test_requests_of_others_are_not_blamed(
    app: Shared, status: CheckStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what runs besides them can be what clients left."""
    monkeypatch.setattr(leaving, "_FREED_SECONDS", 0.5)
    monkeypatch.setattr(leaving, "_SETTLED_SECONDS", 0.5)
    (made,) = results(app, LEAVES).values()
    assert made.status is status, made.reason


VLLM = ("vllm:num_requests_running", "vllm:num_requests_waiting")
SGLANG = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
GOES_ON: Defect = "streams that go on without their client"


@pytest.mark.parametrize("gauges", [VLLM, SGLANG], ids=("vLLM", "SGLang"))
@pytest.mark.parametrize(
    ("others", "later", "defect", "status"),
    [
        (0, 0, "", CheckStatus.PASSED),
        (3, 0, "", CheckStatus.PASSED),
        (3, 1, "", CheckStatus.INCONCLUSIVE),
        (0, 0, GOES_ON, CheckStatus.FAILED),
    ],
)
def test_requests_are_counted_on_other_servers(
    others: int,
    later: int,
    defect: Defect | Literal[""],
    status: CheckStatus,
    gauges: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what their metrics tell of requests that run and wait."""
    monkeypatch.setattr(leaving, "_GAUGED_SECONDS", 0.5)
    monkeypatch.setattr(leaving, "_SETTLED_SECONDS", 0.5)
    app = Shared(others, later, defect).without("/statusz")
    app.gauges, app.token_seconds = gauges, 0.01
    (made,) = results(app, LEAVES).values()
    assert made.status is status, made.reason


@pytest.mark.parametrize(
    "app",
    [OpenAIDouble(GOES_ON).without("/statusz", "/metrics"), OpenAIDouble().without("/statusz")],
    ids=("no metrics", "no count"),
)
def test_a_server_that_counts_no_requests_is_warned_of(app: OpenAIDouble) -> None:
    """The check has not seen the end of a request, and says so once."""
    app.gauges = ()
    (made,) = results(app, LEAVES).values()
    assert made.status is CheckStatus.WARNED
    assert made.reason == (
        "the server does not report how many requests it has, so the check saw only that it "
        "answers after its clients left, and not that their requests ended"
    )


WRITTEN: Defect = "streams that are written to their end without their client"


def test_requests_that_end_by_themselves_are_not_freed() -> None:
    """They run for as long as their answers would take if their clients had stayed."""
    app = OpenAIDouble(WRITTEN)
    app.token_seconds = 0.012
    (made,) = results(app, LEAVES).values()
    assert made.status is CheckStatus.FAILED
    assert "s after their clients left, and would have ended by themselves after" in made.reason


def test_an_answer_of_too_little_time_is_warned_of() -> None:
    """Other servers may take a moment to end a request, so its own end does not tell."""
    app = OpenAIDouble(WRITTEN).without("/statusz")
    (made,) = results(app, LEAVES).values()
    assert made.status is CheckStatus.WARNED
    assert "so the check does not know whether the server ended them" in made.reason


class Uncounting(OpenAIDouble):
    """Does not tell some times how many requests it has, the first time after `told` times."""

    def __init__(self, told: int, lost: int, retry_after: str = "") -> None:
        super().__init__(GOES_ON)
        self._told, self._lost, self._retry_after = told, lost, retry_after

    async def _metrics(self, request: Request) -> Response:
        self._told -= 1
        if self._told >= 0 or not self._lost:
            return await super()._metrics(request)
        self._lost -= 1
        if self._retry_after:
            return JSONResponse({}, 429, {"Retry-After": self._retry_after})
        return JSONResponse({}, 503)


@pytest.mark.parametrize(
    ("app", "status"),
    [
        (Uncounting(1, 1), CheckStatus.FAILED),
        (Uncounting(1, 10_000), CheckStatus.INCONCLUSIVE),
        (Uncounting(0, 10_000, "86400"), CheckStatus.INCONCLUSIVE),
        (Uncounting(0, 10_000), CheckStatus.INCONCLUSIVE),
    ],
    ids=("once", "from then on", "at 429", "never"),
)
def test_a_count_that_is_not_told_is_asked_for_again(
    app: Uncounting, status: CheckStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reports it at other times, so the check may not say that it does not."""
    monkeypatch.setattr(leaving, "_GAUGED_SECONDS", 0.7)
    monkeypatch.setattr(leaving, "_SETTLED_SECONDS", 0.5)
    app.without("/statusz", "/v1/chat/completions")
    (made,) = results(app, LEAVES).values()
    assert made.status is status, made.reason
    assert not made.warnings


class Hasty(OpenAIDouble):
    """Sends the first two streams as one part, as they come to a client that has no time."""

    def __init__(self, hasty: int) -> None:
        super().__init__()
        self._hasty = hasty

    async def _events(self, parts: Iterator[Body], **options: bool) -> AsyncIterator[bytes]:
        self._hasty -= 1
        events = super()._events(parts, **options)
        if self._hasty < 0:
            async for event in events:
                yield event
            return
        yield b"".join([event async for event in events])


@pytest.mark.parametrize(("hasty", "status"), [(2, CheckStatus.PASSED), (3, CheckStatus.FAILED)])
def test_a_client_without_time_is_not_blamed_on_the_server(hasty: int, status: CheckStatus) -> None:
    """A stream that is read at once is asked for again, twice."""
    (made,) = results(Hasty(hasty), INCREMENTAL).values()
    assert made.status is status, made.reason


@pytest.mark.parametrize(
    ("short", "status", "judged"),
    [
        ("<assistant>", CheckStatus.PASSED, 1),
        ("four", CheckStatus.SKIPPED, None),
    ],
    ids=("chats", "all"),
)
def test_a_short_answer_shows_no_pace(short: str, status: CheckStatus, judged: int | None) -> None:
    """It is not blamed, and the check is skipped if no API gives a longer one."""
    (made,) = results(OpenAIDouble(known={short: "five, six"}), INCREMENTAL).values()
    assert made.status is status, made.reason
    assert {one.name: one.value for one in made.numbers}.get("APIs judged") == judged


class Thinking(OpenAIDouble):
    """Thinks what it answers, and so meets a stop text before it has answered."""

    def _choice(self, index: int, made: Generated, body: Body, *, is_chat: bool) -> Body:
        choice = super()._choice(index, made, body, is_chat=is_chat)
        if is_chat:
            choice["message"]["reasoning"] = choice["message"]["content"]
            if body.get("stop"):
                choice["message"]["content"] = None
        return choice


def test_a_stop_text_that_ends_thoughts_is_not_judged() -> None:
    """The chat is left out, and the completion still shows what the check looks at."""
    (made,) = results(Thinking(), STOP).values()
    assert made.status is CheckStatus.PASSED, made.reason
    assert {one.name: one.value for one in made.numbers} == {"APIs judged": 1}


class Stopping(OpenAIDouble):
    """Overlooks stop texts of one kind."""

    def __init__(self, overlooks: Callable[[Body, Generated], bool]) -> None:
        super().__init__()
        self._overlooks = overlooks

    def _generate(self, body: Body, prompt: str) -> Generated:
        free = super()._generate({**body, "stop": None}, prompt)
        is_overlooked = body.get("stop") and self._overlooks(body, free)
        return free if is_overlooked else super()._generate(body, prompt)


def _is_across_tokens(body: Body, free: Generated) -> bool:
    return not any(stop in token for stop in stops_of(body) for token in free.tokens)


@pytest.mark.parametrize(
    "overlooks",
    [_is_across_tokens, lambda body, _free: isinstance(body["stop"], str)],
    ids=("across tokens", "not in a list"),
)
def test_a_stop_text_counts_wherever_and_however_it_is_given(
    overlooks: Callable[[Body, Generated], bool],
) -> None:
    """In two tokens, and alone."""
    (made,) = results(Stopping(overlooks), STOP).values()
    assert made.status is CheckStatus.FAILED
    assert "the answer goes on past" in made.reason


class AtOnce(OpenAIDouble):
    """Has all text of a stream in one event."""

    def _of_choice(
        self, index: int, made: Generated, body: Body, *, is_chat: bool
    ) -> Iterator[Body]:
        return super()._of_choice(index, replace(made, tokens=[made.text]), body, is_chat=is_chat)


def test_a_stream_in_one_event_still_shows_a_stop_text() -> None:
    """One from the middle of the answer, which may lie in one token."""
    (made,) = results(AtOnce(), STOP).values()
    assert made.status is CheckStatus.PASSED, made.reason


class Drifting(OpenAIDouble):
    """Never gives the same answer twice, except that of a completion."""

    def _generate(self, body: Body, prompt: str) -> Generated:
        is_chat = "prompt" not in body
        return super()._generate({**body, "temperature": 1.0} if is_chat else body, prompt)


@pytest.mark.parametrize(
    ("defect", "status"),
    [("", CheckStatus.INCONCLUSIVE), ("a stop text that is kept", CheckStatus.FAILED)],
)
def test_an_api_that_cannot_be_judged_hides_no_fault_of_the_other(
    defect: Defect, status: CheckStatus
) -> None:
    """Chats are asked first, and completions all the same."""
    (made,) = results(Drifting(defect), STOP).values()
    assert made.status is status, made.reason


def test_typed_streams_of_another_answer_are_not_judged() -> None:
    """A server that does not decide twice in the same way cannot say the same in a stream."""
    assert set(not_passed(results(Drifting(), TYPED)).values()) == {CheckStatus.INCONCLUSIVE}


class Newer(OpenAIDouble):
    """Has an event of a type that nobody has published in the stream of a message."""

    async def _messages(self, request: Request) -> Response:
        answer = await super()._messages(request)
        if not isinstance(answer, StreamingResponse):
            return answer
        events = [event async for event in answer.body_iterator]
        events.insert(1, b'event: message_note\ndata: {"type": "message_note"}\n\n')
        return StreamingResponse(iter(events), media_type=answer.media_type)


def test_an_event_of_an_unknown_type_is_warned_of() -> None:
    """Clients pass over it."""
    made = results(Newer(), TYPED)
    assert not_passed(made) == {"wire.messages": CheckStatus.WARNED}
    assert made["wire.messages"].reason == "it has events of unknown types: message_note"


class Limiting(OpenAIDouble):
    """Answers what is wrong with 429."""

    async def _refused(self, request: Request, error: Exception) -> Response:
        refusal = await super()._refused(request, error)
        said = {"error": {"message": "too many requests", "type": "error"}}
        is_wrong = refusal.status_code == 400
        return JSONResponse(said, 429, {"Retry-After": "3600"}) if is_wrong else refusal


def test_a_limit_of_requests_is_no_refusal() -> None:
    """It does not say that anything is wrong with the request."""
    (made,) = results(Limiting(), REFUSALS).values()
    assert made.status is CheckStatus.INCONCLUSIVE


class Elsewhere(OpenAIDouble):
    """Answers 501 or a redirect where it has no route, and lists routes that it does not have."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self._status = status

    async def _refused(self, request: Request, error: Exception) -> Response:
        refusal = await super()._refused(request, error)
        is_absent = refusal.status_code == 405 or request.url.path == "/v1/none"
        return JSONResponse({}, self._status) if is_absent else refusal

    async def _responses(self, _request: Request) -> Response:
        return JSONResponse({}, self._status)

    async def _messages(self, _request: Request) -> Response:
        return JSONResponse({}, self._status)


@pytest.mark.parametrize("status", [404, 405, 501, 302])
def test_a_route_that_is_not_there_may_say_so_in_several_ways(status: int) -> None:
    """With 404, 405 or 501, or by sending the client elsewhere, also where it is listed."""
    made = results(Elsewhere(status).without("/statusz"), [*REFUSALS, *TYPED])
    skipped = dict.fromkeys(("wire.responses", "wire.messages"), CheckStatus.SKIPPED)
    assert not_passed(made) == skipped
    assert f"answered {status}" in made["wire.responses"].reason


@pytest.mark.parametrize("owner", ["", "vllm"], ids=("Holdfast", "vLLM"))
@pytest.mark.parametrize(
    ("status", "judged"),
    [
        (404, CheckStatus.PASSED),
        (405, CheckStatus.PASSED),
        (501, CheckStatus.FAILED),
        (302, CheckStatus.FAILED),
    ],
)
def test_vllm_says_with_404_or_405_that_it_has_no_route(
    status: int, judged: CheckStatus, owner: str
) -> None:
    """Any other status is a fault."""
    app = Elsewhere(status)
    (made,) = results(app.owned_by(owner) if owner else app, REFUSALS).values()
    assert made.status is judged, made.reason


@pytest.mark.parametrize(
    ("status", "judged"),
    [
        (400, CheckStatus.PASSED),
        (403, CheckStatus.PASSED),
        (200, CheckStatus.FAILED),
        (500, CheckStatus.FAILED),
    ],
)
def test_others_say_with_any_4xx_that_they_have_no_route(status: int, judged: CheckStatus) -> None:
    """As AWS API Gateway does with 403."""
    (made,) = results(Elsewhere(status).owned_by("openai"), REFUSALS).values()
    assert made.status is judged, made.reason


class Shouting(OpenAIDouble):
    """Writes the types of its answers in capitals."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def shout(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"]
                raised = [(k, v.upper() if k == b"content-type" else v) for k, v in headers]
                message = {**message, "headers": raised}
            await send(message)

        await super().__call__(scope, receive, shout)


def test_the_case_of_a_type_does_not_matter() -> None:
    """HTTP compares it without."""
    checks = [one for one in OWN if one.name in ("chat", "completion", "events")]
    assert not_passed(results(Shouting(), [*checks, *TYPED])) == {}


class Missing(OpenAIDouble):
    """Lists responses, and does not have them."""

    async def _responses(self, _request: Request) -> Response:
        return JSONResponse({}, 404)


@pytest.mark.parametrize("app", [Missing(), Missing().owned_by("vllm")], ids=("Holdfast", "vLLM"))
def test_a_listed_route_of_vllm_has_to_be_there(app: OpenAIDouble) -> None:
    """A 404 there is a fault."""
    made = results(app, TYPED)
    assert not_passed(made) == {"wire.responses": CheckStatus.FAILED}


@pytest.mark.parametrize(
    ("defect", "failed"),
    [
        ("", set()),
        ("a model without its time", {"models"}),
        ("embeddings are 500", {"other_routes"}),
    ],
)
def test_a_limit_of_requests_is_waited_for(defect: Defect | Literal[""], failed: set[str]) -> None:
    """It is not a fault of the list of models, and does not hide a fault of another route."""
    app = AlternatingDouble(defect)
    app.limited = ("/v1/models", "/v1/embeddings")
    made = results(app, [check for check in OWN if check.name in ("models", "other_routes")])
    assert not_passed(made) == {f"wire.{name}": CheckStatus.FAILED for name in failed}


class Routed(OpenAIDouble):
    """Lists one more route, and answers there with a status of its own."""

    def __init__(self, path: str, status: int) -> None:
        super().__init__()
        self._status = status
        self.heard: list[tuple[str, str, bytes]] = []
        self._paths = [path]
        self.router.routes.append(Route(path, self._told, methods=["GET", "POST"]))

    async def _told(self, request: Request) -> Response:
        self.heard.append((request.method, request.url.path, await request.body()))
        return JSONResponse({}, self._status)


@pytest.mark.parametrize("status", [200, 400, 404, 422, 500, 501, 503])
def test_other_routes_are_asked_with_nothing(status: int) -> None:
    """Whatever says that this is wrong, or not there, is right; a failure is not."""
    app = Routed("/v1/audio/transcriptions", status)
    (made,) = results(app, ROUTES).values()
    assert app.heard == [("POST", "/v1/audio/transcriptions", b"{}")]
    is_failure = status in (500, 503)
    assert made.status is (CheckStatus.FAILED if is_failure else CheckStatus.PASSED)
    assert made.reason == (f"/v1/audio/transcriptions gets {status}" if is_failure else "")


@pytest.mark.parametrize(
    ("path", "heard"),
    [
        ("/v1/responses/{response_id}", ("GET", "/v1/responses/resp_none", b"")),
        (
            "/v1/responses/{response_id}/cancel",
            ("POST", "/v1/responses/resp_none/cancel", b"{}"),
        ),
    ],
)
def test_a_response_that_does_not_exist_is_no_failure(
    path: str, heard: tuple[str, str, bytes]
) -> None:
    """It is asked for, and cancelled."""
    app = Routed(path, 500)
    (made,) = results(app, ROUTES).values()
    assert app.heard == [heard]
    assert made.reason == f"{heard[1]} gets 500"


class Unlimited(OpenAIDouble):
    """Takes -1 for as many tokens as there is room for, as llama.cpp does."""

    async def _body(self, request: Request) -> Body:
        with suppress(ValueError):
            body = await request.json()
            if isinstance(body, dict) and body.get("max_tokens") == -1:
                del body["max_tokens"]
        return await super()._body(request)


def test_a_number_that_some_servers_define_is_not_wrong() -> None:
    """Only what no server defines has to be refused."""
    (made,) = results(Unlimited(), REFUSALS).values()
    assert (made.status, made.reason) == (CheckStatus.PASSED, "")


class Penalizing(OpenAIDouble):
    """Has penalties of the model's own, for requests that have none."""

    def _choice(self, index: int, made: Generated, body: Body, *, is_chat: bool) -> Body:
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        is_plain = [body.get(name) for name in penalties] == [1, 0, 0]
        self.defect = "" if is_plain else "a greedy token that is not the likeliest"
        return super()._choice(index, made, body, is_chat=is_chat)


@pytest.mark.parametrize("owner", ["", "vllm"], ids=("Holdfast", "vLLM"))
def test_penalties_of_the_model_are_not_blamed(owner: str) -> None:
    """vLLM tells the log-probs before them, and so another token than the likeliest is right."""
    app = Penalizing()
    (made,) = results(app.owned_by(owner) if owner else app, LOGPROBS).values()
    assert made.status is CheckStatus.PASSED, made.reason


def test_other_servers_are_not_asked_for_vllms_penalties() -> None:
    """They may refuse a field that OpenAI does not know."""
    app = Penalizing().owned_by("somebody")
    (made,) = results(app, LOGPROBS).values()
    assert made.status is CheckStatus.FAILED, made.reason


class Told(OpenAIDouble):
    """Tells something else of the tokens of an answer, or answers with another text."""

    def __init__(self, tell: Callable[[Body], object], text: str = "") -> None:
        super().__init__(known={"Count": text} if text else {})
        self._tell = tell

    def _logprobs(self, tokens: Sequence[str], *, is_chat: bool) -> Body:
        told = super()._logprobs(tokens, is_chat=is_chat)
        for entry in told["content"] if is_chat else [told]:
            self._tell(entry)
        return told


def _tell_in_chats(**fields: object) -> Callable[[Body], object]:
    return lambda told: told.update(fields if "top_logprobs" in told and "token" in told else {})


def _tell_in_completions(**fields: object) -> Callable[[Body], object]:
    return lambda told: told.update(
        {name: [one] * len(told["top_logprobs"]) for name, one in fields.items()}
        if "tokens" in told
        else {}
    )


def _first_as_id(told: Body) -> None:
    """Spell one token of a completion as vLLM spells all or none, and the others wrong."""
    if "tokens" in told:
        told["tokens"] = ["token_id:1", *["WRONG"] * (len(told["tokens"]) - 1)]


OTHER = {"token": "WRONG", "bytes": [1]}
LESS, MORE = {"token": "x", "logprob": -2.0}, {"token": "y", "logprob": -0.5}


@pytest.mark.parametrize(
    ("tell", "reason"),
    [
        (_tell_in_chats(**OTHER), "its tokens do not spell the answer, but 'WRON"),
        (_tell_in_chats(bytes=[0x78]), "its tokens do not spell the answer, but 'xxxxxxxx'"),
        (_tell_in_chats(bytes=[256]), "the bytes of a token are not bytes"),
        (_tell_in_chats(token=None), "token is null and not str"),
        (_tell_in_chats(top_logprobs=[]), "at position 0, no most likely tokens are listed"),
        (_tell_in_chats(top_logprobs=[LESS, MORE]), "at position 0, the most likely tokens do not"),
        (
            _tell_in_chats(top_logprobs=[MORE, {"token": "x", "logprob": None}]),
            "at position 0, a log-probability of the most likely tokens is not a finite number",
        ),
        (_tell_in_chats(logprob=-0.001), "at position 0, the greedy token has -0.001, and the"),
        (
            _tell_in_chats(logprob=-0.001, top_logprobs=[MORE]),
            "at position 0, the greedy token has -0.001, and the likeliest one -0.5",
        ),
        (_tell_in_completions(tokens="WRONG"), "its tokens do not spell the answer, but 'WRONG"),
        (_tell_in_completions(tokens=1), "[0] is int and not str"),
        (_tell_in_completions(token_logprobs=-0.001), "at position 0, the greedy token has -0.001"),
        (_tell_in_completions(top_logprobs={}), "at position 0, no most likely tokens are listed"),
        (_first_as_id, "its tokens do not spell the answer, but 'token_id:1WRONG"),
        (lambda told: told.update(tokens=[]), "logprobs has 0 tokens, 8 token_logprobs and 8"),
        (lambda told: told.pop("tokens", None), "tokens is missing"),
    ],
)
def test_what_is_told_of_a_token_has_to_be_right(
    tell: Callable[[Body], object], reason: str
) -> None:
    """Its text, its log-probability and what is told of the most likely tokens."""
    assert_fails(Told(tell), LOGPROBS, reason)


def _broken(token: str) -> str:
    """As a decoder that sees each token alone spells parts of a character."""
    return token.encode("ascii", "replace").decode().replace("?", "\N{REPLACEMENT CHARACTER}")


def _in_parts(told: Body) -> None:
    """Break every character that is not ASCII, as vLLM and SGLang do if tokens share it."""
    if "token" in told:
        token = _broken(told["token"])
        told.update(token=token, bytes=list(token.encode()))
    elif "tokens" in told:
        told["tokens"] = [_broken(token) for token in told["tokens"]]


def _escaped(told: Body) -> None:
    """Spell what is not ASCII by its bytes, as OpenAI does if tokens share a character."""
    if "token" in told:
        told["token"] = bytes(told["bytes"]).decode("ascii", "backslashreplace")


def _without_spaces(told: Body) -> None:
    """Spell tokens as a decoder of SentencePiece does that sees each token alone."""
    if "token" in told:
        token = told["token"].strip()
        told.update(token=token, bytes=list(token.encode()))
    elif "tokens" in told:
        told["tokens"] = [one.strip() for one in told["tokens"]]


def _as_ids(told: Body) -> None:
    """Spell tokens as vLLM does with `--return-tokens-as-token-ids`."""
    if "token" in told:
        told.update({"token": "token_id:1"})
    elif "tokens" in told:
        told["tokens"] = ["token_id:1" for _ in told["tokens"]]


def _collapsed(told: Body) -> None:
    """Have two most likely tokens of one spelling, and so one entry, with the smaller number."""
    if "tokens" in told:
        told["top_logprobs"] = [{"a": -2.0} for _ in told["top_logprobs"]]


@pytest.mark.parametrize(
    "tell", [_in_parts, _escaped, _without_spaces, _as_ids, _collapsed, lambda _told: None]
)
def test_tokens_may_be_spelled_in_several_ways(tell: Callable[[Body], object]) -> None:
    """What sound servers tell of them passes."""
    (made,) = results(Told(tell, " fünf, six, seven 🙂 and eight"), LOGPROBS).values()
    assert made.status is CheckStatus.PASSED, made.reason


def _without_parts(told: Body) -> None:
    """Leave out tokens that are parts of no character, as vLLM does."""
    if "token" in told and not told["token"].isascii():
        told.update({"token": "", "bytes": []})
    elif "tokens" in told:
        told["tokens"] = [token if token.isascii() else "" for token in told["tokens"]]


def test_tokens_of_a_broken_text_are_not_read() -> None:
    """A model may write bytes that are not a character, and servers differ in how they tell it."""
    app = Told(_without_parts, "five\N{REPLACEMENT CHARACTER}, x")
    (made,) = results(app, LOGPROBS).values()
    assert made.status is CheckStatus.PASSED, made.reason


class Marked(OpenAIDouble):
    """Leaves marks of thoughts and of the end out of the text, and adds one that it has not."""

    def _logprobs(self, tokens: Sequence[str], *, is_chat: bool) -> Body:
        return super()._logprobs(["<|begin|>", *tokens[1:-1], "<|end|>"], is_chat=is_chat)

    def _choice(self, index: int, made: Generated, body: Body, *, is_chat: bool) -> Body:
        choice = super()._choice(index, made, body, is_chat=is_chat)
        said = "".join(made.tokens[1:-1])
        if is_chat:
            choice["message"]["content"] = f"<think>\n{said}"
        else:
            choice["text"] = said
        return choice


def test_tokens_may_spell_more_than_the_answer() -> None:
    """Special tokens are not in the text."""
    (made,) = results(Marked(), LOGPROBS).values()
    assert made.status is CheckStatus.PASSED, made.reason


OF_VLLM = ("/version", "/statusz")


class Untemplated(OpenAIDouble):
    """Its `/tokenize` takes a `prompt` and no chat, as that of SGLang."""

    async def _tokenize(self, request: Request) -> Response:
        if "messages" in await request.json():
            return JSONResponse({"error": {"message": "prompt is missing"}}, 422)
        return await super()._tokenize(request)


def test_a_tokenizer_without_chats_counts_completions() -> None:
    """A count that is wrong there is still found."""
    (made,) = results(Untemplated().without(*OF_VLLM), PROMPT_TOKENS).values()
    assert made.status is CheckStatus.WARNED
    assert made.reason.startswith("/tokenize does not accept chats")
    assert {one.name: one.value for one in made.numbers}["prompts"] == 3
    (made,) = results(
        Untemplated("prompt_tokens off by one").without(*OF_VLLM), PROMPT_TOKENS
    ).values()
    assert made.status is CheckStatus.FAILED


def test_vllm_has_to_tokenize_chats() -> None:
    """What it refuses is a fault, and not another kind of server."""
    (made,) = results(Untemplated(), PROMPT_TOKENS).values()
    assert made.status is CheckStatus.FAILED


class WithoutSystem(OpenAIDouble):
    """Its chat template refuses a system role, as that of Gemma 2, or only `/tokenize` does."""

    def __init__(self, defect: Defect | Literal[""] = "", *, is_lenient: bool = False) -> None:
        super().__init__(defect)
        self._is_lenient = is_lenient

    async def _tokenize(self, request: Request) -> Response:
        await _refuse_system(request)
        return await super()._tokenize(request)

    async def _chat(self, request: Request) -> Response:
        if not self._is_lenient:
            await _refuse_system(request)
        return await super()._chat(request)


async def _refuse_system(request: Request) -> None:
    roles = [said["role"] for said in (await request.json()).get("messages", ())]
    if "system" in roles:
        raise HTTPException(400, "System role not supported")


@pytest.mark.parametrize("owner", ["", "vllm"], ids=("Holdfast", "vLLM"))
def test_a_template_may_refuse_a_chat(owner: str) -> None:
    """The other prompts are still judged."""
    app = WithoutSystem()
    (made,) = results(app.owned_by(owner) if owner else app, PROMPT_TOKENS).values()
    assert made.status is CheckStatus.WARNED, made.reason
    assert "System role not supported" in made.reason
    assert {one.name: one.value for one in made.numbers}["prompts"] == 5


@pytest.mark.parametrize(
    "app", [WithoutSystem("prompt_tokens off by one"), WithoutSystem(is_lenient=True)]
)
def test_a_refused_chat_hides_no_fault(app: OpenAIDouble) -> None:
    """Neither a wrong count nor a tokenizer that refuses what the chat takes."""
    (made,) = results(app, PROMPT_TOKENS).values()
    assert made.status is CheckStatus.FAILED, made.reason


class WithoutEmoji(OpenAIDouble):
    """Refuses a prompt with an emoji."""

    async def _body(self, request: Request) -> Body:
        body = await super()._body(request)
        if "\N{SLIGHTLY SMILING FACE}" in str(body.get("messages")):
            raise HTTPException(400, "there is no such character")
        return body


@pytest.mark.parametrize("owner", ["", "vllm"], ids=("Holdfast", "vLLM"))
def test_no_template_may_refuse_what_a_user_says(owner: str) -> None:
    """Though both `/tokenize` and the chat get 400."""
    app = WithoutEmoji()
    (made,) = results(app.owned_by(owner) if owner else app, PROMPT_TOKENS).values()
    assert made.status is CheckStatus.FAILED, made.reason


def test_a_tokenizer_without_chats_counts_nothing_where_there_are_only_chats() -> None:
    """The check does not pass without a count."""
    app = Untemplated().without(*OF_VLLM, "/v1/completions")
    (made,) = results(app, PROMPT_TOKENS).values()
    assert (made.status, made.reason) == (CheckStatus.SKIPPED, "/tokenize does not accept chats")


class Edited(OpenAIDouble):
    """Changes the text of its answers, or of each part of a stream."""

    def _edit(self, text: str) -> str:
        return text

    async def _chat(self, request: Request) -> Response:
        return await self._edited(await super()._chat(request))

    async def _completion(self, request: Request) -> Response:
        return await self._edited(await super()._completion(request))

    async def _responses(self, request: Request) -> Response:
        return await self._edited(await super()._responses(request))

    async def _messages(self, request: Request) -> Response:
        return await self._edited(await super()._messages(request))

    async def _edited(self, answer: Response) -> Response:
        if not isinstance(answer, StreamingResponse):
            text = self._edit(bytes(answer.body).decode())
            return Response(text, media_type=answer.media_type)
        parts = [part async for part in answer.body_iterator]
        texts = [part if isinstance(part, str) else bytes(part).decode() for part in parts]
        return StreamingResponse(map(self._edit, texts), media_type=answer.media_type)


class Renamed(Edited):
    """Lists its model under further names, with what each stands for, and answers with one."""

    def __init__(self, answers_as: str, **roots: str) -> None:
        super().__init__()
        self._answers_as = answers_as
        self._roots = roots

    async def _models(self, request: Request) -> Response:
        listed = json.loads(bytes((await super()._models(request)).body))
        (entry,) = listed["data"]
        own = {**entry, "root": self._roots.get(MODEL)}
        others = [{**entry, "id": name, "root": root} for name, root in self._roots.items()]
        return JSONResponse({**listed, "data": [own, *others[1:]]})

    def _edit(self, text: str) -> str:
        return re.sub(rf'"model": ?"{MODEL}"', f'"model": "{self._answers_as}"', text)


_DATES = ("0613", "20250514", "2024-08-06", "08-2024", "05-20", "002")
SNAPSHOTS = tuple(f"{MODEL}-{date}" for date in _DATES)
OTHERS = tuple(f"{MODEL}-{version}" for version in ("1", "2-5", "120", "-"))


@pytest.mark.parametrize(
    ("answers_as", "roots", "status"),
    [
        ("first", {MODEL: "/models/x", "first": "/models/x"}, CheckStatus.PASSED),
        ("adapter", {MODEL: "/models/x", "adapter": "/adapters/y"}, CheckStatus.FAILED),
        (f"{MODEL}-2026-01-01", {MODEL: "/models/x"}, CheckStatus.WARNED),
        ("", {MODEL: "/models/x"}, CheckStatus.FAILED),
        *((name, {MODEL: "", name: ""}, CheckStatus.WARNED) for name in SNAPSHOTS),
        *((name, {MODEL: "", name: ""}, CheckStatus.FAILED) for name in OTHERS),
    ],
    ids=("an alias", "another model", "a snapshot", "none", *SNAPSHOTS, *OTHERS),
)
def test_an_answer_names_its_model(
    answers_as: str, roots: dict[str, str], status: CheckStatus
) -> None:
    """By any name that the server lists for it; what is not listed may be a snapshot.

    So may what is listed, where the server does not say what its names stand for.
    """
    made = results(Renamed(answers_as, **roots), [*FORMS, *EVENTS, *TYPED])
    assert {one.status for one in made.values()} == {status}, made
    is_noted = status is not CheckStatus.PASSED
    assert _noted_ways(made) == ((4, 4) if is_noted else (0, 0))


def _noted_ways(made: Mapping[str, CheckResult]) -> tuple[int, int]:
    """How many answers at once, and how many streams, have a fault or a warning."""
    noted = [fault for one in made.values() for fault in (*one.faults, *one.warnings)]
    ways = [(fault.request.body or {}).get("stream") for fault in noted if fault.request]
    return ways.count(None), ways.count(True)


class Recounting(OpenAIDouble):
    """Changes the events of typed streams."""

    def __init__(self, change: Callable[[Body], object]) -> None:
        super().__init__()
        self._change = change

    async def _responses(self, request: Request) -> Response:
        return await self._changed(await super()._responses(request))

    async def _messages(self, request: Request) -> Response:
        return await self._changed(await super()._messages(request))

    async def _changed(self, answer: Response) -> Response:
        if not isinstance(answer, StreamingResponse):
            return answer
        parts = [part async for part in answer.body_iterator]
        texts = [part if isinstance(part, str) else bytes(part).decode() for part in parts]
        events = [json.loads(text.split("data: ")[1]) for text in texts]
        for event in events:
            self._change(event)
        return StreamingResponse(framed(events, has_names=True), media_type=answer.media_type)


def _usage_of(event: Body, *path: str) -> Body:
    for name in path:
        event = event.get(name) or {}
    return event


def _ends_with_more_read(event: Body) -> None:
    if usage := _usage_of(event, "response", "usage"):
        usage.update(input_tokens=usage["input_tokens"] + 5, total_tokens=usage["total_tokens"] + 5)


def _ends_its_text_with_another(event: Body) -> None:
    if event["type"] == "response.output_text.done":
        event["text"] = "something else"


def _begins_with_more_read(event: Body) -> None:
    if usage := _usage_of(event, "message", "usage"):
        usage["input_tokens"] += 7


def _reads_some_from_its_cache(event: Body) -> None:
    if usage := _usage_of(event, "message", "usage"):
        usage.update(input_tokens=usage["input_tokens"] - 4, cache_read_input_tokens=4)


def _begins_without_a_count(event: Body) -> None:
    if usage := _usage_of(event, "message", "usage"):
        usage["input_tokens"] = 0


def _never_counts(event: Body) -> None:
    _begins_without_a_count(event)
    if event["type"] == "message_delta":
        del event["usage"]["input_tokens"]


def _ends_without_a_count(event: Body) -> None:
    if usage := _usage_of(event, "response", "usage"):
        usage.update(input_tokens=0, total_tokens=usage["output_tokens"])


@pytest.mark.parametrize(
    ("change", "failed", "said"),
    [
        (_ends_with_more_read, "wire.responses", "it counts 17 tokens read, and the same answer"),
        (_ends_its_text_with_another, "wire.responses", "the text of response.output_text.done is"),
        (_begins_with_more_read, "wire.messages", "it counts 19 tokens read, and the same answer"),
        (_reads_some_from_its_cache, "", ""),
        (_begins_without_a_count, "", ""),
        (
            _never_counts,
            "wire.messages",
            "it counts no tokens read, and the same answer at once 12",
        ),
        (_ends_without_a_count, "wire.responses", "it counts no tokens read, and the same answer"),
    ],
)
def test_a_typed_stream_tells_what_the_answer_at_once_tells(
    change: Callable[[Body], object], failed: str, said: str
) -> None:
    """The tokens read, where it tells them, and the text at the end of a part."""
    made = results(Recounting(change), TYPED)
    assert not_passed(made) == ({failed: CheckStatus.FAILED} if failed else {})
    assert not failed or made[failed].reason.startswith(said), made[failed].reason


def test_a_first_count_of_another_server_may_be_a_guess() -> None:
    """Its last one is what counts, so the check only warns."""
    app = Recounting(_begins_with_more_read).owned_by("somebody")
    assert not_passed(results(app, TYPED)) == {"wire.messages": CheckStatus.WARNED}


class Erring(Edited):
    """Answers a request of one kind with an error, as a stream or at once, and with a status."""

    def __init__(
        self,
        asked: Body,
        *,
        streams: bool,
        status: int = 200,
        breaks_off: bool = False,
        has_choices: bool = False,
    ) -> None:
        super().__init__()
        self._asked, self._streams, self._status = asked, streams, status
        self._breaks_off = breaks_off
        """Whether the error is the last event of a stream."""
        self._beside: Body = {"choices": []} if has_choices else {}
        """What else the document of the error has."""

    async def _completion(self, request: Request) -> Response:
        body = await request.json()
        answer = await super()._completion(request)
        is_meant = self._asked.items() <= body.items()
        if not is_meant or bool(body.get("stream")) is not self._streams:
            return answer
        error = {"error": {"message": "overloaded", "type": "x"}, **self._beside}
        if not isinstance(answer, StreamingResponse):
            return JSONResponse(error, self._status)
        parts = [part async for part in answer.body_iterator]
        parts[2 : None if self._breaks_off else 2] = [f"data: {json.dumps(error)}\n\n"]
        return StreamingResponse(iter(parts), media_type=answer.media_type)


ONE_OF_EIGHT = {"prompt": "client 3 of 8"}


@pytest.mark.parametrize(
    ("app", "checks", "reason"),
    [
        (Erring(ONE_OF_EIGHT, streams=False), OWN_ANSWERS, "it is an error: {'message': 'overl"),
        (Erring(ONE_OF_EIGHT, streams=True), OWN_ANSWERS, "it is an error: {'message': 'overl"),
        (Erring({"n": 2}, streams=False), CHOICES, "choices is missing"),
        (Erring({"n": 2}, streams=True), CHOICES, "it is an error: {'message': 'overloaded'"),
        (Erring({"n": 2}, streams=False, status=503), CHOICES, "its status is 503"),
        (Erring(ONE_OF_EIGHT, streams=True, breaks_off=True), OWN_ANSWERS, "it is an error"),
        (Erring({"n": 2}, streams=True, breaks_off=True), CHOICES, "it is an error"),
        (Erring({"n": 2}, streams=True, has_choices=True), CHOICES, "it is an error"),
        (Erring({"logprobs": 2}, streams=False), LOGPROBS, "it is an error"),
    ],
)
def test_an_error_in_place_of_an_answer_is_a_fault(
    app: OpenAIDouble, checks: Sequence[Check], reason: str
) -> None:
    """One of several clients that gets it has no answer, whatever the status says."""
    assert_fails(app, checks, reason)


class Replaced(Edited):
    """Has another text in the place of one."""

    def __init__(self, pattern: str, text: str) -> None:
        super().__init__()
        self._pattern, self._text = pattern, text

    def _edit(self, text: str) -> str:
        return re.sub(self._pattern, self._text, text)


@pytest.mark.parametrize(
    ("app", "checks", "reason"),
    [
        (Replaced('"created": 1,', '"created": -7,'), EVENTS, "`created` of an event is not a"),
        (Replaced('"id": ?"cmpl-[^"]*"', '"id":"cmpl-0"'), OWN_ANSWERS, "8 answers have the same"),
        (
            Replaced('"choices": \\[{"index": 1', '"choices": [{"index": 7}, {"index": 1'),
            CHOICES,
            "its choices are numbered [0, 1, 7]",
        ),
    ],
)
def test_what_tells_answers_and_choices_apart_has_to_be_right(
    app: OpenAIDouble, checks: Sequence[Check], reason: str
) -> None:
    """Times, ids and the numbers of choices, also in streams."""
    assert_fails(app, checks, reason)


class Inexact(Edited):
    """Counts what cannot be counted."""

    def _edit(self, text: str) -> str:
        return re.sub(r'"usage": ?\{', '"usage": {"cost": NaN, ', text)


def test_a_constant_that_json_does_not_have_is_a_fault() -> None:
    """Most clients cannot read it, at once or as a stream."""
    made = results(Inexact(), [*FORMS, *LOGPROBS, *EVENTS, *TYPED])
    assert {one.status for one in made.values()} == {CheckStatus.FAILED}, made
    whats = {fault.what for one in made.values() for fault in one.faults}
    assert whats == {"it has NaN in it, which is not JSON"}
    assert _noted_ways(made) == (6, 4)
