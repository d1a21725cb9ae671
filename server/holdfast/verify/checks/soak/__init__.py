"""Does the server go on for hours as it began? The group `soak`.

`driving` makes the soak; the other checks judge what it has seen, also if it was cut short.
"""

from __future__ import annotations

from holdfast.verify.check import Check
from holdfast.verify.checks.soak import canary, driving, latency, memory, workspace

CHECKS: tuple[Check, ...] = (
    *driving.CHECKS,
    *workspace.CHECKS,
    *memory.CHECKS,
    *latency.CHECKS,
    *canary.CHECKS,
)
