"""Does the server outlive what goes wrong, without losing an answer? The group `survive`."""

from __future__ import annotations

from holdfast.verify.check import Check
from holdfast.verify.checks.survive import clients, death, limits, overload, unharmed

CHECKS: tuple[Check, ...] = (
    *limits.CHECKS,
    *overload.CHECKS,
    *clients.CHECKS,
    *death.CHECKS,
    *unharmed.CHECKS,
)
"""The engine is killed last, and then the whole run is judged."""
