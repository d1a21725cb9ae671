"""Kernels that do what vLLM's do, launched in a process of their own; prints what they wrote."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.errors import InterpreterError

COUNT = 8


@triton.jit  # type: ignore[untyped-decorator]  # Triton is Any to us
def marks_bits(written: Any, words: Any, limit: Any, COUNT: tl.constexpr) -> None:  # noqa: N803
    """Write 1 for each bit that is set, below `limit`: a mask of a scalar and of a reshaped one."""
    word = tl.load(words + tl.arange(0, 1))
    is_set = ((word[:, None] >> tl.arange(0, COUNT)[None, :]) & 1) == 1
    is_set = is_set.reshape(COUNT)
    place = tl.arange(0, COUNT)
    tl.store(written + place, 1, mask=(limit > 0) & is_set & (place < limit))


@triton.jit  # type: ignore[untyped-decorator]  # Triton is Any to us
def casts_counters(written: Any, count: Any) -> None:
    """Write each number as what a cast of the counter gives."""
    for index in tl.range(0, count):
        tl.store(written + index, index.to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]  # Triton is Any to us
def finds_nans(written: Any, given: Any, COUNT: tl.constexpr) -> None:  # noqa: N803
    """Write 1 for each number that is none."""
    place = tl.arange(0, COUNT)
    is_nan = libdevice.isnan(tl.load(given + place)).to(tl.int1)
    tl.store(written + place, is_nan.to(tl.int32))


def nans() -> list[int]:
    """Those among eight numbers."""
    given = torch.zeros(COUNT)
    given[2] = torch.nan
    written = torch.full((COUNT,), -1, dtype=torch.int32)
    finds_nans[(1,)](written, given, COUNT=COUNT)
    return [int(one) for one in written]


def bits() -> list[int]:
    """Those of a word, the lowest first, without the two highest."""
    written = torch.zeros(COUNT, dtype=torch.int32)
    marks_bits[(1,)](written, torch.tensor([0b10110101], dtype=torch.int32), 6, COUNT=COUNT)
    return [int(one) for one in written]


def numbers() -> list[int]:
    """From 0 on."""
    written = torch.full((COUNT,), -1)
    casts_counters[(1,)](written, COUNT)
    return [int(one) for one in written]


def main() -> None:
    """Launch all."""
    done = {}
    for launch in (bits, numbers, nans):
        try:
            done[launch.__name__] = launch()
        except InterpreterError as error:
            sys.stderr.write(f"{error}\n")
    sys.stdout.write(json.dumps(done))


if __name__ == "__main__":
    main()
