"""Do calls of functions come as clients need them? The group `tools`."""

from __future__ import annotations

from holdfast.verify.check import Check
from holdfast.verify.checks.tools import form, parser, probe, replay, scenes, schemas, trigger

CHECKS: tuple[Check, ...] = (
    *form.CHECKS,
    *parser.CHECKS,
    *schemas.CHECKS,
    *scenes.CHECKS,
    *trigger.CHECKS,
    *probe.CHECKS,
    *replay.CHECKS,
)
