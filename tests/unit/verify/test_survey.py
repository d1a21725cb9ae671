"""Whether a server still answers, and what it can do; the tests of the command show the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from asgi_server import serving
from double_limits import EVERY, LimitedDouble
from holdfast.errors import NotReachableError, UsageError
from holdfast.verify.checks import tools, wire
from holdfast.verify.records import CheckStatus, Server
from holdfast.verify.survey import Reach, reach_of, survey
from holdfast.verify.target import Target
from openai_double import MODEL, OpenAIDouble
from scoring_double import ADAPTER, ScoringDouble
from several_models import Several
from verified import results

NOTHING_KNOWN = Server(
    url="",
    model="",
    models=(),
    max_model_len=None,
    owner="",
    vllm="",
    abilities=(),
    routes=(),
)


@pytest.mark.parametrize(("closed", "is_there"), [(0, True), (1, True), (2, False)])
def test_one_connection_may_be_closed(closed: int, is_there: bool) -> None:
    """As one is that was kept, behind an error; a server that closes each is gone."""
    left = closed

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        await reader.readuntil(b"\r\n\r\n")
        if left:
            left -= 1
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def asked() -> bool:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Target(f"http://127.0.0.1:{port}") as target:
            return await reach_of(target, NOTHING_KNOWN) is Reach.ANSWERED

    assert asyncio.run(asked()) is is_there


@pytest.mark.parametrize(
    ("last", "reach"), [("200 OK", Reach.ANSWERED), ("429 Too Many", Reach.LIMITED)]
)
def test_a_connection_may_be_closed_in_a_wait(last: str, reach: Reach) -> None:
    """A gateway that limits requests may be restarted meanwhile."""
    answers = iter(("429 Too Many", "", last))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if status := next(answers):
            head = f"HTTP/1.1 {status}\r\nRetry-After: 0\r\nContent-Length: 2\r\n\r\n{{}}"
            writer.write(head.encode())
        writer.close()

    async def found() -> Reach:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Target(f"http://127.0.0.1:{port}") as target:
            return await reach_of(target, NOTHING_KNOWN)

    assert asyncio.run(found()) is reach


MAKES = ("Holdfast", "vLLM")


class Refusing(OpenAIDouble):
    """Answers every chat and every completion with one status."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self._status = status

    async def _chat(self, _request: Request) -> Response:
        return JSONResponse({}, self._status, {"Retry-After": "3600"})

    async def _completion(self, _request: Request) -> Response:
        return JSONResponse({}, self._status, {"Retry-After": "3600"})


class Proving(OpenAIDouble):
    """Says what a test likes of its proof."""

    def __init__(self, proof: dict[str, Any]) -> None:
        super().__init__()
        self._proof = proof

    async def _statusz(self, _request: Request) -> Response:
        return JSONResponse({"state": "READY", "engine": {}, "probe": self._proof})


def surveyed(app: OpenAIDouble, recorded: str | None = None, *, named: str | None = None) -> Server:
    async def found() -> Server:
        async with serving(app) as client, Target(str(client.base_url), app.api_key) as target:
            return await survey(target, recorded, named=named)

    return asyncio.run(found())


@pytest.mark.parametrize(
    ("status", "is_there"),
    [
        *((404, False), (400, False), (501, False), (307, False)),
        *((408, True), (429, True), (500, True), (503, True)),
    ],
)
def test_a_route_without_time_is_there(status: int, is_there: bool) -> None:
    """As is one that fails; one that refuses the smallest request is not."""
    able = set(surveyed(Refusing(status).owned_by("openai")).abilities)
    assert ({"chat", "completions", "tools"} <= able) is is_there


@pytest.mark.parametrize("owner", ["", "vllm"], ids=MAKES)
@pytest.mark.parametrize(("status", "is_there"), [(501, True), (307, True), (404, False)])
def test_a_route_that_vllm_lists_is_there(status: int, owner: str, *, is_there: bool) -> None:
    """It says with a 4xx what its model cannot do, so another status is a fault."""
    app = Refusing(status)
    able = set(surveyed(app.owned_by(owner) if owner else app).abilities)
    assert ({"chat", "completions", "tools"} <= able) is is_there
    assert not {"chat", "completions"} & set(surveyed(app.without("/openapi.json")).abilities)


