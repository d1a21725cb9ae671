"""What a user asks of the checks, beside the profile."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.verify.baseline import Baseline


@dataclass(frozen=True, slots=True)
class Options:
    """The flags that checks look at."""

    baseline: Baseline | None = None
    """`--against`: what the server is compared with."""
