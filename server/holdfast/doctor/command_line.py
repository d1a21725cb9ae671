"""Which program does a container run, and with which arguments?

`shlex` splits the script of a shell; what the shell would substitute for `$` and backquotes is
unknown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import PurePath

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Stands for a value that comes from elsewhere: another machine, a secret, a shell."""
_SHELLS = {"sh", "bash", "dash", "ash"}
_MODULES = {"vllm.entrypoints.openai.api_server": "vllm"}
_PROGRAMS = {"holdfast", "vllm"}
_REPLACED_BY_SHELL = re.compile(r"[$`].*", re.DOTALL)
_MAX_QUOTED_LINES = 100
_SEPARATOR = re.compile(r"[();<>|&]+")


@dataclass(frozen=True, slots=True)
class Program:
    """The server that a container runs."""

    name: str
    """`holdfast` or `vllm`; empty for any other program."""
    arguments: tuple[str, ...]
    """The words after `serve` or `follow`, or all words if no program is named."""
    shell: str = ""
    """The shell that runs the server and keeps SIGTERM from it; empty if there is none."""
    is_follower: bool = False
    """Whether it is `holdfast follow`."""


def read_program(words: Sequence[str]) -> Program:
    """Find the server that the words of a command start."""
    script_at = _script_position(words)
    if script_at is None:
        return _find_program(words) or Program("", tuple(words))
    for command in _commands(words[script_at]):
        if found := _find_program(command):
            shell = "" if command[0] == "exec" else words[0]
            return replace(found, shell=shell)
    # In `sh -c 'exec "$@"' -- holdfast serve`, the command comes after the script.
    return _find_program(words[script_at + 1 :]) or Program("", ())


def known_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the flags that have an unknown value."""
    seen: list[str] = []
    for argument in arguments:
        if UNKNOWN not in argument:
            seen.append(argument)
        elif not argument.startswith("-") and seen and re.fullmatch("-[^=]+", seen[-1]):
            seen.pop()
    return seen


def _find_program(words: Sequence[str]) -> Program | None:
    for index, word in enumerate(words):
        following = list(words[index + 1 :])
        if PurePath(word).name in _PROGRAMS and following[:1] == ["serve"]:
            return Program(PurePath(word).name, tuple(following[1:]))
        if PurePath(word).name == "holdfast" and following[:1] == ["follow"]:
            return Program("holdfast", tuple(following[1:]), is_follower=True)
        if word == "-m" and following and (name := _MODULES.get(following[0])):
            return Program(name, tuple(following[1 + (following[1:2] == ["serve"]) :]))
    return None


def _script_position(words: Sequence[str]) -> int | None:
    """Return the index of a shell's script, after `-c` or `-lc`; None if no shell is started."""
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
    """Yield the commands of a script as lists of words.

    What is in quotes may extend over several lines if they start a server. Otherwise the line in
    which the quote begins is left out: an apostrophe in a here-document begins no quote.
    """
    lines = script.replace("\\\n", " ").splitlines()
    while lines:
        words, line_count = _first_words(lines[:_MAX_QUOTED_LINES])
        commands = list(_split(words))
        if line_count > 1 and not any(map(_find_program, commands)):
            commands, line_count = [], 1
        yield from commands
        lines = lines[line_count:]


def _split(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the commands between separators and redirections."""
    for is_separator, command in groupby(words, lambda word: bool(_SEPARATOR.fullmatch(word))):
        if not is_separator:
            yield [_REPLACED_BY_SHELL.sub(UNKNOWN, word) for word in command]


def _first_words(lines: Sequence[str]) -> tuple[list[str], int]:
    """Return the words of the first line, and the number of lines that its quotes extend over."""
    for line_count in range(1, len(lines) + 1):
        lexer = shlex.shlex("\n".join(lines[:line_count]), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        with suppress(ValueError):  # a quote is still open
            return list(lexer), line_count
    return [], 1  # a quote that nothing closes
