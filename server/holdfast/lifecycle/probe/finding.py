"""What a step hands back when it did not fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A proof, whole or limited, or the reason why there is none. A failure is raised instead."""

    tokens: int = 0
    limited: bool = False
    is_skipped: bool = False
    reason: str = ""
