"""How `openai_double` parses the tokens of an answer on request, as vLLM can.

A stream tells everything with its last part, which no client can complain about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from double_tools import deltas

Body = Mapping[str, Any]
TextOf = Callable[[Sequence[int]], str]

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def derendered(body: Body, text_of: TextOf, defect: str) -> dict[str, Any]:
    """The answer to a request that is right."""
    if body.get("stream"):
        return _part(body, text_of, defect)
    ids = body["generate_response"]["choices"][0]["token_ids"]
    content, calls = _parsed(text_of(ids), body)
    message = {"role": "assistant", "content": content, "reasoning": None, "tool_calls": calls}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def _part(body: Body, text_of: TextOf, defect: str) -> dict[str, Any]:
    choice = body["generate_chunk"]["choices"][0]
    state = body.get("stream_state") or {"ids": [], "is_wide": False}
    ids = [*state["ids"], *choice["token_ids"]]
    is_wide = state["is_wide"] or len(choice["token_ids"]) > 1
    made: list[dict[str, Any]] = []
    if choice["finish_reason"]:
        content, calls = _parsed(text_of(ids), body)
        if is_wide and defect == "calls lost in parts of several tokens":
            calls = []
        made = [{"content": content}, *({"tool_calls": [one]} for one in deltas(calls, ""))]
    choices = [{"index": 0, "delta": one, "finish_reason": None} for one in made]
    return {"chunk": {"choices": choices}, "stream_state": {"ids": ids, "is_wide": is_wide}}


def _parsed(text: str, body: Body) -> tuple[str | None, list[dict[str, Any]]]:
    if not body["chat_request"].get("tools"):
        return text, []
    calls = [_call(number, json.loads(found)) for number, found in enumerate(_CALL.findall(text))]
    return _CALL.sub("", text) or None, calls


def _call(number: int, found: Body) -> dict[str, Any]:
    arguments = json.dumps(found["arguments"], ensure_ascii=False)
    function = {"name": found["name"], "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}
