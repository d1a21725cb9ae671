"""Sizes as the findings name them."""

from __future__ import annotations

from holdfast.workspace.plan import MIB

GIB = 1024 * MIB


def gib(size_bytes: int) -> str:
    """The size in GiB, with one decimal."""
    return f"{size_bytes / GIB:.1f} GiB"
