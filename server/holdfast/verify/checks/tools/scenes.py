"""Does the model use functions sensibly, turn after turn, and each time it is asked?

What a model should do is its own matter, so it is only told; a baseline says how much it should be.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import yaml

from holdfast.verify.answers import MalformedError, dig_or, read_json
from holdfast.verify.check import FROM_STANDARD, Check
from holdfast.verify.checks.sampling import sampling, takes_seeds
from holdfast.verify.checks.tools.asking import ANSWER_TOKENS, ToolBody, function
from holdfast.verify.checks.tools.calls import Turn, raw_calls, whole_turn
from holdfast.verify.records import Request
from holdfast.verify.trial import Trial, UnexpectedStatusError
from holdfast.verify.waiting import together

_AT_ONCE = 4
_FULL_TRIES = 5
_TEMPERATURE = 0.7
_REFUSED = range(400, 500)
_TRIES = MappingProxyType({"standard": 1})


@dataclass(frozen=True, slots=True)
class Scene:
    """A conversation, and what the model must do in it."""

    name: str
    turns: tuple[Mapping[str, Any], ...]
    """Each has `user`, `calls` or `answer`, as scenes.yaml explains."""


@cache
def _document() -> Mapping[str, Any]:
    text = files(__package__).joinpath("scenes.yaml").read_text(encoding="utf-8")
    document: Mapping[str, Any] = yaml.safe_load(text)
    return document


@cache
def all_functions() -> tuple[ToolBody, ...]:
    """The functions of every scene."""
    return tuple(
        function(
            name,
            told["description"],
            {
                "type": "object",
                "properties": told["properties"],
                "required": [*told["properties"]],
                "additionalProperties": False,
            },
        )
        for name, told in _document()["functions"].items()
    )


@cache
def all_scenes() -> tuple[Scene, ...]:
    """The scenes of scenes.yaml."""
    return tuple(Scene(one["name"], tuple(one["turns"])) for one in _document()["scenes"])


@cache
def triggers() -> Mapping[str, str]:
    """For each question, the function that should be called; empty if none should."""
    return {
        said: "" if name == "none" else name
        for name, questions in _document()["triggers"].items()
        for said in questions
    }


async def scenes(trial: Trial) -> None:
    """Each scene, several times: pass^k is the share of those that pass each time."""
    tries = _TRIES.get(trial.profile, _FULL_TRIES)
    is_seeded = tries > 1 and await takes_seeds(trial)
    room = asyncio.Semaphore(_AT_ONCE)
    refusals: dict[str, str] = {}

    async def passed(scene: Scene, number: int) -> bool:
        options = sampling(_TEMPERATURE, number, is_seeded=is_seeded) if number else {}
        async with room:
            try:
                return await _plays(trial, scene, options)
            except UnexpectedStatusError as error:
                if error.status not in _REFUSED or not _has_several_calls(error.request):
                    raise
                refusals[scene.name] = str(error)
                return False

    known = all_scenes()
    outcomes = await together(
        *(together(*(passed(scene, number) for number in range(tries))) for scene in known)
    )
    for name, said in refusals.items():
        trial.warn(f"the server refuses the scene {name!r}: {said}")
    trial.score(f"scenes, pass^{tries}", sum(map(all, outcomes)), len(known))
    if tries > 1:
        trial.score(f"scenes, pass@{tries}", sum(map(any, outcomes)), len(known))


async def _plays(trial: Trial, scene: Scene, options: Mapping[str, Any]) -> bool:
    """Whether the model does what the scene asks for, turn by turn; the first try is greedy."""
    messages: list[ToolBody] = []
    for turn in scene.turns:
        if "user" in turn:
            messages.append({"role": "user", "content": turn["user"]})
            continue
        answer = await trial.chat(
            messages, tools=[*all_functions()], max_tokens=ANSWER_TOKENS, **options
        )
        made = whole_turn(answer)
        if not _is_right(made, turn):
            return False
        # Servers of models that think may demand the thoughts of every turn around a call.
        said = {"content": made.content or None, **answer.thoughts()}
        messages.append({"role": "assistant", **said})
        if made.calls:
            made_raw = raw_calls(answer)
            messages[-1]["tool_calls"] = made_raw
            messages += _results(made, made_raw, turn["calls"])
    return True


def _has_several_calls(request: Request) -> bool:
    """Whether a turn has more than one call, which a chat template need not take."""
    said: list[ToolBody] = dig_or(request.body, "messages", default=[])
    return any(len(one.get("tool_calls", ())) > 1 for one in said)


def _is_right(made: Turn, turn: Mapping[str, Any]) -> bool:
    if "answer" in turn:
        said = made.content.casefold()
        return not made.calls and all(word.casefold() in said for word in turn["answer"])
    return len(made.calls) == len(turn["calls"]) and all(
        _wanted(call.name, call.arguments, turn["calls"]) for call in made.calls
    )


def _results(
    made: Turn, made_raw: Sequence[Any], wanted: Sequence[Mapping[str, Any]]
) -> list[ToolBody]:
    """What the functions return, in the order of the calls."""
    results = []
    for call, raw in zip(made.calls, made_raw, strict=True):
        returned = (_wanted(call.name, call.arguments, wanted) or wanted[0])["returns"]
        content = json.dumps(returned, ensure_ascii=False)
        results.append({"role": "tool", "tool_call_id": raw.get("id"), "content": content})
    return results


def _wanted(
    name: str, arguments: str, calls: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The call among those of the scene that this one is."""
    try:
        given = read_json(arguments)
    except MalformedError:
        return None
    if not isinstance(given, dict):
        return None
    return next(
        (one for one in calls if one["name"] == name and _is_meant(given, one["arguments"])), None
    )


def _is_meant(given: Mapping[str, Any], meant: Mapping[str, Any]) -> bool:
    """Whether the arguments are those of the scene: texts may be longer, and in any case."""
    return all(
        str(value).casefold() in str(given.get(name)).casefold()
        if isinstance(value, str)
        else given.get(name) == value
        for name, value in meant.items()
    )


CHECKS = (
    Check(
        "scenes",
        "tools",
        scenes,
        "In conversations, the model calls the right functions, and reports their results.",
        profiles=FROM_STANDARD,
        needs=("tools",),
        deadline_seconds=3600.0,
    ),
)
