"""Does the engine compile? A step that waits for a compiler takes minutes, and is no stall."""

from __future__ import annotations

import re
from collections.abc import Iterable

import psutil

_COMPILER = re.compile(
    r"(?:.+-)?(?:gcc|g\+\+|cc|c\+\+|clang|clang\+\+|cpp|as|ld|lld|ld\.\w+)(?:-[\d.]+)?"
    r"|cc1(?:plus)?|collect2|lto1|ninja|nvcc|cicc|cudafe\+\+|ptxas|fatbinary|nvlink|hipcc|rustc"
)
"""What torch's and FlashInfer's extensions, Triton and inductor start."""


def is_compiling(processes: Iterable[psutil.Process]) -> bool:
    """Whether one of `processes` is a compiler, an assembler, a linker or what drives them."""
    return any(_COMPILER.fullmatch(_name(process)) for process in processes)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except (psutil.Error, OSError):
        return ""
