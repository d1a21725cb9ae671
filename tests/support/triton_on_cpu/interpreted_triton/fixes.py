"""What Triton's interpreter (3.9) lacks of what compiled kernels may do, and vLLM's do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter


def install() -> None:
    """Fix the interpreter of this process."""
    builder = interpreter.InterpreterBuilder
    builder.create_splat = _of_booleans_too(builder.create_splat)
    interpreter._patch_lang_core = _with_counters_that_cast(interpreter._patch_lang_core)
    libdevice.isnan = _isnan
    interpreter._patch_lang = _once_for_each_kernel(interpreter._patch_lang)


def _isnan(number: Any) -> Any:
    """What the library of a device would find; the interpreter has none, and gets nothing."""
    return number != number  # noqa: PLR0124 - only a NaN differs from itself


def _of_booleans_too(spread: Callable[..., Any]) -> Callable[..., Any]:
    """A comparison's result keeps the type of what was compared, here numbers.

    Spread over a block it would be numbers indeed, which are not a mask.
    """

    def create_splat(self: Any, block: Any, scalar: Any) -> Any:
        if scalar.data.dtype == np.bool_:
            scalar = interpreter.TensorHandle(scalar.data, tl.int1)
        return spread(self, block, scalar)

    return create_splat


class _Counter(int):
    """The counter of a loop, which is a tensor in a compiled kernel; the interpreter has an int."""

    def to(self, dtype: Any, **named: Any) -> Any:
        """The counter as a tensor of `dtype`."""
        return interpreter.interpreter_semantic.to_tensor(int(self)).to(dtype, **named)


def _with_counters_that_cast(patch: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def patched(language: Any, scope: Any) -> None:
        patch(language, scope)
        counted = language.range

        def counting(*arguments: Any, **named: Any) -> Iterator[_Counter]:
            return map(_Counter, counted(*arguments, **named))

        scope.set_attr(language, "range", counting)

    return patched


def _once_for_each_kernel(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter patches Triton's language at every launch, which is most of what one takes.

    It takes the patches back after each, for kernels that are compiled; here none is.
    """

    @functools.cache
    def patched(function: Any) -> None:
        patch(function)

    def kept(function: Any) -> Any:
        patched(function)
        return interpreter._LangPatchScope()  # with nothing to take back

    return kept
