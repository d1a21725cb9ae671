"""Does the model answer sense, and the same again? The group `chat`."""

from __future__ import annotations

from holdfast.verify.check import Check
from holdfast.verify.checks.chat import matrix, repeats, smoke

CHECKS: tuple[Check, ...] = (*smoke.CHECKS, *repeats.CHECKS, *matrix.CHECKS)