class Toolless(OpenAIDouble):
    """Answers a chat with functions in a way of its own."""

    def __init__(self, status: int, said: str, form: str = "error") -> None:
        super().__init__()
        self._status, self._said, self._form = status, said, form

    async def _chat(self, request: Request) -> Response:
        if (await request.json()).get("tools"):
            return JSONResponse({self._form: {"message": self._said}}, self._status)
        return await super()._chat(request)


OF_LLAMA = "tools param requires --jinja flag"


NO_TOOLS = (
    OF_LLAMA,
    "Unsupported param: tools",
    "unsupported parameter 'tools'",
    "this model does not support function calling",
    "registry/library/m:1b does not support tools",
    "the model doesn't support tool use",
    "Tool use is not enabled on this server",
    "tool calling is disabled",
    "tools are not supported",
    "tool_calls not supported",
    "no endpoints found that support tool use",
)
CRASHES = (
    "out of memory",
    "extract_tool_calls() missing 1 required positional argument: 'request'",
    "tool parser: 'NoneType' object is not subscriptable",
    "unsupported operand type(s) for +: 'Tool' and 'str'",
    "Tool parser 'hermes' requires transformers>=4.51",
    "The tool-call parser is not available",
    "tool template is not supported by minja: unexpected token",
    "unsupported schema in tools[0]: this keyword is not supported",
    "Failed to render template: tools: operator + not supported for undefined",
    "KeyError while rendering tools: filter 'tojson' is not supported",
    "grammar for tools not supported: failed to parse grammar",
    "tool parsing backend is not available",
    "Internal error: tool call id requires a string",
)


@pytest.mark.parametrize(
    ("status", "said", "is_able"),
    [
        *((500, said, False) for said in NO_TOOLS),
        *((500, said, True) for said in CRASHES),
        (503, "tool parsing backend is not available", True),
        (503, "Tool use is not enabled on this server", True),
        (501, "no such luck", False),
        (400, "no such luck", False),
    ],
)
def test_a_server_that_says_that_it_has_no_tools_has_none(
    status: int, said: str, *, is_able: bool
) -> None:
    """llama.cpp says it with 500; what only fails there is for the checks to find."""
    server = surveyed(Toolless(status, said).without("/statusz"))
    assert ("tools" in server.abilities) is is_able
    assert server.refusals == ({} if is_able else {"tools": f"{said} (HTTP {status})"})


@pytest.mark.parametrize(
    "app", [Toolless(500, OF_LLAMA), Toolless(501, OF_LLAMA).owned_by("vllm")], ids=MAKES
)
def test_vllm_does_not_fail_to_say_that_it_has_no_tools(app: OpenAIDouble) -> None:
    """It refuses with a 4xx, so a 5xx is a fault, whatever it says."""
    assert "tools" in surveyed(app).abilities


def test_a_refusal_without_a_form_is_told_too() -> None:
    """All of it, on a line."""
    server = surveyed(Toolless(400, "no\nluck", form="detail"))
    assert server.refusals == {"tools": '{"detail":{"message":"no\\nluck"}} (HTTP 400)'}


class Limited(OpenAIDouble):
    """Answers the first request of each route with 429, and has no parser of tools."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: set[str] = set()

    def _is_first(self, request: Request) -> bool:
        is_first = request.url.path not in self._asked
        self._asked.add(request.url.path)
        return is_first

    async def _models(self, request: Request) -> Response:
        if self._is_first(request):
            return JSONResponse({}, 429, {"Retry-After": "0.1"})
        return await super()._models(request)

    async def _completion(self, request: Request) -> Response:
        if self._is_first(request):
            return JSONResponse({}, 429, {"Retry-After": "0.1"})
        return JSONResponse({}, 404)


def test_what_a_server_can_do_is_not_read_from_429() -> None:
    """It says that there have been too many requests, and of the route nothing."""
    able = set(surveyed(Limited()).abilities)
    assert "chat" in able
    assert "completions" not in able


class BrokenTokenizer(OpenAIDouble):
    """Has a route for tokens that always fails, or is another's."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self._status = status

    async def _tokenize(self, _request: Request) -> Response:
        return JSONResponse({}, self._status)


