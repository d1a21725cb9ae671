"""The checks that other people's tools make: found where they are, skipped where they are not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from double_defects import Defect
from double_limits import AlternatingDouble
from double_model import Generated
from holdfast.verify import packages
from holdfast.verify.checks import ALL, tools, wire
from holdfast.verify.other_tools import Row, Wish
from holdfast.verify.records import CheckStatus
from openai_double import Body, OpenAIDouble
from verified import not_passed, results

OPENAI = [check for check in wire.CHECKS if check.name == "openai_types"]
_NO_TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a "
    "chat template if the tokenizer does not define one."
)
PROVIDER = [check for check in wire.CHECKS if check.name == "provider_check"]


def need(module: str) -> None:
    """Skip the test where the package is missing."""
    if not packages.has_module(module):
        pytest.skip(f"{packages.DISTRIBUTIONS[module]} is not installed: {packages.REMEDY}")


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a package its checks are skipped, with its name and the remedy."""
    monkeypatch.setattr(packages, "has_module", lambda _: False)
    needing = [check for check in ALL if check.packages]
    made = results(OpenAIDouble(), needing)
    assert {one.status for one in made.values()} == {CheckStatus.SKIPPED}
    assert {one.remedy for one in made.values()} == {
        "in a checkout of Holdfast: pip install '.[verify]'"
    }
    assert made["wire.provider_check"].reason == (
        "the package trustedrouter-provider-check is not installed"
    )


@pytest.mark.parametrize(
    ("defect", "failed"),
    [
        ("", {}),
        ("chats without a role", {"wire.openai_types": CheckStatus.FAILED}),
        ("a model without its time", {"wire.openai_types": CheckStatus.FAILED}),
        ("completions that call themselves chats", {"wire.openai_types": CheckStatus.FAILED}),
    ],
)
def test_openais_types_are_strict(defect: Defect, failed: dict[str, CheckStatus]) -> None:
    """A server that is well is taken, one that leaves something out is not."""
    need("openai")
    assert not_passed(results(OpenAIDouble(defect), OPENAI)) == failed


