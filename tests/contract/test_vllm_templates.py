"""No route renders a template of a client that is not trusted."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.entrypoints.generate.structured_decisions.protocol import ReadPromptRequest
from vllm.exceptions import VLLMValidationError

from holdfast.patches.templates import refuse_templates

ENDLESS = "{% for _ in range(10**9) %}{% endfor %}"


def kwargs_of_decision(given: dict[str, Any] | None) -> dict[str, Any]:
    """The options with which a decision's prompt is rendered."""
    request = ReadPromptRequest(chat_template_kwargs=given)
    parameters = request.build_chat_params(None, "auto")
    return dict(parameters.get_apply_chat_template_kwargs())


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    as_vllm = ReadPromptRequest.build_chat_params
    monkeypatch.setattr(ReadPromptRequest, "build_chat_params", as_vllm)


def test_vllm_takes_the_template_of_a_decision() -> None:
    """Once it does not, there is nothing left to refuse."""
    assert kwargs_of_decision({"chat_template": ENDLESS})["chat_template"] == ENDLESS


def test_a_template_among_the_options_of_a_decision_is_refused() -> None:
    """As other routes refuse it."""
    refuse_templates(trusts_templates=False)
    with pytest.raises(VLLMValidationError, match="--trust-request-chat-template"):
        kwargs_of_decision({"chat_template": ENDLESS})


@pytest.mark.parametrize("given", [None, {}, {"chat_template": None}, {"depth": 3}])
def test_other_options_of_a_decision_are_taken(given: dict[str, Any] | None) -> None:
    """Null is not a template."""
    refuse_templates(trusts_templates=True)
    refuse_templates(trusts_templates=False)
    assert "chat_template" not in kwargs_of_decision(given)


def test_a_template_that_is_trusted_is_taken() -> None:
    """The flag says so for all routes."""
    refuse_templates(trusts_templates=False)
    refuse_templates(trusts_templates=True)
    assert kwargs_of_decision({"chat_template": ENDLESS})["chat_template"] == ENDLESS
