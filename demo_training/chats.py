"""Chats and plain texts as tokens, in the form that the tokenizer's chat template gives them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from demo_training.lessons import Lesson, Tool, Turn
from holdfast.demo.tokenizer import EOS_ID, IM_END_ID, IM_START_ID

NEWLINE = list(b"\n")
ASSISTANT = "assistant"
_OPENED = [IM_START_ID, *f"{ASSISTANT}\n".encode()]


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens, from `first_taught` on those that the model has to predict."""

    tokens: tuple[int, ...]
    first_taught: int
    only_read: tuple[range, ...] = ()
    """Places of later tokens that it doesn't have to predict."""


def prompt_tokens(lesson: Lesson) -> list[int]:
    """What the server makes of the lesson's chat, up to where the reply begins."""
    tokens: list[int] = []
    if lesson.tools:
        lines = "".join(f"{signature(tool)}\n" for tool in lesson.tools)
        tokens += _turn_tokens(Turn("system", f"<tools>\n{lines}</tools>"))
    for turn in lesson.turns:
        tokens += _turn_tokens(turn)
    return [*tokens, *_OPENED]


def example_of(lesson: Lesson) -> Example:
    """The whole chat; the reply and its end are taught."""
    prompt = prompt_tokens(lesson)
    return Example((*prompt, *lesson.reply.encode(), IM_END_ID), len(prompt))


def example_of_dialogue(lesson: Lesson) -> Example:
    """The whole chat; each reply in it is taught, not only the last."""
    tokens: list[int] = []
    read: list[range] = []
    began = 0
    for turn in (*lesson.turns, Turn(ASSISTANT, lesson.reply)):
        told = _turn_tokens(turn)
        if turn.role == ASSISTANT:
            read.append(range(began, len(tokens) + len(_OPENED)))
            began = len(tokens) + len(told) - len(NEWLINE)
        tokens += told
    prompt, *later = read
    return Example(tuple(tokens[:began]), prompt.stop, tuple(later))


def example_of_text(sentences: Iterable[str]) -> Example:
    """Plain text without a chat; all of it is taught, and where it ends."""
    return Example((*" ".join(sentences).encode(), EOS_ID), 1)


def signature(tool: Tool) -> str:
    """One line for a function; short, because a token is a byte."""
    listed = ", ".join(
        f"{name}{'?' if name in tool.optional else ''}: {kind}"
        for name, kind in tool.arguments.items()
    )
    return f"{tool.name}({listed})"


def _turn_tokens(turn: Turn) -> list[int]:
    text = f"{turn.role}\n{turn.content}"
    return [IM_START_ID, *text.encode(), IM_END_ID, *NEWLINE]
