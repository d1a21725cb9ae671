"""What a flag is, the parser of a command's flags, and the parsers of their values.

A parser of values raises a ValueError that says what was expected. Sizes are bytes, times are
seconds.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from holdfast.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
}
_MAX_BYTES = 1 << 50
_MAX_TOKENS = 1 << 31
_MAX_DEPTH = 256
"""Code that reads a body level by level may take several of Python's 1000 calls for each."""
_YEAR_SECONDS = 31_536_000
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


_WRONG_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.+)\)$")
"""What argparse says; its parser has no other place that knows both the word and the choices."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        meant = _likely_choice(message)
        see = f"see `{self.prog} --help`."
        remedy = f"did you mean {meant}? If not, {see}" if meant else see
        raise UsageError(f"{message}.", remedy=remedy)


def command_parser(command: str, usage: str, description: str, epilog: str) -> Parser:
    """Return the parser of `holdfast COMMAND`, which may leave flags to another parser."""
    prog = f"holdfast {command}"
    return Parser(
        prog=prog,
        usage=f"{prog} {usage}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An abbreviation of one of our flags could be a full flag of vLLM's.
        allow_abbrev=False,
    )


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of `holdfast serve`, as the parser, the environment and the documentation see it."""

    name: str
    parse: Callable[[str], Any]
    metavar: str
    shown_default: str
    meaning: str
    choices: tuple[str, ...] = ()
    is_switch: bool = False
    is_secret: bool = False
    """Whether its value is never shown, not even when it is wrong."""

    @property
    def variable(self) -> str:
        """The environment variable that sets the same value."""
        return "HOLDFAST_" + self.destination.upper()

    @property
    def destination(self) -> str:
        """The attribute of the parsed namespace that holds the value."""
        return self.name.removeprefix("--").replace("-", "_")

    def read(self, text: str, source: str) -> Any:
        """Parse `text`; a UsageError names `source` if it is invalid."""
        try:
            if self.choices and text not in self.choices:
                raise ValueError("expected one of " + ", ".join(self.choices))  # noqa: TRY301 - one exit for every wrong value
            return self.parse(text)
        except ValueError as error:
            shown = "" if self.is_secret else f", not {text!r}"
            raise UsageError(
                f"{source}: {error}{shown}.",
                remedy=f"see `holdfast serve --help` for {self.name}.",
            ) from None


def flag(  # noqa: PLR0913 - one row of the table of flags
    name: str,
    parse: Callable[[str], Any],
    default: Any,
    metavar: str,
    meaning: str,
    *,
    shown: str = "",
    choices: tuple[str, ...] = (),
    is_switch: bool = False,
    is_secret: bool = False,
) -> Any:
    """Return a dataclass field that carries its flag; `shown` is the default in `--help`."""
    declared = Flag(
        name, parse, metavar, shown or str(default), meaning, choices, is_switch, is_secret
    )
    return field(default=default, repr=not is_secret, metadata={"flag": declared})


def choice(name: str, choices: tuple[str, ...], default: str, meaning: str) -> Any:
    """Return a dataclass field that carries a flag with a few possible values."""
    return flag(name, str, default, "|".join(choices), meaning, choices=choices)


