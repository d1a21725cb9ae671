"""Under which names does a server take the fields of a request?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.verify.records import Server

MAX_TOKENS = "max_tokens"
NEW_MAX_TOKENS = "max_completion_tokens"
"""What OpenAI calls it in chats since its models think."""
_CHATS = "/chat/completions"


def body_for(server: Server, path: str, body: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The body, with the newer name of `max_tokens` in a chat where the server refuses the old."""
    if body is None or not path.endswith(_CHATS) or MAX_TOKENS not in server.refusals:
        return body
    return {NEW_MAX_TOKENS if name == MAX_TOKENS else name: body[name] for name in body}
