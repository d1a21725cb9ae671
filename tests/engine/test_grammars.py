"""A grammar that would end the server is refused, and everybody goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from servers import Server

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("demo")]

DEEP = "(" * 40_000 + "a" + ")" * 40_000
DEADLY = {"type": "object", "properties": {"a": {"type": "string", "pattern": DEEP}}}
TOOL = {"name": "look", "parameters": DEADLY, "strict": True}
TOOLS = [{"type": "function", "function": TOOL}]
LOOK = {"type": "function", "function": {"name": "look"}}
NAMED = {"name": "x", "schema": DEADLY}
FORMAT = {"type": "json_schema", "json_schema": NAMED}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", CHAT | {"response_format": FORMAT}),
        ("chat/completions", CHAT | {"tools": TOOLS, "tool_choice": "required"}),
        ("chat/completions", CHAT | {"tools": TOOLS, "tool_choice": LOOK}),
        (
            "chat/completions",
            CHAT | {"tools": TOOLS, "tool_choice": "auto", "response_format": FORMAT},
        ),
        (
            "completions",
            {
                "prompt": "hi",
                "response_format": {
                    "type": "structural_tag",
                    "format": {"type": "json_schema", "json_schema": DEADLY},
                },
            },
        ),
        ("completions", {"prompt": "hi", "structured_outputs": {"json": DEADLY}}),
        ("responses", {"input": "hi", "text": {"format": {"type": "json_schema", **NAMED}}}),
    ],
    ids=["format", "tool", "named-tool", "format-and-tools", "tag", "completion", "response"],
)
def test_a_grammar_that_crashes_is_refused(demo: Server, route: str, body: dict[str, Any]) -> None:
    """By every route that takes one, while others are answered by the same engine."""
    limits = {"max_output_tokens": 8} if route == "responses" else {"max_tokens": 8}
    plain = {"model": demo.model, **CHAT, "max_tokens": 64}
    generation = demo.metric("engine_generation")
    with ThreadPoolExecutor() as neighbours:
        answers = [
            neighbours.submit(httpx.post, f"{demo.url}/v1/chat/completions", json=plain, timeout=60)
            for _ in range(4)
        ]
        refused = demo.post(f"/v1/{route}", {"model": demo.model, **limits, **body})
    assert refused.status_code == 400, refused.text
    assert "crashed" in refused.text
    assert {one.result().status_code for one in answers} == {200}
    assert demo.metric("engine_generation") == generation
    assert demo.process.poll() is None


def test_a_grammar_that_grows_slow_ends_with_its_request(demo: Server) -> None:
    """Its first tokens are cheap, so a trial accepts it; then it is refused before any engine."""
    body = {
        "model": demo.model,
        "prompt": "hi",
        "structured_outputs": {"grammar": 'root ::= s\ns ::= s s | "a"'},
        "max_tokens": 1500,
        "ignore_eos": True,
        "min_tokens": 1500,
    }
    plain = {"model": demo.model, **CHAT, "max_tokens": 64}
    generation = demo.metric("engine_generation")
    with ThreadPoolExecutor() as neighbours:
        growing = neighbours.submit(
            httpx.post, f"{demo.url}/v1/completions", json=body, timeout=300
        )
        assert demo.post("/v1/chat/completions", plain).status_code == 200
    assert growing.result().status_code == 400, growing.result().text
    assert "too much CPU time per token" in growing.result().text
    again = demo.post("/v1/completions", body)
    assert again.status_code == 400
    assert "took an engine too much CPU time" in again.text
    assert demo.metric("engine_generation") == generation
