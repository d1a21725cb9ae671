"""What can the model do, compared with what it could? The group `skill`."""

from __future__ import annotations

from holdfast.verify.check import Check
from holdfast.verify.checks.skill import arithmetic, lm_eval, own_tasks, programs

CHECKS: tuple[Check, ...] = (
    *arithmetic.CHECKS,
    *programs.CHECKS,
    *own_tasks.CHECKS,
    *lm_eval.CHECKS,
)
