"""How `openai_double` calls functions: it knows a few questions, and copies arguments it is told.

Its model writes calls as Hermes models do, and `parse` is its parser.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Body = Mapping[str, Any]

CALLS: Sequence[tuple[str, Sequence[tuple[str, Mapping[str, Any]]]]] = (
    (
        r"Rome and in Tokyo",
        [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Tokyo"})],
    ),
    (
        r"Paris and in Tokyo",
        [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Tokyo"})],
    ),
    (
        r"Cairo or Helsinki",
        [("get_weather", {"city": "Cairo"}), ("get_weather", {"city": "Helsinki"})],
    ),
    (r"Paris|Lisbon|Oslo", [("get_weather", {"city": "Paris"})]),
    (r"Bergen", [("get_weather", {"city": "Bergen"})]),
    (r"Porto", [("get_weather", {"city": "Porto"})]),
    (r"lanterns", [("get_stock", {"article": "lantern"})]),
    (r"anchors", [("get_stock", {"article": "anchor"})]),
    (r"And sails", [("get_stock", {"article": "sail"})]),
    (r"Łódź", [("get_train", {"start": "Łódź", "end": "Kraków"})]),
    (
        r"Design review",
        [
            (
                "create_event",
                {
                    "title": "Design review",
                    "start": "2026-10-01T15:00:00Z",
                    "attendees": [
                        {"name": "Ana", "email": "ana@example.com"},
                        {"name": "Bo", "email": "bo@example.com"},
                    ],
                    "location": {"city": "Berlin", "room": "4.12"},
                },
            )
        ],
    ),
    (
        r"Save a note",
        [
            (
                "save_note",
                {
                    "title": "Grüße aus Zürich",
                    "body": "Café ☕ in 東京 \N{EM DASH} naïve résumé 🚀",
                },
            )
        ],
    ),
    (r"time is it on the server", [("get_server_time", {})]),
    (r"record the larger number", [("record_answer", {"answer": "9.9"})]),
    (r"weather (in Q|for)|raining|cold is it|sunglasses|weather in H", [("get_weather", {})]),
    (r"in stock|still have|stock of|any tents|article oar", [("get_stock", {})]),
    (r"timer (for \d|of)|a timer\.$|timer, 45|Count down", [("set_timer", {})]),
    (r"train (from|between)|by train today|Next train", [("get_train", {})]),
)
"""What a user says, and the calls that follow."""

_LAST = re.compile(r".*<(user|tool)>(.*)\n<assistant>", re.DOTALL)
_TOLD = re.compile(r"with these arguments: (\{.*\})", re.DOTALL)
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>\n?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Parsed:
    """What the parser makes of a text."""

    content: str
    calls: tuple[Mapping[str, Any], ...] = ()


def written(body: Body, prompt: str, defect: str) -> str:
    """What the model writes to a prompt with functions; empty if it answers like any other."""
    found = _LAST.fullmatch(prompt)
    if not prompt.startswith("<tools>") or found is None:
        return ""
    role, said = found.groups()
    if role == "tool":
        is_deaf = defect == "results of functions ignored"
        return "I do not know." if is_deaf else f"It says: {said}"
    choice = body.get("tool_choice", "auto")
    known = next((calls for pattern, calls in CALLS if re.search(pattern, said)), ())
    if choice == "none" or (defect == "demanded calls not made" and choice != "auto"):
        return "I would rather talk."
    if isinstance(choice, Mapping):
        known = [(choice["function"]["name"], known[0][1] if known else {})]
        if told := _TOLD.search(said):
            known = [(known[0][0], json.loads(told[1]))]
    if not known and defect == "functions called for nothing" and "Hello" not in said:
        known = [("get_weather", {})]
    return "".join(_spelled(name, arguments) for name, arguments in known)


def parse(text: str, body: Body, defect: str) -> Parsed:
    """The calls in a text, and the rest of it."""
    if not body.get("tools"):
        return Parsed(text)
    found = _CALL.findall(text)
    calls = [_call(json.loads(one), body, defect) for one in found]
    content = _CALL.sub("", text)
    if calls and defect == "markup of calls left in the text":
        content = f"{content}<tool_call>"
    if defect == "the second call dropped":
        del calls[1:]
    if defect == "the second call left in the text as JSON":
        content += "\n".join(found[1:])
        del calls[1:]
    if defect == "streams without the last of several calls" and body.get("stream"):
        del calls[1:]
    if defect == "calls that share an id":
        calls = [{**call, "id": "call_1"} for call in calls]
    return Parsed(content, tuple(calls))


def finish_reason(parsed: Parsed, body: Body, reason: str, defect: str) -> str:
    """OpenAI says `tool_calls` where the model chose to call."""
    is_chosen = not isinstance(body.get("tool_choice"), Mapping)
    if defect == "calls that end by stop":
        return reason
    return "tool_calls" if parsed.calls and reason == "stop" and is_chosen else reason


def deltas(calls: Sequence[Mapping[str, Any]], defect: str) -> list[dict[str, Any]]:
    """The parts in which calls are streamed: the name first, then the arguments bit by bit."""
    parts: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        index = number + (defect == "streamed calls numbered from 1")
        function = call["function"]
        head = {"name": function["name"], "arguments": ""}
        parts.append({**call, "index": index, "function": head})
        text = function["arguments"]
        parts += [
            {"index": index, "function": {"arguments": text[at : at + 4]}}
            for at in range(0, len(text), 4)
        ]
    return parts


def _spelled(name: str, arguments: Mapping[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>\n"


def _call(found: Mapping[str, Any], body: Body, defect: str) -> dict[str, Any]:
    is_forced = isinstance(body.get("tool_choice"), Mapping)
    arguments = found["arguments"]
    if defect == "forced calls beside their schema" and is_forced:
        arguments = {**arguments, "surprise": 1}
    text = json.dumps(arguments, ensure_ascii=False)
    function = {"name": found["name"], "arguments": text}
    if defect == "arguments of forced calls cut" and is_forced:
        function["arguments"] = text[:-1]
    if defect == "forced calls of an unknown function" and is_forced:
        function["name"] = "anything"
    return {"id": f"call_{secrets.token_hex(4)}", "type": "function", "function": function}
