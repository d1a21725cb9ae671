"""Does the server speak the protocol? The group `wire`, whatever the model answers."""

from __future__ import annotations

from holdfast.verify.check import Check
from holdfast.verify.checks.wire import (
    catalogue,
    counts,
    endings,
    forms,
    leaving,
    messages,
    packages,
    refusals,
    responses,
    routes,
    streams,
    twins,
)

CHECKS: tuple[Check, ...] = (
    *catalogue.CHECKS,
    *forms.CHECKS,
    *counts.CHECKS,
    *endings.CHECKS,
    *streams.CHECKS,
    *leaving.CHECKS,
    *twins.CHECKS,
    *refusals.CHECKS,
    *responses.CHECKS,
    *messages.CHECKS,
    *routes.CHECKS,
    *packages.CHECKS,
)
