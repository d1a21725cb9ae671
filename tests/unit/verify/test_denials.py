"""Which errors say that a server takes no chats; `test_survey` shows what follows from one."""

from __future__ import annotations

import pytest

from holdfast.verify.denials import denies_chats

OF_VLLM = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a "
    "chat template if the tokenizer does not define one."
)
OF_TRANSFORMERS = (
    "Cannot use chat template functions because tokenizer.chat_template is not set and no template "
    "argument was passed!"
)
NO_CHATS = (
    OF_VLLM,
    OF_TRANSFORMERS,
    "tokenizer.chat_template is not set",
    "The model's tokenizer does not have a chat_template",
    "the tokenizer doesn't have a chat template",
    "Template error: template not found",
    "The model does not support Chat Completions API",
    "this model cannot support the chat API",
    "This is not a chat model and thus not supported in the v1/chat/completions endpoint.",
    "Chat completions are disabled",
    "Chat is disabled",
    "Chat completions endpoint is not supported for this model",
)
OTHER_REASONS = (
    "the model does not support temperature=0 in chat",
    "the model does not support max_tokens with chat completions",
    "The model does not support chat completions with temperature=0",
    "chat completions are not supported with max_completion_tokens below 16",
    "Failed to render the default chat template: 'raise_exception' is undefined",
    "the default chat template raised: Conversation roles must alternate",
    "the model does not support chat_template_kwargs",
    "out of memory",
)


@pytest.mark.parametrize("said", NO_CHATS)
def test_a_server_may_say_that_it_takes_no_chats(said: str) -> None:
    """As vLLM, SGLang, transformers and OpenAI say it of a base model."""
    assert denies_chats(said)


@pytest.mark.parametrize("said", OTHER_REASONS)
def test_a_server_may_refuse_one_chat(said: str) -> None:
    """Every check of chats would be skipped, and the run would pass without them."""
    assert not denies_chats(said)
