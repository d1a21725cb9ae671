"""Requests that several checks of the group make."""

from __future__ import annotations

from typing import Any

from holdfast.verify.trial import CHAT, COMPLETIONS, SkippedError, Trial

PROMPT = "Count: one, two, three, four,"
"""Any model goes on from it."""


def either(trial: Trial, prompt: str, **options: Any) -> tuple[str, dict[str, Any]]:
    """Path and body of a completion, or of a chat where there are no completions."""
    able = trial.server.abilities
    if "completions" in able:
        return COMPLETIONS, trial.completion_body(prompt, **options)
    if "chat" in able:
        return CHAT, trial.chat_body(prompt, **options)
    raise SkippedError("the server answers neither chats nor completions")


def each(trial: Trial, prompt: str, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    """Path and body for each of both APIs that there is."""
    able = trial.server.abilities
    bodies = {
        "chat": (CHAT, trial.chat_body(prompt, **options)),
        "completions": (COMPLETIONS, trial.completion_body(prompt, **options)),
    }
    return [asked for name, asked in bodies.items() if name in able]
