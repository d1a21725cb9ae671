"""Refuses chat templates of clients where vLLM takes them without a check.

Nothing bounds what a template does. Every other route refuses one, also among the options for the
template, unless `--trust-request-chat-template` is given; `/v1/systemone` renders it
(`ReadPromptRequest`, 0.32, 0.33).
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError

from holdfast.patches.patch import original, replace

try:
    from vllm.entrypoints.generate.structured_decisions.protocol import ReadPromptRequest
except ImportError:  # where 0.33 has it
    from vllm.entrypoints.openai.decisions.strategies import ReadPromptRequest


def refuse_templates(*, trusts_templates: bool) -> None:
    """Refuse a client's template for a decision unless templates are trusted; again as the last."""
    as_vllm = original(ReadPromptRequest, "build_chat_params")

    def build_chat_params(self: Any, *args: Any, **options: Any) -> Any:
        given = (self.chat_template_kwargs or {}).get("chat_template")
        if given is not None and not trusts_templates:
            raise VLLMValidationError(
                "chat_template_kwargs has a chat_template, but --trust-request-chat-template is "
                "not set.",
                parameter="chat_template_kwargs",
            )
        return as_vllm(self, *args, **options)

    replace(ReadPromptRequest, "build_chat_params", build_chat_params)
