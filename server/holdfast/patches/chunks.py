"""Writes the chunks of a chat stream that carry only text, without pydantic models.

For every token vLLM builds three pydantic models, each validated in Python, and serialises them: 9
of the 60 to 80 microseconds that its front end spends on a token. Most chunks differ in one string.
Those are written here byte for byte as vLLM writes them. Every other chunk (the first, the last,
log-probs, tool calls, reasoning, token ids, usage) still consists of vLLM's models.
"""

from __future__ import annotations

import logging
from json.encoder import encode_basestring as quoted
from typing import Any

from vllm.entrypoints.openai.chat_completion import serving
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)

logger = logging.getLogger("holdfast.engine")

_DELTA = serving.DeltaMessage
_OBJECT = "chat.completion.chunk"
_CHOICE_FIELDS = {"index", "delta", "logprobs", "finish_reason", "token_ids"}
_CHUNK_FIELDS = {"id", "object", "created", "choices", "model"}
_OPTIONS = {"exclude_unset": True}


def write_text_directly() -> bool:
    """Make vLLM's chat streams write text directly; idempotent.

    Return False and change nothing if this version of vLLM writes such a chunk differently.
    """
    try:
        is_exact = _is_exact()
    except (TypeError, ValueError):  # other fields are required; pydantic's error is a ValueError
        is_exact = False
    if not is_exact:
        logger.info(
            "this version of vLLM builds its chunks differently, so the faster way is not used"
        )
        return False
    serving.DeltaMessage = delta
    serving.ChatCompletionResponseStreamChoice = choice
    serving.ChatCompletionStreamResponse = chunk
    return True


def delta(**fields: Any) -> Any:
    """Replaces vLLM's DeltaMessage."""
    content = fields.get("content")
    return _TextDelta(content) if type(content) is str and len(fields) == 1 else _DELTA(**fields)


def choice(**fields: Any) -> Any:
    """Replaces vLLM's ChatCompletionResponseStreamChoice."""
    text = fields["delta"]
    if type(text) is not _TextDelta:
        return ChatCompletionResponseStreamChoice(**fields)
    if fields.keys() == _CHOICE_FIELDS and (
        fields["logprobs"] is fields["finish_reason"] is fields["token_ids"] is None
    ):
        return _TextChoice(fields)
    return ChatCompletionResponseStreamChoice(**{**fields, "delta": text.model()})


def chunk(**fields: Any) -> Any:
    """Replaces vLLM's ChatCompletionStreamResponse."""
    choices = fields["choices"]
    if len(choices) != 1 or type(choices[0]) is not _TextChoice:
        return ChatCompletionStreamResponse(**fields)
    if fields.keys() == _CHUNK_FIELDS and fields["object"] == _OBJECT:
        return _TextChunk(fields)
    return ChatCompletionStreamResponse(**{**fields, "choices": [choices[0].model()]})


class _TextDelta:
    """The attributes that vLLM reads of a DeltaMessage with only content."""

    __slots__ = ("content",)
    reasoning = None
    tool_calls = ()

    def __init__(self, content: str) -> None:
        self.content = content

    def model(self) -> Any:
        return _DELTA(content=self.content)


class _TextChoice:
    """The attributes that vLLM reads of a choice with such a delta."""

    __slots__ = ("fields",)
    finish_reason = None
    tool_calls = ()

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def model(self) -> Any:
        fields = {**self.fields, "delta": self.fields["delta"].model()}
        return ChatCompletionResponseStreamChoice(**fields)


class _TextChunk:
    """A chunk with such a choice. If vLLM sets an attribute on it, it becomes a model again."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def model_dump_json(self, **options: Any) -> str:
        """Return what the model's method of this name returns."""
        fields = self._fields
        if len(self.__dict__) > 1 or options != _OPTIONS:
            return str(self._model().model_dump_json(**options))
        text: _TextChoice = fields["choices"][0]
        return (
            f'{{"id":{quoted(fields["id"])},"object":"{_OBJECT}","created":{fields["created"]},'
            f'"model":{quoted(fields["model"])},"choices":[{{"index":{text.fields["index"]},'
            f'"delta":{{"content":{quoted(text.fields["delta"].content)}}},'
            '"logprobs":null,"finish_reason":null,"token_ids":null}]}'
        )

    def _model(self) -> Any:
        model = ChatCompletionStreamResponse(
            **{**self._fields, "choices": [self._fields["choices"][0].model()]}
        )
        for name, value in self.__dict__.items():
            if name != "_fields":
                setattr(model, name, value)
        return model


def _is_exact() -> bool:
    """Whether a chunk written here equals the one that vLLM's models write."""
    text = choice(
        index=1,
        delta=delta(content='a"\\\n\x7fü'),
        logprobs=None,
        finish_reason=None,
        token_ids=None,
    )
    made = chunk(id="chatcmpl-1", object=_OBJECT, created=7, choices=[text], model="m")
    return bool(made.model_dump_json(**_OPTIONS) == made._model().model_dump_json(**_OPTIONS))  # noqa: SLF001 - ours
