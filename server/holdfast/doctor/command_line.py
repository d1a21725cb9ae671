"""Which program does a container run, and with which arguments? Read from its words.

A shell's script is taken apart by `shlex`; what the shell would make of `$` and the like is not
known here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePath

UNSEEN = "\N{REPLACEMENT CHARACTER}"
"""Stands where a value comes from elsewhere: another machine, a secret, a shell."""
_SHELLS = {"sh", "bash", "dash", "ash"}
_MODULES = {"holdfast": "holdfast", "vllm.entrypoints.openai.api_server": "vllm"}
_PROGRAMS = {"holdfast", "vllm"}
_REPLACED_BY_SHELL = re.compile(r"[$`].*", re.DOTALL)
_SEPARATOR = re.compile(r"[();<>|&]+")


@dataclass(frozen=True, slots=True)
class Program:
    """A server that is started."""

    name: str
    """`holdfast` or `vllm`; empty if the words name neither."""
    arguments: tuple[str, ...]
    """What comes after `serve`, or all words if no program is named."""
    shell: str = ""
    """The shell that stays between it and SIGTERM; empty if none does."""


def read_program(words: Sequence[str]) -> Program:
    """The server that the words start."""
    script_at = _script_position(words)
    if script_at is None:
        return _of_command(words) or Program("", tuple(words))
    for command in _commands(words[script_at]):
        if found := _of_command(command):
            shell = "" if command[0] == "exec" else words[0]
            return Program(found.name, found.arguments, shell)
    # `sh -c 'exec "$@"' -- holdfast serve` has it behind the script.
    return _of_command(words[script_at + 1 :]) or Program("", ())


def seen_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments without flags whose value is not known."""
    seen: list[str] = []
    for argument in arguments:
        if UNSEEN not in argument:
            seen.append(argument)
        elif not argument.startswith("-") and seen and re.fullmatch("-[^=]+", seen[-1]):
            seen.pop()
    return seen


def _of_command(words: Sequence[str]) -> Program | None:
    for index, word in enumerate(words):
        following = list(words[index + 1 :])
        if PurePath(word).name in _PROGRAMS and following[:1] == ["serve"]:
            return Program(PurePath(word).name, tuple(following[1:]))
        if word == "-m" and following and (name := _MODULES.get(following[0])):
            return Program(name, tuple(following[1 + (following[1:2] == ["serve"]) :]))
    return None


def _script_position(words: Sequence[str]) -> int | None:
    """Where the script of a shell is, if the words start one; `-lc` names it too."""
    if not words or PurePath(words[0]).name not in _SHELLS:
        return None
    options = (
        index
        for index, word in enumerate(words[1:], start=1)
        if re.fullmatch(r"-[a-z]*c[a-z]*", word)
    )
    position = next(options, len(words)) + 1
    return position if position < len(words) else None


def _commands(script: str) -> Iterator[list[str]]:
    """The words between the separators and redirections of a script, line by line."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        with suppress(ValueError):  # a quote that is not closed in its line
            for is_separator, words in groupby(
                lexer, lambda word: bool(_SEPARATOR.fullmatch(word))
            ):
                if not is_separator:
                    yield [_REPLACED_BY_SHELL.sub(UNSEEN, word) for word in words]
