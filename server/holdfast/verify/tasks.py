"""The user's own tasks: a file with a JSON object on each line, `prompt` and `expected`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.verify.baseline import LM_EVAL, OWN_TASKS
from holdfast.verify.records import Profile

_MAX_BYTES = 64 * 1024 * 1024
_DIGEST_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Task:
    """One line."""

    line: int
    """Its number in the file, from 1."""
    prompt: str
    expected: str


def read_tasks(path: Path, flag: str = "--tasks") -> tuple[Task, ...]:
    """The tasks of the file that `flag` names, in its order.

    Raises:
        UsageError: the file cannot be read, is too large, has no task, or a line is not one.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{flag}: {path} is too large.", remedy="give fewer tasks.")
        # Not `splitlines`: JSON has other separators of Unicode as they are.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{flag}: {path} cannot be read: {error}.", remedy="correct the path."
        ) from None
    tasks = tuple(
        _task(text, line, path, flag) for line, text in enumerate(lines, 1) if text.strip()
    )
    if not tasks:
        raise UsageError(f"{flag}: {path} contains no task.", remedy="put a task on each line.")
    return tasks


def score_key(name: str, profile: Profile, tasks: Sequence[Task]) -> str:
    """The name of a score with what was asked for it: only the same questions can be compared."""
    if name.startswith(LM_EVAL):
        return name
    asked = f"tasks {digest_of(tasks)}" if name == OWN_TASKS else f"profile {profile}"
    return f"{name} ({asked})"


def digest_of(tasks: Sequence[Task]) -> str:
    """What tells these tasks from others, in any order and on any lines of a file."""
    told = json.dumps(sorted((one.prompt, one.expected) for one in tasks))
    return hashlib.sha256(told.encode()).hexdigest()[:_DIGEST_CHARACTERS]


def _task(text: str, line: int, path: Path, flag: str) -> Task:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    wanted = [given.get(name) for name in ("prompt", "expected")] if isinstance(given, dict) else []
    match wanted:
        case [str(prompt), str(expected)] if prompt.strip() and expected.strip():
            return Task(line, prompt, expected)
    raise UsageError(
        f"{flag}: line {line} of {path} is not a task.",
        remedy='write it as {"prompt": "...", "expected": "..."}, with texts that are not empty.',
    )