@pytest.mark.parametrize(
    ("status", "is_there"), [(500, True), (501, True), (404, False), (200, False)]
)
def test_tokens_that_are_not_told_are_not_absent(status: int, is_there: bool) -> None:
    """A check finds what is wrong with them; another form is another route."""
    assert ("tokenize" in surveyed(BrokenTokenizer(status)).abilities) is is_there


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_may_be_asked_for_only_where_answers_come_from(status: int) -> None:
    """The error is that of a list of models that asks for one."""
    with pytest.raises(UsageError, match=f"the server asks for a key .HTTP {status}"):
        surveyed(Refusing(status))


def test_only_plain_values_of_a_proof_are_kept() -> None:
    """The report has them, and has no room for what a server may nest or repeat."""
    deep: list[Any] = []
    for _ in range(50):
        deep = [deep]
    holdfast = surveyed(Proving({"passed": True, "limited": deep, "proven_tokens": 640})).holdfast
    assert holdfast is not None
    assert holdfast.proof == {"passed": True, "limited": None, "proven_tokens": 640}


class Counting(OpenAIDouble):
    """Says what a test likes of how often its workspaces have grown."""

    def __init__(self, growths: Any) -> None:
        super().__init__()
        self._growths = growths

    def _workspace(self) -> dict[str, Any]:
        return {"growths": {"locked": self._growths}, "rejections": {}}


@pytest.mark.parametrize(("told", "read"), [(3, 3), (10**400, 0), (-1, 0), (1.5, 0)])
def test_only_a_count_is_read_as_one(told: Any, read: int) -> None:
    """A number of hundreds of digits could not even be shown."""
    holdfast = surveyed(Counting(told)).holdfast
    assert holdfast is not None
    assert holdfast.growths == read


class Talkative(OpenAIDouble):
    """Tells a version of megabytes, and lists a route as long."""

    async def _version(self, _request: Request) -> Response:
        return JSONResponse({"version": "1" * 5_000_000})

    async def _openapi(self, _request: Request) -> Response:
        return JSONResponse({"paths": {"/" * 5_000_000: {}}})


def test_what_a_server_says_of_itself_is_bounded() -> None:
    """The report repeats it, and says how much it leaves out."""
    server = surveyed(Talkative())
    for told in (server.vllm, *server.routes):
        assert len(told) < 10_100
        assert told.endswith("(4,990,000 characters left out)")


class Echoing(OpenAIDouble):
    """Answers a request for its models with the key."""

    async def _models(self, request: Request) -> Response:
        return PlainTextResponse(f"you sent {request.headers['authorization']}")


def test_a_list_of_models_that_repeats_the_key_is_not_shown_with_it() -> None:
    """The error goes to the terminal."""
    with pytest.raises(NotReachableError, match=r"you sent Bearer \[hidden\]"):
        surveyed(Echoing(api_key="a-secret-key"))


