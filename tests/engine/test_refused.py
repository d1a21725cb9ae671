"""What a real engine's server refuses, and that nothing of it goes on in the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from servers import Server

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("learned")]

JSON = {"content-type": "application/json"}
ENDLESS_TOKENS = 6000
"""They take longer than a request may, also where a step takes half a millisecond."""


@pytest.fixture(scope="module")
def limited(first_start: Server) -> Server:
    """A server with short limits, READY."""
    return first_start


def endless(server: Server, *, is_stream: bool) -> dict[str, Any]:
    """A request that takes longer than it may."""
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": "Go on."}],
        "max_completion_tokens": ENDLESS_TOKENS,
        "ignore_eos": True,
        "stream": is_stream,
    }


def asked(server: Server, body: dict[str, Any]) -> httpx.Response:
    """The answer to a chat."""
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


@contextmanager
def given_up(server: Server) -> Iterator[None]:
    """Assert on leaving that the engine works on nothing, and was not let finish meanwhile."""

    def generated() -> float:
        name = "vllm:generation_tokens_total"
        return sum(value for (found, _), value in server.metrics().items() if found == name)

    before = generated()
    yield
    server.until(lambda: server.status["progress"]["running"] == 0, "idle engine")
    assert generated() - before < ENDLESS_TOKENS


def test_an_answer_that_takes_too_long_is_504(limited: Server) -> None:
    """And the engine works on it no longer."""
    with given_up(limited):
        answer = asked(limited, endless(limited, is_stream=False))
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")


def test_a_stream_that_takes_too_long_ends_with_an_error(limited: Server) -> None:
    """It has no `[DONE]`, and the engine works on it no longer."""
    with given_up(limited):
        answer = asked(limited, endless(limited, is_stream=True))
    *_, last, end = answer.text.split("\n\n")
    assert (answer.status_code, end) == (200, "")
    assert json.loads(last.partition("data: ")[2])["error"]["code"] == 504


def test_the_client_sees_a_stream_that_was_cut_as_an_error(limited: Server) -> None:
    """OpenAI's own client raises it."""
    client = openai.OpenAI(base_url=f"{limited.url}/v1", api_key="none", max_retries=0, timeout=60)
    body = endless(limited, is_stream=True)
    extra = {"ignore_eos": body.pop("ignore_eos")}
    with pytest.raises(openai.APIError, match="took longer"):
        for _ in client.chat.completions.create(**body, extra_body=extra):
            pass


@pytest.mark.parametrize(
    ("method", "path", "request_", "status"),
    [
        ("POST", "/v1/chat/completions", {"content": b"[" * 100_000, "headers": JSON}, 400),
        ("POST", "/v1/chat/completions", {"content": b"{", "headers": JSON}, 400),
        ("POST", "/v1/chat/completions", {"content": b"{}", "headers": {}}, 415),
        ("POST", "/v1/chat/completions", {"data": {"a": "b"}}, 415),
        ("POST", "/v1/chat/completions", {"content": b"x" * 1_100_000, "headers": JSON}, 413),
        ("GET", "/v1/chat/completions", {}, 405),
        ("DELETE", "/livez", {}, 405),
        ("GET", "/v1/no/such/path", {}, 404),
        ("GET", "/" + "x" * 9000, {}, 414),
        ("GET", "/v1/models", {"headers": {"a": "b" * 70_000}}, 431),
    ],
)
def test_every_refusal_is_an_openai_error(
    limited: Server, method: str, path: str, request_: dict[str, Any], status: int
) -> None:
    """Whether we make it or vLLM does."""
    answer = httpx.request(method, f"{limited.url}{path}", timeout=60, **request_)
    assert answer.status_code == status
    assert answer.json()["error"].keys() >= {"message", "type", "code"}
    assert answer.json()["error"]["code"] == status


def test_refusals_are_counted(limited: Server) -> None:
    """Each under its reason."""
    before = limited.metric("requests_refused_total", reason="body_too_large")
    httpx.post(f"{limited.url}/v1/completions", content=b"x" * 1_100_000, timeout=60)
    assert limited.metric("requests_refused_total", reason="body_too_large") == before + 1
