"""Bodies of very many values keep the event loop for no longer than others."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from holdfast.engine.launch.arguments import make_arg_parser
from holdfast.patches.request_bodies import (
    MAX_ITEMS,
    bound_invocations,
    refuse_wrong_bodies,
    stop_at_first_error,
)

DEADLINE_SECONDS = 60
MAX_ERRORS = 1000
"""Of one wrong item, which is compared with every type that it could be of."""
WRONG: list[Any] = [{}] * 8192
NAMES = dict.fromkeys(map(str, range(len(WRONG))))
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hold"}
MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 1, "messages": [USER]}
WIDE = {
    "messages": (CHAT, {**MESSAGES, "messages": WRONG}),
    "tools": (CHAT, {**MESSAGES, "tools": WRONG}),
    "items": ("/v1/responses", {"model": "m", "input": WRONG}),
    "messages of anthropic": ("/v1/messages", {**MESSAGES, "messages": WRONG}),
    "messages to tokenize": ("/tokenize", {"model": "m", "messages": WRONG}),
    "parts of a message": (CHAT, {**MESSAGES, "messages": [{"content": [1] * len(WRONG)}]}),
    "values by name": (CHAT, {**MESSAGES, "vllm_xargs": NAMES}),
    "metadata": ("/v1/responses", {"model": "m", "input": "hold", "metadata": NAMES}),
    "what is right": (CHAT, {**MESSAGES, "messages": [USER] * (MAX_ITEMS + 1)}),
}


@pytest.fixture(scope="module")
def app() -> Any:
    """vLLM's application for a generating model, bounded twice as two starts would."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m"])
    bound_invocations()
    bound_invocations()
    built = build_app(arguments, ("generate",), None)
    stop_at_first_error(built.routes)
    stop_at_first_error(built.routes)
    refuse_wrong_bodies(built)
    return built


def _errors(app: Any, path: str, body: Any) -> int:
    """How many pydantic found."""
    [field] = {route.body_field for route in app.routes if getattr(route, "path", "") == path}
    _, errors = field.validate(body, {}, loc=("body",))
    return len(errors or [])


def _invocation_validators(endpoint: Any) -> list[Any]:
    """Those that a route keeps, below its decorators."""
    names = inspect.getclosurevars(endpoint).nonlocals
    if "func" in names:
        return _invocation_validators(names["func"])
    return [validator for validator, _ in names["INVOCATION_VALIDATORS"]]


@pytest.mark.parametrize("case", WIDE)
def test_a_list_is_read_to_its_first_error(app: Any, case: str) -> None:
    """Each error costs, and is kept: a wrong item has up to hundreds of them."""
    path, body = WIDE[case]
    assert 0 < _errors(app, path, body) < MAX_ERRORS


@pytest.mark.parametrize("case", ["messages", "parts of a message", "values by name"])
def test_an_invocation_is_read_to_its_first_error(app: Any, case: str) -> None:
    """Its body is first tried as a chat."""
    [route] = [route for route in app.routes if getattr(route, "path", "") == "/invocations"]
    as_chat, *_ = _invocation_validators(route.endpoint)
    with pytest.raises(ValidationError) as caught:
        as_chat.validate_python(WIDE[case][1])
    assert caught.value.error_count() < MAX_ERRORS


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("case", ["messages", "parts of a message", "values by name"])
def test_a_body_that_vllm_makes_is_read_to_its_first_error(case: str) -> None:
    """Of the body of another route, such as Anthropic's."""
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest(**WIDE[case][1])
    assert caught.value.error_count() < MAX_ERRORS
    assert caught.value.title == "ChatCompletionRequest"


@pytest.mark.parametrize("case", WIDE)
def test_the_answer_is_vllms_400(app: Any, case: str) -> None:
    """In OpenAI's form."""
    path, body = WIDE[case]

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            return await client.post(path, json=body, timeout=DEADLINE_SECONDS)

    answer = asyncio.run(ask())
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**MESSAGES, "messages": [USER] * MAX_ITEMS}),
        ("/v1/messages", {**MESSAGES, "messages": [USER] * 1000}),
        ("/v1/completions", {"model": "m", "prompt": [1] * (MAX_ITEMS * 8)}),
        ("/v1/completions", {"model": "m", "prompt": ["hold"] * 1000}),
        ("/v1/responses", {"model": "m", "input": [USER] * 100}),
        ("/detokenize", {"model": "m", "tokens": [1] * (MAX_ITEMS * 8)}),
    ],
)
def test_what_was_taken_is_taken(app: Any, path: str, body: Any) -> None:
    """Numbers and texts may be as many as before."""
    assert _errors(app, path, body) == 0
