"""Does one token sequence get the same log-probs on every code path? The group `self`.

The reference is one prefill of the sequence, alone and cold: `judging`. What no code path can show
is a fault that all of them share, such as a wrong weight; for that there is the group `oracle`.
"""

from __future__ import annotations

from holdfast.verify.check import Check
from holdfast.verify.checks.self_agreement import (
    adapters,
    batches,
    contexts,
    decodes,
    needles,
    repeats,
    restarts,
    sampling,
)

CHECKS: tuple[Check, ...] = (
    *repeats.CHECKS,
    *decodes.CHECKS,
    *contexts.CHECKS,
    *batches.CHECKS,
    *adapters.CHECKS,
    *sampling.CHECKS,
    *needles.CHECKS,
    *restarts.CHECKS,
)