@pytest.mark.parametrize(
    ("refused", "retry_after", "reach"),
    [
        (3, "0", Reach.ANSWERED),
        (EVERY, "0", Reach.LIMITED),
        (EVERY, "3600", Reach.LIMITED),
    ],
)
def test_a_server_that_limits_requests_is_not_lost(
    refused: int, retry_after: str, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that it may let one in later, but need not ever do so."""
    patient_seconds = 2.0 if (refused, retry_after) == (EVERY, "0") else 20.0
    monkeypatch.setattr("holdfast.verify.survey.PATIENT_SECONDS", patient_seconds)
    app = LimitedDouble(retry_after)

    async def found() -> Reach:
        async with serving(app) as client, Target(str(client.base_url)) as target:
            server = await survey(target)
            app.refused = refused
            return await reach_of(target, server)

    assert asyncio.run(found()) is reach


@pytest.mark.parametrize(("refused", "is_back"), [(3, True), (EVERY, False)])
def test_a_server_that_is_away_may_come_back(
    refused: int, is_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway says 503 with `Retry-After` for a server that is busy, and for one that is dead."""
    monkeypatch.setattr("holdfast.verify.survey.PATIENT_SECONDS", 20.0 if is_back else 1.0)
    app = LimitedDouble(status=503)

    async def asked() -> bool:
        async with serving(app) as client, Target(str(client.base_url)) as target:
            server = await survey(target)
            app.refused = refused
            return await reach_of(target, server) is Reach.ANSWERED

    assert asyncio.run(asked()) is is_back


class Holding(OpenAIDouble):
    """Keeps a chat for a while once it is told to, as one with a single slot does."""

    seconds = 0.0

    async def _chat(self, request: Request) -> Response:
        await asyncio.sleep(self.seconds)
        return await super()._chat(request)


@pytest.mark.parametrize(("seconds", "is_there"), [(1.0, True), (3.0, False)])
def test_a_server_that_holds_a_request_is_waited_for(
    seconds: float, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tries of a minute are too short for a queue, or for a recovery."""
    monkeypatch.setattr("holdfast.verify.survey.PATIENT_SECONDS", 20.0 if is_there else 0.3)
    app = Holding()

    async def asked() -> bool:
        async with serving(app) as client, Target(str(client.base_url)) as target:
            server = await survey(target)
            monkeypatch.setattr("holdfast.verify.survey.SURVEY_SECONDS", 0.2)
            app.seconds = seconds
            return await reach_of(target, server) is Reach.ANSWERED

    assert asyncio.run(asked()) is is_there


class Tokenizing(OpenAIDouble):
    """Answers `/tokenize` as a test likes."""

    def __init__(self, told: Any) -> None:
        super().__init__()
        self._told = told

    async def _tokenize(self, _request: Request) -> Response:
        return JSONResponse(self._told)


@pytest.mark.parametrize(
    ("told", "is_able"),
    [
        ({"count": 1, "tokens": [7]}, True),
        ({"count": 1, "tokens": []}, False),
        ({"tokens": [7]}, False),
        ({"count": "1", "tokens": [7]}, False),
        ([7], False),
    ],
)
def test_a_route_of_that_name_need_not_tokenize(told: Any, is_able: bool) -> None:
    """Other servers answer it in their own form."""
    assert ("tokenize" in surveyed(Tokenizing(told)).abilities) is is_able


@pytest.mark.parametrize(
    ("recorded", "model"), [(None, MODEL), (ADAPTER, ADAPTER), ("another", MODEL)]
)
def test_the_model_that_was_recorded_is_verified(recorded: str | None, model: str) -> None:
    """If the server lists it; else its first."""
    assert surveyed(ScoringDouble(), recorded).model == model


@pytest.mark.parametrize("named", [MODEL, ADAPTER])
def test_the_model_that_is_named_is_verified(named: str) -> None:
    """Whichever was recorded, and in whatever order the server lists them."""
    assert surveyed(ScoringDouble(), ADAPTER, named=named).model == named
    assert surveyed(Several(other=ADAPTER), named=named).model == named


def test_a_model_that_is_not_listed_is_not_verified() -> None:
    """The error names those that are, and no model was asked, which a server would have to load."""
    app = Several()
    with pytest.raises(UsageError) as refused:
        surveyed(app, named="qwen")
    assert str(refused.value) == "--model: the server lists 'another', 'double', and not 'qwen'."
    assert app.asked == []


def test_a_list_of_models_is_shown_in_part_and_without_the_key() -> None:
    """A gateway may list hundreds, and hears the key."""
    app = Several(other="sk-of-this-server")
    app.api_key = "sk-of-this-server"
    with pytest.raises(UsageError, match=r"lists '\[hidden\]', 'double', and not 'qwen'"):
        surveyed(app, named="qwen")
    with pytest.raises(UsageError) as refused:
        surveyed(Several(other="x" * 100_000), named="qwen")
    assert len(str(refused.value)) < 3000


class Moved(OpenAIDouble):
    """Has its models elsewhere, and repeats the key."""

    def __init__(self, location: str) -> None:
        super().__init__()
        self.api_key = "sk-of-this-server"
        self._location = location

    async def _models(self, _request: Request) -> Response:
        return Response(status_code=307, headers={"Location": self._location})


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("https://other/v1/models?token=1", r", a redirect to https://other/v1/models\."),
        ("/real/v1/models", r", a redirect to http://127\.0\.0\.1:\d+/real/v1/models\."),
        ("http://u:p@other/sk-of-this-server", r", a redirect to http://other/\[hidden\]\."),
        ("http://[", r"\."),
        ("", r"\."),
    ],
)
def test_a_redirect_says_where_to(location: str, shown: str) -> None:
    """A user may have left out the s of https, or a part of the path; no key is shown."""
    with pytest.raises(NotReachableError, match=f"answered HTTP 307{shown}"):
        surveyed(Moved(location))


class Choosy(OpenAIDouble):
    """Refuses a chat that has what a test likes to refuse, in the words of that test."""

    def __init__(self, said: str, refused: Callable[[dict[str, Any]], bool]) -> None:
        super().__init__()
        self.owned_by("acme").without("/version", "/statusz", "/metrics")
        self._said, self._is_refused = said, refused

    async def _chat(self, request: Request) -> Response:
        if self._is_refused(await request.json()):
            return JSONResponse({"error": {"message": self._said, "type": "x"}}, 400)
        return await super()._chat(request)


JUDGED = [
    check
    for check in (*wire.CHECKS, *tools.CHECKS)
    if check.name in ("markup", "models", "chat", "usage", "length", "events", "client_leaves")
]
OLD_NAME = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."


def test_a_chat_may_have_the_newer_name_of_max_tokens() -> None:
    """OpenAI's models that think take no other: every check asks with it, and one warns."""
    app = Choosy(OLD_NAME, lambda body: "max_tokens" in body)
    server = surveyed(app)
    assert {"chat", "tools"} <= set(server.abilities)
    assert server.refusals == {"max_tokens": f"{OLD_NAME} (HTTP 400)"}
    made = results(app, JUDGED, "quick")
    warned = made.pop("wire.models")
    blamed = {CheckStatus.FAILED, CheckStatus.SKIPPED, CheckStatus.INCONCLUSIVE}
    assert not blamed & {one.status for one in made.values()}
    assert warned.status is CheckStatus.WARNED
    assert OLD_NAME in warned.reason


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("max_tokens must be at least 16", lambda body: body.get("max_tokens", 16) < 16),
        ("temperature 0 is refused, only 1", lambda body: body.get("temperature") == 0),
    ],
)
def test_chats_that_are_refused_are_not_passed_over(
    said: str, refused: Callable[[dict[str, Any]], bool]
) -> None:
    """The server has them, and no check has judged one; each check that is skipped says why."""
    app = Choosy(said, lambda body: refused(body) or "max_completion_tokens" in body)
    made = results(app, JUDGED, "quick")
    assert made["wire.models"].status is CheckStatus.INCONCLUSIVE
    assert f"{said} (HTTP 400)" in made["wire.models"].reason
    skipped = (made["wire.chat"], made["tools.markup"])
    assert {one.status for one in skipped} == {CheckStatus.SKIPPED}
    assert all(f"does not answer chats: {said}" in one.reason for one in skipped)
    assert not any("template" in one.remedy for one in skipped)


