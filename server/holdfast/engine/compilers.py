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
_INSIDE = re.compile(
    r"\b(?:triton/(?:compiler/|backends/\w+/compiler\.py)|cutlass/base_dsl/compiler\.py"
    r"|deep_gemm/jit|tilelang/engine/|torch/_inductor/(?:graph|scheduler|lowering|codegen/))"
)
"""Where a thread is that compiles without a process of its own: with the LLVM of Triton or of the
CuTe DSL, with NVRTC. What launches a kernel that is there already is in other files of theirs."""


def is_compiling(processes: Iterable[psutil.Process]) -> bool:
    """Whether one of `processes` is a compiler, an assembler, a linker or what drives them."""
    return any(_COMPILER.fullmatch(_name(process)) for process in processes)


def compiles_inside(stacks: str) -> bool:
    """Whether a thread of these stacks, as `stacks.stacks_of` has them, is in a compiler."""
    return bool(_INSIDE.search(stacks))


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except (psutil.Error, OSError):
        return ""
