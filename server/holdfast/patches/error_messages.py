"""Bounds the time that vLLM takes to remove paths from its error messages, and their length.

Most of these messages repeat what the client sent, such as the name of a model. For each slash of a
path and each space of an indentation, vLLM's patterns try all that follow (`sanitize_message`,
0.32, 0.33): minutes for a name of 100 KB, on the event loop and with the interpreter's lock held.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.serve.exception_handling import utils

from holdfast.patches.patch import original, replace

MAX_CHARACTERS = 4096
_CUT = " ... (cut)"
_LONG_RUNS = (
    (re.compile(r"(?:/[\w\-]++){32,}+"), "<path>"),
    (re.compile(r"\s{32,}+"), " "),
)
"""What the patterns would try too often, and what is put in its place."""


def bound_error_messages() -> None:
    """Shorten error messages before vLLM looks for paths in them; idempotent.

    Every module that binds `sanitize_message` gets it, as they share the `re` that it looks up.
    """
    as_vllm = original(utils, "re")

    def sub(pattern: str, replacement: str, message: str) -> Any:
        return as_vllm.sub(pattern, replacement, shortened(message))

    replace(utils, "re", SimpleNamespace(sub=sub))


def shortened(message: str) -> str:
    """Return a message that is not too long, and has no path or space that is."""
    if len(message) > MAX_CHARACTERS:
        message = message[: MAX_CHARACTERS - len(_CUT)] + _CUT
    for run, replacement in _LONG_RUNS:
        message = run.sub(replacement, message)
    return message
