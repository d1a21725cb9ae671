"""What commands write to standard output: a terminal, a file or a pipe that may be closed."""

from __future__ import annotations

import os
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO


def is_terminal(stream: TextIO) -> bool:
    """Whether it is a terminal that can do more than print lines."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}


def replace_what_has_no_code(stream: TextIO) -> None:
    """Have the stream write a question mark for a letter that its encoding does not have."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")


def say(line: str, stream: TextIO) -> None:
    """Write a line; if it cannot be written, as after `| head`, go on and write no other."""
    try:
        print(line, file=stream, flush=True)
    except OSError:
        # The line is still in the buffer, and Python's own flush at the end would fail too.
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
