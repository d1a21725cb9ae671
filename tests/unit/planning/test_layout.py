"""Parallel sizes that a plan refuses, as `serve` does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from holdfast.errors import UsageError
from holdfast.planning.layout import refuse_layout


def layout(tensor: int = 1, decode: int = 1, prefill: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        prefill_context_parallel_size=prefill,
        decode_context_parallel_size=decode,
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "arguments"),
    [
        (40, 8, layout(4)),
        (40, 8, layout(8)),
        (40, 8, layout(40)),
        (12, 12, layout(6)),
        (64, 1, layout(64)),
        (128, 0, layout(8, decode=8)),
        (0, 0, layout(2)),
        (32, 8, layout(16, decode=2)),
        (32, 1, layout(8, decode=4)),
        (128, 0, layout(4, decode=2, prefill=2)),
        (128, 0, layout(4, decode=8, prefill=2)),
        (32, 8, layout(2, prefill=2)),
    ],
)
def test_a_layout_of_whole_heads_is_accepted(
    heads: int, kv_heads: int, arguments: SimpleNamespace
) -> None:
    """Ranks divide the KV heads, or several have the same one."""
    refuse_layout(arguments, heads, kv_heads)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "arguments", "cause", "remedy"),
    [
        (32, 8, layout(3), "size 3 does not divide the 32 attention", "use 1, 2, 4, 8, 16 or 32."),
        (40, 8, layout(5), "size 5 neither divides the 8 KV heads", "use 1, 2, 4, 8 or 40."),
        (40, 8, layout(10), "nor is a multiple of 8", "use 1, 2, 4, 8 or 40."),
        (40, 8, layout(20), "size 20 neither divides", "use 1, 2, 4, 8 or 40."),
        (128, 0, layout(8, decode=3), "3 does not fit --tensor-parallel-size 8.", "use 1, 2, 4 or"),
        (128, 0, layout(8, decode=4, prefill=2), "8 and --prefill-context-", "use 1, 2 or 16, or"),
        (32, 8, layout(8, decode=2), "size 8 with 8 KV heads", "use 1, or change --tensor-"),
        (32, 8, layout(4, decode=2), "size 4 with 8 KV heads", "use 1, or change --tensor-"),
        (32, 8, layout(16, decode=4), "size 16 with 8 KV heads", "use 1 or 2, or change"),
        (24, 8, layout(24, decode=2), "size 24 with 8 KV heads", "use 1 or 3, or change"),
    ],
)
def test_a_layout_with_parts_of_heads_is_refused(
    heads: int, kv_heads: int, arguments: SimpleNamespace, cause: str, remedy: str
) -> None:
    """The remedy lists the sizes that fit."""
    with pytest.raises(UsageError, match=cause) as refused:
        refuse_layout(arguments, heads, kv_heads)
    assert refused.value.remedy.startswith(remedy)