NO_CHATS = (
    "default chat template is no longer allowed, so you must provide a chat template",
    "Template error: template not found",
    "The model does not support Chat Completions API",
    "This is not a chat model and thus not supported in the v1/chat/completions endpoint.",
)


@pytest.mark.parametrize("said", NO_CHATS)
def test_a_model_that_takes_no_chats_passes_without_them(said: str) -> None:
    """As a base model, which has no chat template."""
    made = results(Choosy(said, lambda _body: True), JUDGED, "quick")
    assert made["wire.models"].status is CheckStatus.PASSED
    assert made["wire.chat"].reason == f"the server does not answer chats: {said} (HTTP 400)"


class Numbering(OpenAIDouble):
    """Refuses chats, and says which request it refused; it may not know the newer name."""

    def __init__(self, said: str, newer: str) -> None:
        super().__init__()
        self.owned_by("acme").without("/version", "/statusz", "/metrics")
        self._said, self._newer = said, newer
        self._count = 0

    async def _chat(self, request: Request) -> Response:
        self._count += 1
        is_newer = "max_completion_tokens" in await request.json()
        said = self._newer if is_newer else self._said
        return JSONResponse({"error": {"message": f"{said} (request {self._count})"}}, 400)


@pytest.mark.parametrize("newer", [NO_CHATS[1], "max_completion_tokens is not permitted"])
def test_each_refusal_of_chats_is_judged_by_itself(newer: str) -> None:
    """The two may differ, by the id of the request or because an old server knows one name."""
    made = results(Numbering(NO_CHATS[1], newer), JUDGED, "quick")
    assert made["wire.models"].status is CheckStatus.PASSED
    assert made["wire.chat"].reason.startswith(f"the server does not answer chats: {NO_CHATS[1]}")


def test_a_refusal_is_quoted_where_nothing_answers() -> None:
    """It says what the operator has to change."""
    app = Choosy("no more credits", lambda _body: True).without("/v1/completions")
    reason = results(app, JUDGED, "quick")["wire.models"].reason
    assert reason == (
        "the server answers neither chats nor completions: no more credits (HTTP 400)"
    )
