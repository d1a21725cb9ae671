"""Bodies that vLLM's routes fail on: ours to refuse, without an engine behind the routes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.exceptions import VLLMValidationError

from holdfast.engine.arguments import make_arg_parser
from holdfast.patches.front_end import accept_nulls
from holdfast.patches.request_bodies import bound_inputs, refuse_wrong_bodies
from holdfast.request_context import REQUEST, RequestContext

DEADLINE_SECONDS = 60
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hold"}]}


@pytest.fixture(scope="module")
def app() -> Any:
    """vLLM's application for a generating model."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m"])
    built = build_app(arguments, ("generate",), None)
    refuse_wrong_bodies(built)

    @built.get("/broken")  # type: ignore[untyped-decorator]  # FastAPI's, read as Any
    async def broken(_request: Request) -> None:
        raise KeyError("on purpose")

    return built


def _ask(app: Any, method: str, path: str, body: Any = None) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            return await client.request(method, path, json=body, timeout=DEADLINE_SECONDS)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "structured_outputs": "none"}),
        ("/v1/chat/completions", {**CHAT, "structured_outputs": 3}),
        ("/v1/chat/completions", {**CHAT, "structured_outputs": []}),
        ("/scale_elastic_ep", []),
        ("/scale_elastic_ep", "one"),
    ],
)
def test_a_value_of_a_wrong_type_is_the_fault_of_the_client(app: Any, path: str, body: Any) -> None:
    """It is a 400 in OpenAI's form, and echoes nothing of the code that met it."""
    answer = _ask(app, "POST", path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert "attribute" not in error["message"]


def test_a_failure_elsewhere_stays_one(app: Any) -> None:
    """What is not raised by the reading of a body is a 500 as before."""
    assert _ask(app, "GET", "/broken").status_code == 500


def test_nulls_of_a_responses_request_are_read_as_their_defaults() -> None:
    """OpenAI's clients may send them; vLLM's own answer takes none."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
    from vllm.sampling_params import SamplingParams

    accept_nulls()
    request = ResponsesRequest(model="m", input="hold", background=None, truncation=None)
    answer = ResponsesResponse.from_request(
        request, SamplingParams(max_tokens=4), "m", 0, [], "completed"
    )
    assert (answer.background, answer.truncation) == (False, "disabled")


MOST_INPUTS = 3
MESSAGE = {"role": "user", "content": "x"}


@pytest.fixture
def pooling(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What vLLM makes a context for, with the bound in front of it."""
    seen: list[Any] = []

    async def init_context(_self: Any, _processor: Any, request: Any, *_: Any) -> None:
        seen.append(request)

    monkeypatch.setattr(PoolingBaseServing, "_init_ctx", init_context)
    bound_inputs(MOST_INPUTS)
    bound_inputs(MOST_INPUTS)
    return seen


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ({"input": "text"}, 1),
        ({"input": [1, 2, 3, 4, 5]}, 1),
        ({"input": ["a", "b"]}, 2),
        ({"input": [[1], [2], [3]]}, 3),
        ({"input": ["a"] * 4}, None),
        ({"messages": [MESSAGE] * 9}, 1),
        ({"messages": [[MESSAGE]] * 4}, None),
        ({"texts": ["a"] * 4}, None),
        ({"inputs": [{"content": []}] * 4}, None),
        ({"data_1": "query", "data_2": ["a"] * 4}, None),
        ({"query": "query", "documents": ["a"] * 3}, 3),
        ({"query": "query", "documents": ["a"] * 4}, None),
    ],
)
def test_inputs_are_counted_before_a_job_is_made_for_each(
    pooling: list[Any], given: dict[str, Any], prompts: int | None
) -> None:
    """All requests wait for the thread that does these jobs."""
    context = RequestContext()
    kind: Any = type("Serving", (PoolingBaseServing,), {})
    kind.__abstractmethods__ = frozenset()
    serving = object.__new__(kind)

    async def ask() -> None:
        REQUEST.set(context)
        await serving._init_ctx(None, SimpleNamespace(**given), None)

    if prompts is None:
        with pytest.raises(VLLMValidationError, match="4 prompts"):
            asyncio.run(ask())
    else:
        asyncio.run(ask())
        assert context.prompts == prompts
    assert len(pooling) == (prompts is not None)
