"""Requests with functions that several checks of the group make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.verify.trial import CHAT, Trial, UnexpectedStatusError

ToolBody = dict[str, Any]

ANSWER_TOKENS = 256
"""For one answer; a model that cannot end a call within them is not judged by that call."""

MARKUP = (
    "<tool_call",
    "</tool_call>",
    "<tool_response",
    "<function=",
    "<parameter=",
    "<arg_key>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|tool_call",
    "<|channel|>",
    "<|message|>",
    "<|im_end|>",
    "<\uff5ctool",
    "<\uff5cDSML",
)
"""How templates of models spell a call or the end of a turn."""


def function(name: str, description: str, parameters: Mapping[str, Any]) -> ToolBody:
    """A function that a model may call."""
    told = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": told}


def named(name: str) -> ToolBody:
    """The `tool_choice` that demands a call of this function."""
    return {"type": "function", "function": {"name": name}}


ASKED = "get_weather"
"""The function that a forced call is first tried with."""
WEATHER = function(
    "get_weather",
    "Get the current weather of a city.",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 24}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
ALARM = function(
    "set_alarm",
    "Set an alarm.",
    {
        "type": "object",
        "properties": {
            "hour": {"type": "integer", "minimum": 0, "maximum": 23},
            "is_daily": {"type": "boolean"},
        },
        "required": ["hour", "is_daily"],
        "additionalProperties": False,
    },
)
NAMES = ("get_weather", "set_alarm")
REQUIRED = "required"
"""The `tool_choice` that demands a call of any function."""
_CHOICE = "tool_choice"
_REFUSED = range(400, 500)


def bodies(trial: Trial) -> tuple[ToolBody, ...]:
    """One chat for each way in which a call comes about, and one that needs no call."""
    options: ToolBody = {"tools": [WEATHER, ALARM], "max_tokens": ANSWER_TOKENS}
    named_city = "What is the weather in Lisbon?"
    required_city = "I need the weather in Oslo."
    return (
        trial.chat_body(named_city, **options, tool_choice=named(ASKED)),
        trial.chat_body(required_city, **options, tool_choice=REQUIRED),
        trial.chat_body("What is the weather in Paris now? Use the tool.", **options),
        several(trial),
        trial.chat_body("Hello! Use no tool.", **options),
    )


def is_chosen(body: Mapping[str, Any]) -> bool:
    """Whether the model chooses for itself if it calls a function."""
    return _CHOICE not in body


async def taken(trial: Trial) -> list[ToolBody]:
    """Return the chats of `bodies`, and warn of those whose forced choice the server refuses."""
    refused = await trial.once(refused_choices)
    for said in refused.values():
        trial.warn(said)
    return [body for body in bodies(trial) if str(body.get(_CHOICE)) not in refused]


async def refused_choices(trial: Trial) -> dict[str, str]:
    """Return what the server says to each forced `tool_choice` that it refuses with a 4xx.

    Servers of models that think may refuse every one: they say what they cannot do, which is fair.
    """
    refused = dict[str, str]()
    for body in bodies(trial):
        if _CHOICE not in body:
            continue
        try:
            await trial.post(CHAT, body)
        except UnexpectedStatusError as error:
            if error.status not in _REFUSED:
                raise
            refused[str(body[_CHOICE])] = str(error)
    return refused


def several(trial: Trial) -> ToolBody:
    """A chat that asks for two calls in one answer."""
    said = (
        "Get the weather in Rome and in Tokyo. "
        "Call get_weather once for each city, both calls in this answer."
    )
    return trial.chat_body(said, tools=[WEATHER, ALARM], max_tokens=ANSWER_TOKENS)
