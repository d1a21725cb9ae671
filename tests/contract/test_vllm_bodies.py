"""Bodies that vLLM's routes fail on: ours to refuse, without an engine behind the routes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from vllm.entrypoints.generate.structured_decisions import serving as decisions
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.exceptions import VLLMValidationError

from holdfast.engine.launch.arguments import make_arg_parser
from holdfast.patches.front_end import accept_nulls
from holdfast.patches.request_bodies import bound_inputs, bound_options, refuse_wrong_bodies
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


LIMITS = {"max_questions": 64, "max_options": 26, "labeled": True}


def _questions(kind: str, criteria: Any) -> Any:
    spec = SimpleNamespace(type=kind, instructions="", criteria=criteria, model_extra=None)
    return SimpleNamespace(questions={"q": spec})


class Unread:
    """A level or a name whose text nobody may ask for."""

    def __str__(self) -> str:
        raise AssertionError("an option was made of it")


@pytest.mark.parametrize(
    ("kind", "criteria"),
    [
        ("score", [Unread()] * 27),
        ("choice", {Unread(): None for _ in range(27)}),
        ("noul", {Unread(): None for _ in range(27)}),
    ],
)
def test_options_are_counted_before_they_are_made(kind: str, criteria: Any) -> None:
    """A body may have millions of them."""
    bound_options()
    bound_options()
    with pytest.raises(decisions.StructuredDecisionError, match="at most 26 options"):
        decisions.parse_questions(_questions(kind, criteria), SimpleNamespace(**LIMITS))


def test_a_question_with_few_options_is_asked() -> None:
    """As by vLLM itself, and with its own limit for a kind of question."""
    bound_options()
    few = _questions("choice", {"a": None, "b": "c"})
    [question] = decisions.parse_questions(few, SimpleNamespace(**LIMITS))
    assert [one.name for one in question.options] == ["a", "b"]
    with pytest.raises(decisions.StructuredDecisionError, match="at most 10 options"):
        decisions.parse_questions(_questions("score", [*range(11)]), SimpleNamespace(**LIMITS))
