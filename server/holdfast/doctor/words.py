"""Which program does a container run, and with which arguments? Read from its words.

A shell's script is taken apart as far as its words are plain; what the shell would make of the rest
is not known here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

UNSEEN = "\N{REPLACEMENT CHARACTER}"
"""Stands where a value comes from elsewhere: another machine, a secret, a shell."""
_SHELLS = {"sh", "bash", "dash", "ash"}
_MODULES = {"holdfast": "holdfast", "vllm.entrypoints.openai.api_server": "vllm"}
_PROGRAMS = {"holdfast", "vllm"}
_REPLACED_BY_SHELL = re.compile(r"[$`].*", re.DOTALL)
_SEPARATORS = frozenset(";&|()\n")
_REDIRECTIONS = frozenset("<>&")


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
    """The words of each command of a script, without redirections."""
    command: list[str] = []
    is_target = False
    for word in _tokens(script):
        if is_target:
            is_target = False
        elif _REDIRECTIONS.issuperset(word) and not _SEPARATORS.issuperset(word):
            is_target = True
        elif _SEPARATORS.issuperset(word):
            if command:
                yield command
            command = []
        else:
            command.append(_REPLACED_BY_SHELL.sub(UNSEEN, word))
    if command:
        yield command


def _tokens(script: str) -> list[str]:
    text = re.sub(r"^\s*#.*$", "", script.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text.strip(), posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:  # a quote that is not closed, or a document that follows
        return []
