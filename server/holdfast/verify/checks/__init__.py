"""Every check, in the order in which they run: what is cheap and basic comes first.

A group is one module here, with a tuple `CHECKS`, or a package with such modules. It may use
another group that does not use it; `asking`, `sampling` and `twins` are for all of them. They run
in the process of `verify`.
"""

from __future__ import annotations

from holdfast.verify.check import Check
from holdfast.verify.checks import chat, oracle, self_agreement, skill, soak, survive, tools, wire

ALL: tuple[Check, ...] = (
    *wire.CHECKS,
    *chat.CHECKS,
    *tools.CHECKS,
    *self_agreement.CHECKS,
    *oracle.CHECKS,
    *skill.CHECKS,
    *survive.CHECKS,
    *soak.CHECKS,
)
