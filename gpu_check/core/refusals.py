"""Does a locked manager refuse what vLLM's refuses, in its words?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpu_check.core.bench import Bench, view
from gpu_check.records import CheckFailedError, Measured
from holdfast.workspace.plan import MIB


def check(bench: Bench) -> Sequence[Measured]:
    """Scratch that is too small, and a persistent resource that warm-up did not make."""
    texts = [_texts(manager) for manager in (bench.vllm_manager(), bench.manager("deny"))]
    for theirs, ours in zip(*texts, strict=True):
        if theirs != ours:
            raise CheckFailedError(f"vLLM refuses with {theirs!r}, Holdfast with {ours!r}")
    return [Measured("refusal", texts[0][1])]


def _texts(manager: Any) -> list[str]:
    view(manager, MIB)
    if hasattr(manager, "seal"):  # without graphs, Holdfast's makes a resource however late
        manager.seal()
    manager.lock()
    asked: tuple[Callable[[], object], ...] = (
        lambda: view(manager, MIB),
        lambda: view(manager, 3 * MIB),
        lambda: manager.get_persistent("late", (16,), torch.uint8),
    )
    return [_text(ask) for ask in asked]


def _text(ask: Callable[[], object]) -> str:
    try:
        ask()
    except AssertionError as error:
        return str(error)
    return "answered"
