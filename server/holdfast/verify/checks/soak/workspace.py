"""Do Holdfast's workspaces stay as they were at READY?"""

from __future__ import annotations

from holdfast.verify.check import ONLY_SOAK, Check
from holdfast.verify.checks.soak.history import history_of
from holdfast.verify.course import since_the_first
from holdfast.verify.records import equal_to
from holdfast.verify.trial import InconclusiveError, Trial

_HOUR_SECONDS = 3600.0


async def workspace(trial: Trial) -> None:
    """Count what Holdfast counted during the soak."""
    told = (await history_of(trial)).told
    if len(told) < 2:
        raise InconclusiveError("Holdfast reported fewer than two workspace counts")
    growths = list(since_the_first([facts for _, facts in told], "growths"))
    rejections = list(since_the_first([facts for _, facts in told], "rejections"))
    trial.measure("growths", growths[-1], limit=equal_to(0))
    trial.measure("rejections", rejections[-1], limit=equal_to(0))
    hours = [at_seconds / _HOUR_SECONDS for at_seconds, _ in told]
    trial.draw("growths", "time [h]", "growths", zip(hours, growths, strict=True), equal_to(0))


CHECKS = (
    Check(
        "workspace",
        "soak",
        workspace,
        "Under the load, no workspace of Holdfast grows, and none is refused.",
        profiles=ONLY_SOAK,
        needs=("holdfast",),
        is_afterthought=True,
    ),
)
