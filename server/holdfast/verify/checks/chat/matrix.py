"""Many prompts in every mode of thinking: is each answer one?

What a model knows is only reported here; a baseline says how much it should be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any

import yaml

from holdfast.verify.answers import beginning, dig
from holdfast.verify.check import FROM_STANDARD, Check
from holdfast.verify.checks.chat.judges import broken_characters, loop, stray_scripts
from holdfast.verify.checks.sampling import sampling, takes_seeds
from holdfast.verify.records import equal_to
from holdfast.verify.target import Answer
from holdfast.verify.trial import CHAT, Trial
from holdfast.verify.waiting import together

_AT_ONCE = 4
_ROUNDS = {"standard": 1}
_MAX_ROUNDS = 3
_ANSWER_TOKENS = 384
_TEMPERATURE = 0.7
_OK = 200
Mode = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of prompts.yaml."""

    name: str
    text: str
    has: tuple[str, ...] = ()
    """Words of a right answer, in any case; empty if any answer is right."""
    scripts: frozenset[str] = frozenset()
    """What may be in it beside Latin: `CJK`, `CYRILLIC`."""
    is_standard: bool = False


@cache
def prompts() -> tuple[Prompt, ...]:
    """All of them, those of the profile `standard` first."""
    text = files(__package__).joinpath("prompts.yaml").read_text(encoding="utf-8")
    rows = [
        Prompt(
            name=row["name"],
            text=row["prompt"],
            has=tuple(map(str, row.get("has", ()))),
            scripts=frozenset(row.get("scripts", ())),
            is_standard=row.get("standard", False),
        )
        for row in yaml.safe_load(text)
    ]
    return tuple(sorted(rows, key=lambda row: not row.is_standard))


async def matrix(trial: Trial) -> None:
    """Each prompt, in each mode, in each round."""
    modes = await thinking_modes(trial)
    is_standard = trial.profile == "standard"
    asked = [one for one in prompts() if one.is_standard or not is_standard]
    rounds = range(_ROUNDS.get(trial.profile, _MAX_ROUNDS))
    is_seeded = len(rounds) > 1 and await takes_seeds(trial)
    room = asyncio.Semaphore(_AT_ONCE)

    async def judged(prompt: Prompt, mode: Mode, number: int) -> bool:
        options = sampling(_TEMPERATURE, number, is_seeded=is_seeded) if number else {}
        async with room:
            answer = await trial.chat(prompt.text, max_tokens=_ANSWER_TOKENS, **mode, **options)
        return _judge(trial, prompt, answer)

    cells = [(prompt, mode, number) for number in rounds for mode in modes for prompt in asked]
    found = await together(*(judged(*cell) for cell in cells))
    right = [has for (prompt, _, _), has in zip(cells, found, strict=True) if prompt.has]
    trial.measure("modes of thinking", len(modes))
    trial.measure("answers", len(cells))
    trial.score("answers with what was asked for", sum(right), len(right))
    trial.measure("answers that are none", len(trial.faults), limit=equal_to(0))


def _judge(trial: Trial, prompt: Prompt, answer: Answer) -> bool:
    """Note what is wrong with the answer, and return whether it has the words of a right one."""
    said = answer.content()
    for what in _faults(prompt, answer, said):
        trial.blame(f"{prompt.name}: {what}", answer)
    return all(word.casefold() in said.casefold() for word in prompt.has)


def _faults(prompt: Prompt, answer: Answer, said: str) -> Iterator[str]:
    if not said.strip() and not answer.is_cut_in_thought():
        yield "it only thinks, and does not answer" if answer.reasoning() else "it says nothing"
    for text in (said, answer.reasoning()):
        if repeated := loop(text):
            yield f"it goes round in a loop: {beginning(repeated, 60)!r}"
        if stray := stray_scripts(text, prompt.scripts):
            yield f"it has letters of {', '.join(sorted(stray))}"
        if broken := broken_characters(text):
            yield f"it has {broken} broken characters"


async def thinking_modes(trial: Trial) -> tuple[Mode, ...]:
    """The options of the modes that the model's template knows: a mode has a prompt of its own."""
    modes: dict[int, Mode] = {}
    kwargs = [{}, *({"enable_thinking": one, "thinking": one} for one in (True, False))]
    for given in kwargs:
        mode = {"chat_template_kwargs": given} if given else {}
        body = trial.chat_body("Hello!", max_tokens=1, **mode)
        answer = await trial.admitted(partial(trial.ask, CHAT, body))
        if answer.status == _OK:
            modes.setdefault(dig(answer.usage(), "prompt_tokens", kind=int), mode)
    return tuple(modes.values())


CHECKS = (
    Check(
        "matrix",
        "chat",
        matrix,
        "No answer is empty, loops, strays into another script or only thinks, in any mode.",
        profiles=FROM_STANDARD,
        needs=("chat",),
        deadline_seconds=3600.0,
    ),
)
