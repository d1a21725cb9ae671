"""What a recorded run says, as far as checks compare with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.verify.records import Limit, Number, at_least

_STANDARD_ERRORS = 2


@dataclass(frozen=True, slots=True)
class Baseline:
    """A recorded run."""

    scores: Mapping[str, Number] = field(default_factory=dict)
    """Each number with `of` that a check measured, by its name."""


def limit_of(share: Number, baseline: Baseline | None) -> Limit | None:
    """What a share must reach: that of the baseline, less two standard errors of the difference.

    The standard error is that of two proportions with the same true value, so it is not 0 where
    one of the runs got everything right. None if the baseline does not know the share.
    """
    recorded = baseline.scores.get(share.name) if baseline else None
    if recorded is None or not recorded.of or not share.of:
        return None
    right = (recorded.value * recorded.of + share.value * share.of) / 100
    pooled = right / (recorded.of + share.of)
    error = math.sqrt(pooled * (1 - pooled) * (1 / recorded.of + 1 / share.of))
    return at_least(recorded.value - _STANDARD_ERRORS * 100 * error, "baseline")
