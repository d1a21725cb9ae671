"""Is the server what it was when a baseline was recorded? The group `oracle`.

Scores are teacher-forced: both servers score the same tokens, so that a fork hides nothing.
"""

from __future__ import annotations

from holdfast.verify.check import Check
from holdfast.verify.checks.oracle import comparing, recording
from holdfast.verify.options import Options

CHECKS: tuple[Check, ...] = (*comparing.CHECKS, *recording.CHECKS)


def is_asked_for(check: Check, options: Options) -> bool:
    """Whether a run makes the check: these need their flag, all others need none."""
    return check not in CHECKS or check.asked_for(options)
