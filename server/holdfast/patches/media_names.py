"""Keeps the names that clients give to images and other media apart by API key.

A client may name an image (`uuid`), and later send only the name. vLLM takes that name for the hash
of the image, in its cache of processed media and in the prefix cache (`MultiModalHasher`, 0.32). So
a client that knew or guessed a name of another's image could ask about that image, and one that
knew an image could put another in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from vllm.entrypoints.pooling.base import io_processor

from holdfast.patches.patch import original, replace
from holdfast.request_context import current_request

try:
    from vllm.renderers.chat_utils import chat_message
except ImportError:  # one module in 0.32
    from vllm.renderers import chat_utils as chat_message

_PARSE = ("parse_chat_message_content_part", "_parse_chat_message_content_part")
"""What reads a part of a message, in 0.33 and in 0.32."""


def own_media_names() -> None:
    """Have each API key name media of its own; idempotent."""
    (name,) = (one for one in _PARSE if hasattr(chat_message, one))
    as_vllm = original(chat_message, name)

    def parse_chat_message_content_part(part: Any, *args: Any, **options: Any) -> Any:
        if isinstance(part, dict) and part.get("uuid") is not None:
            part = {**part, "uuid": own_name(str(part["uuid"]), current_request().key)}
        return as_vllm(part, *args, **options)

    replace(chat_message, name, parse_chat_message_content_part)
    _render_in_context()


def _render_in_context() -> None:
    """Have prompts of pooling models rendered in the context of their request.

    vLLM 0.32 renders them in a thread that has none, so the key would not be known there.
    """
    as_vllm = original(io_processor, "make_async")

    def make_async(function: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
        def within(context: Context, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return context.run(function, *given, **named)

        run = as_vllm(within, *args, **options)
        return lambda *given, **named: run(copy_context(), given, named)

    replace(io_processor, "make_async", make_async)


def own_name(given: str, key: str) -> str:
    """Return a name that no other key can give, and that is the hash of no media."""
    digest = hashlib.sha256(repr((key, given)).encode("utf-8", "surrogatepass"))
    return f"client-{digest.hexdigest()}"
