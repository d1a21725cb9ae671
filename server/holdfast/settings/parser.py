"""The parser of a command: it answers bad usage with our error, and knows no abbreviation."""

from __future__ import annotations

import argparse
from typing import NoReturn

from holdfast.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Answers bad usage with our error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.", remedy=f"see `{self.prog} --help`.")


def command_parser(command: str, usage: str, description: str, epilog: str) -> Parser:
    """The parser of `holdfast COMMAND`, which may leave flags to another one."""
    prog = f"holdfast {command}"
    return Parser(
        prog=prog,
        usage=f"{prog} {usage}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An abbreviation of ours could be a whole flag of vLLM's.
        allow_abbrev=False,
    )
