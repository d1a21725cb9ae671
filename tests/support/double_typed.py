"""What `openai_double` says in the Responses and the Messages API, at once and as typed events."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from double_model import Generated

Body = dict[str, Any]


def response_of(made: Generated, asked_tokens: int) -> Body:
    """An answer of the Responses API."""
    written = len(made.tokens)
    usage = {
        "input_tokens": asked_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        "id": f"resp_{secrets.token_hex(8)}",
        "object": "response",
        "created_at": 1,
        "model": "double",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": "incomplete" if made.finish_reason == "length" else "completed",
        "output": [_item("completed", [_text(made.text)])],
        "usage": {**usage, "total_tokens": asked_tokens + written},
    }


def response_events(made: Generated, response: Body, defect: str) -> Iterator[Body]:
    """Its stream."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    tokens = made.tokens[1:] if defect == "streamed responses that drop a token" else made.tokens
    text = "".join(tokens)
    part = {"output_index": 0, "content_index": 0}
    events: list[Body] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": _item("in_progress", [])},
        {"type": "response.content_part.added", **part, "part": _text("")},
        *({"type": "response.output_text.delta", **part, "delta": one} for one in tokens),
        {"type": "response.output_text.done", **part, "text": text},
        {"type": "response.content_part.done", **part, "part": _text(text)},
        {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": _item("completed", [_text(text)]),
        },
        {
            "type": f"response.{response['status']}",
            "response": {**response, "output": [_item("completed", [_text(text)])]},
        },
    ]
    if defect == "response events before their item":
        events[2:5] = [events[4], *events[2:4]]
    if defect == "streamed responses without usage":
        events[-1]["response"]["usage"] = None
    if defect == "streamed responses that end with another text":
        events[-1]["response"]["output"] = response["output"] * 2
    if defect == "streamed responses without an end":
        events.pop()
    yield from ({**event, "sequence_number": i} for i, event in enumerate(events))


def message_of(made: Generated, asked_tokens: int) -> Body:
    """An answer of the Messages API."""
    return {
        "id": f"msg_{secrets.token_hex(8)}",
        "type": "message",
        "role": "assistant",
        "model": "double",
        "content": [{"type": "text", "text": made.text}],
        "stop_reason": "max_tokens" if made.finish_reason == "length" else "end_turn",
        "usage": {"input_tokens": asked_tokens, "output_tokens": len(made.tokens)},
    }


def message_events(made: Generated, message: Body, defect: str) -> Iterator[Body]:
    """Its stream."""
    usage = message["usage"]
    start: Body = {"content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    tokens = made.tokens[1:] if defect == "streamed messages that drop a token" else made.tokens
    events: list[Body] = [
        {"type": "message_start", "message": {**message, **start}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        *(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": one},
            }
            for one in tokens
        ),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": message["stop_reason"], "stop_sequence": None},
            "usage": usage,
        },
        {"type": "message_stop"},
    ]
    if defect == "streamed messages whose block stays open":
        del events[-3]
    if defect == "streamed messages without usage":
        del events[-2]["usage"]
    if defect == "streamed messages without an end":
        events.pop()
    yield from events


async def framed(events: Iterable[Body], *, has_names: bool) -> AsyncIterator[bytes]:
    """The bytes of the events."""
    for event in events:
        name = f"event: {event['type']}\n" if has_names else ""
        yield f"{name}data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def _item(status: str, content: list[Body]) -> Body:
    head = {"id": "msg_1", "type": "message", "role": "assistant"}
    return {**head, "status": status, "content": content}


def _text(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": []}
