"""The group `wire`: each defect of a server is found by the check that is meant for it, alone."""

from __future__ import annotations

import pytest

from double_defects import Defect
from holdfast.verify.checks import wire
from holdfast.verify.checks.wire import streams
from holdfast.verify.records import CheckStatus
from openai_double import OpenAIDouble
from verified import not_passed, results

OWN = [check for check in wire.CHECKS if not check.packages]
"""Other people's tools see the same defects again."""

FOUND_BY: dict[Defect, str] = {
    "a model listed twice": "models",
    "a model without its time": "models",
    "chats without a role": "chat",
    "completions that call themselves chats": "completion",
    "choices all numbered 0": "choices",
    "a logprob for all tokens but one": "logprobs",
    "a logprob that is not a number": "logprobs",
    "a greedy token that is not the likeliest": "logprobs",
    "completion_tokens off by one": "usage",
    "total_tokens off by one": "usage",
    "streamed completion_tokens off by one": "usage",
    "prompt_tokens off by one": "prompt_tokens",
    "streamed prompt_tokens off by one": "prompt_tokens",
    "cut answers that end by stop": "length",
    "a stop text that is kept": "stop",
    "a stop text that leaks into streams": "stop",
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
    "streams that go on without their client": "client_leaves",
    "a stream that drops a token": "stream_twin",
    "a stream that breaks characters": "stream_twin",
    "answers mixed up": "own_answers",
    "wrong requests are 500": "refusals",
    "refusals without a form": "refusals",
    "negative max_tokens taken": "refusals",
    "responses are 500": "responses",
    "messages from the user": "messages",
    "embeddings are 500": "other_routes",
}


def test_a_server_that_is_well_passes() -> None:
    """Nothing is blamed, warned of or skipped."""
    made = results(OpenAIDouble(), OWN)
    assert {name: (one.status, one.reason) for name, one in made.items() if one.reason} == {}


@pytest.mark.parametrize("defect", FOUND_BY)
def test_a_defect_is_found_by_its_check(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other one fails; those that need what is broken are inconclusive."""
    monkeypatch.setattr(streams, "_FREED_SECONDS", 0.5)
    made = results(OpenAIDouble(defect), OWN)
    failed = {name for name, status in not_passed(made).items() if status is CheckStatus.FAILED}
    assert failed == {f"wire.{FOUND_BY[defect]}"}
    assert CheckStatus.WARNED not in not_passed(made).values()


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