class Odd(OpenAIDouble):
    """Leaves something out, or says something of another kind, in one of its answers."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def _choice(self, index: int, made: Generated, body: Body, *, is_chat: bool) -> Body:
        choice = super()._choice(index, made, body, is_chat=is_chat)
        if self._what == "a call without its type":
            for call in choice["message"].get("tool_calls", ()) if is_chat else ():
                del call["type"]
        return choice

    def _of_choice(
        self, index: int, made: Generated, body: Body, *, is_chat: bool
    ) -> Iterator[Body]:
        for part in super()._of_choice(index, made, body, is_chat=is_chat):
            is_odd = self._what == "a streamed completion without text" and not is_chat
            yield {**part, "text": None} if is_odd else part

    async def _responses(self, request: Request) -> Response:
        told = json.loads(bytes((await super()._responses(request)).body))
        if self._what == "a response without its tools":
            del told["tools"]
        if self._what == "a response from nobody":
            told["model"] = None
        return JSONResponse(told)


@pytest.mark.parametrize(
    ("what", "said", "elsewhere"),
    [
        (
            "a call without its type",
            "ChatCompletion: choices.0.message.tool_calls.0",
            CheckStatus.FAILED,
        ),
        (
            "a streamed completion without text",
            "Completion: choices.0.text",
            CheckStatus.FAILED,
        ),
        ("a response without its tools", "Response: tools", CheckStatus.WARNED),
        ("a response from nobody", "Response: model", CheckStatus.FAILED),
    ],
)
def test_openais_types_see_calls_streams_and_responses(
    what: str, said: str, elsewhere: CheckStatus
) -> None:
    """What a response lacks is only warned of on servers that may be older than the types."""
    need("openai")
    (made,) = results(Odd(what), OPENAI).values()
    assert made.status is CheckStatus.FAILED
    assert said in made.reason
    (told,) = results(Odd(what).owned_by("somebody"), OPENAI).values()
    assert told.status is elsewhere
    assert said in told.reason


def test_openais_types_miss_nothing_that_is_not_there() -> None:
    """A server may have neither responses nor completions."""
    need("openai")
    app = OpenAIDouble().owned_by("somebody").without("/v1/responses", "/v1/completions")
    assert not_passed(results(app, OPENAI)) == {}


class WithoutTemplate(OpenAIDouble):
    """Lists chats and responses, and has no chat template to write them with."""

    async def _chat(self, _request: Request) -> Response:
        raise HTTPException(400, _NO_TEMPLATE)

    async def _responses(self, _request: Request) -> Response:
        raise HTTPException(400, _NO_TEMPLATE)


@pytest.mark.parametrize("owner", ["", "vllm"], ids=("Holdfast", "vLLM"))
def test_openais_types_ask_a_model_without_a_chat_template_for_completions_alone(
    owner: str,
) -> None:
    """Its responses need the template that its chats lack."""
    need("openai")
    app = WithoutTemplate()
    assert not_passed(results(app.owned_by(owner) if owner else app, OPENAI)) == {}


def test_a_limit_of_requests_hides_no_model() -> None:
    """Its types are judged once it has passed."""
    need("openai")
    app = AlternatingDouble("a model without its time")
    app.limited = ("/v1/models",)
    (made,) = results(app, OPENAI).values()
    assert made.status is CheckStatus.FAILED


@pytest.mark.parametrize(
    ("defect", "status"),
    [
        ("", CheckStatus.PASSED),
        ("total_tokens off by one", CheckStatus.FAILED),
        ("no [DONE]", CheckStatus.WARNED),
    ],
)
def test_the_gateways_checks_are_made(defect: Defect, status: CheckStatus) -> None:
    """What they refuse fails, what they tolerate warns."""
    need("tr_provider_check")
    (made,) = results(OpenAIDouble(defect), PROVIDER).values()
    assert made.status is status, made.reason


class Tight(OpenAIDouble):
    """Leaves out the space behind the colon, as the standard allows."""

    async def _events(self, parts: Iterator[Body], **options: bool) -> AsyncIterator[bytes]:
        async for event in super()._events(parts, **options):
            yield event.replace(b"data: ", b"data:")


@pytest.mark.parametrize(
    ("defect", "status"),
    [
        ("", CheckStatus.WARNED),
        ("no [DONE]", CheckStatus.WARNED),
        ("an event split wrong", CheckStatus.FAILED),
    ],
)
def test_a_stream_that_only_this_gateway_cannot_read_is_warned_of(
    defect: Defect, status: CheckStatus
) -> None:
    """It reads nothing but lines that begin with `data: `; what is broken fails all the same."""
    need("tr_provider_check")
    (made,) = results(Tight(defect), PROVIDER).values()
    assert made.status is status, made.reason
    assert "stream.sse-framing" in made.reason


class Hollow(Tight):
    """Streams no more than one line, if that."""

    def __init__(self, line: bytes) -> None:
        super().__init__()
        self._line = line

    async def _events(self, parts: Iterator[Body], **options: bool) -> AsyncIterator[bytes]:
        async for _ in super()._events(parts, **options):
            pass
        yield self._line


@pytest.mark.parametrize(
    "app",
    [OpenAIDouble(), Hollow(b""), Hollow(b"data:[DONE]\n\n")],
    ids=("with the space", "empty", "without an answer"),
)
def test_only_a_missing_space_explains_what_this_gateway_refuses(
    app: OpenAIDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream in which it is not to be seen says nothing about the one that was refused."""
    need("tr_provider_check")

    async def refused(_wish: Wish) -> list[Row]:
        return [Row("stream.sse-framing", "fail", "refused")]

    monkeypatch.setattr(wire.packages, "rows_of", refused)
    (made,) = results(app, PROVIDER).values()
    assert made.status is CheckStatus.FAILED, made.reason


def test_no_other_check_misses_the_space() -> None:
    """They read streams as the standard has them, canitoolcall's probe too."""
    need("canitoolcall")
    names = ("events", "stream_twin", "probe")
    checks = [check for check in (*wire.CHECKS, *tools.CHECKS) if check.name in names]
    assert not_passed(results(Tight(), checks)) == {}


def test_an_answer_of_a_few_tokens_may_arrive_at_once() -> None:
    """A client that is busy reads it so; `wire.incremental` judges a longer one."""
    need("tr_provider_check")
    (made,) = results(OpenAIDouble("all events at the end"), PROVIDER).values()
    assert made.status is CheckStatus.PASSED, made.reason


def test_a_model_without_an_end_is_not_asked_without_a_limit() -> None:
    """Its every answer would fill the context."""
    need("tr_provider_check")
    (made,) = results(OpenAIDouble("chats that never end"), PROVIDER).values()
    assert made.status is CheckStatus.SKIPPED
    assert "does not end an answer" in made.reason
