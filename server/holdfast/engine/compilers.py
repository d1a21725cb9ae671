"""Does the engine compile? A step that waits for a compiler takes minutes, and is no stall."""

from __future__ import annotations

import re
from collections.abc import Iterable

import psutil

_COMPILER = re.compile(
    r"(?:.+-)?(?:gcc|g\+\+|cc|c\+\+|clang|clang\+\+|cpp|as|ld|lld|ld\.\w+)(?:-[\d.]+)?"
    r"|cc1(?:plus)?|collect2|lto1|ninja|nvcc|nvrtc_compile|cicc|cudafe\+\+|ptxas|fatbinary|nvlink"
    r"|hipcc|rustc"
)
"""What torch's and FlashInfer's extensions, DeepGEMM, Humming, Triton and inductor start."""
_INSIDE = re.compile(
    r"\b(?:triton/(?:compiler/code_generator|backends/\w+/compiler)\.py"
    r"|cutlass/base_dsl/compiler\.py|tilelang/engine/"
    r"|torch/_inductor/(?:graph|scheduler|lowering|codegen/(?!multi_kernel)))"
    r"|\bcompile \(triton/compiler/compiler\.py"
    r"|\btriton/compiler/compiler\.py\", line \d+ in compile\b"
)
"""Where a thread is that compiles without a process of its own, for example with Triton's LLVM.

The same libraries launch kernels in other files or, as Triton does, in other functions of the same
file: a kernel that hangs is not a compiler.
"""


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
