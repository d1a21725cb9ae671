"""A flag as the parser, the environment, `--help` and the check of the documentation see it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from holdfast.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Raises our error for bad usage instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.", remedy=f"see `{self.prog} --help`.")


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
    declared = Flag(
        name, parse, metavar, shown or str(default), meaning, choices, is_switch, is_secret
    )
    return field(default=default, repr=not is_secret, metadata={"flag": declared})


def choice(name: str, choices: tuple[str, ...], default: str, meaning: str) -> Any:
    return flag(name, str, default, "|".join(choices), meaning, choices=choices)