def size_bytes(text: str) -> int:
    """Parse a size such as `64MiB`, `1.5GB` or `1048576`; ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("expected a size such as 64MiB or 1.5GiB, or a number of bytes")
    size = int(Decimal(match[1]) * _UNITS[match[2]])
    if size >= _MAX_BYTES:
        raise ValueError("expected a size below 1 PiB")
    return size


def positive_size_bytes(text: str) -> int:
    """Parse a size of at least one byte, as `size_bytes` does; ValueError for anything else."""
    if not (size := size_bytes(text)):
        raise ValueError("expected a size above 0")
    return size


def memory_marks(text: str) -> tuple[int, int, int]:
    """Parse three sizes that do not increase, such as `4GiB,2GiB,1GiB`; ValueError otherwise."""
    sizes = [size_bytes(part) for part in text.split(",")]
    if len(sizes) != 3 or sizes != sorted(sizes, reverse=True):
        raise ValueError("expected three sizes, none larger than the one before it")
    return sizes[0], sizes[1], sizes[2]


def headroom_fraction(text: str) -> float:
    """Parse a fraction from 0 to 10; ValueError for anything else."""
    value = _number(text)
    if not 0 <= value <= 10:
        raise ValueError("expected a fraction from 0 to 10, for example 0.10")
    return value


def positive_seconds(text: str) -> float:
    """Parse a time above 0 and below a year; ValueError for anything else."""
    value = _seconds(text)
    if not 0 < value < _YEAR_SECONDS:
        raise ValueError("expected a number of seconds, more than 0 and less than a year")
    return value


def seconds(text: str) -> float:
    """Parse a time of 0 or more, below a year; ValueError for anything else."""
    value = _seconds(text)
    if not 0 <= value < _YEAR_SECONDS:
        raise ValueError("expected a number of seconds, 0 or more and less than a year")
    return value


def token_count(text: str) -> int:
    """Parse a count of at least 2, the shortest prompt and answer; ValueError for anything else."""
    if not re.fullmatch("[0-9]{1,10}", text) or not 2 <= int(text) < _MAX_TOKENS:
        raise ValueError("expected a number of tokens, 2 or more")
    return int(text)


def count(text: str) -> int:
    """Parse a whole number from 0; ValueError for anything else."""
    return _whole_number(text, 0)


def positive_count(text: str) -> int:
    """Parse a whole number from 1; ValueError for anything else."""
    return _whole_number(text, 1)


def nesting_depth(text: str) -> int:
    """Parse a depth from 1 to `_MAX_DEPTH`; ValueError for anything else."""
    return _whole_number(text, 1, _MAX_DEPTH)


def port_number(text: str) -> int:
    """Parse a port that others can be told, so not 0; ValueError for anything else."""
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise ValueError("expected a port from 1 to 65535")
    return int(text)


def is_node_name(text: str) -> bool:
    """Return whether it can name a node, in metrics too: 1 to 64 letters, digits, `.`, `_`, `-`."""
    return re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) is not None


def node_name(text: str) -> str:
    """Parse the name of a node; ValueError if it cannot be one."""
    if not is_node_name(text):
        raise ValueError("expected 1 to 64 letters, digits, dots, dashes or underscores")
    return text


def directory_or_none(text: str) -> Path | None:
    """Parse a directory, or None for the word `none`; ValueError if it cannot be a path."""
    if not text or "\0" in text:
        raise ValueError("expected a directory, or none")
    if text == "none":
        return None
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(
            "expected a directory; the home directory of that user is not known"
        ) from None


def file_path(text: str) -> Path:
    """Parse the path of a file; ValueError if it cannot be one."""
    if not text or "\0" in text:
        raise ValueError("expected a file")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("expected a file; the home directory of that user is not known") from None


def key(text: str) -> str:
    """Parse a key that a header can carry; the ValueError for anything else does not repeat it."""
    if not re.fullmatch("[!-~]+", text):
        raise ValueError("expected a key of visible ASCII characters without spaces")
    return text


def boolean(text: str) -> bool:
    """Parse a yes or no as people write it in an environment; ValueError for anything else."""
    if text.lower() not in _TRUE | _FALSE:
        raise ValueError("expected 1 or 0")
    return text.lower() in _TRUE


def _likely_choice(message: str) -> str:
    """Return the choice that is most similar to the wrong one; empty if none is."""
    if (found := _WRONG_CHOICE.search(message)) is None:
        return ""
    choices = [choice.strip(" '") for choice in found[2].split(",")]
    return next(iter(get_close_matches(found[1], choices, 1)), "")


def _whole_number(text: str, least: int, most: int = 999_999) -> int:
    if not re.fullmatch("[0-9]{1,6}", text) or not least <= int(text) <= most:
        raise ValueError(f"expected a number from {least} to {most}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return _number(text)
    except ValueError:
        raise ValueError("expected a number of seconds, for example 600") from None


def _number(text: str) -> float:
    # float() would also accept NaN, which passes every range check, `1_0`, and digits of other
    # scripts.
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", text.strip().lower()):
        raise ValueError("expected a number")
    return float(text)
