"""Has a server show the verdict on its status page, which needs its admin key."""

from __future__ import annotations

from holdfast.verify.records import CheckStatus, Report, Request
from holdfast.verify.redaction import redacted
from holdfast.verify.target import NoAnswerError, Target

VERIFY_RUN_PATH = "/admin/verify-run"
DEADLINE_SECONDS = 30.0


async def show_on_page(url: str, admin_key: str, report: Report) -> str:
    """Tell a server of a report, and return a line that says whether its page shows the verdict."""
    body = {
        "verdict": report.verdict,
        "profile": report.profile,
        "passed": report.count(CheckStatus.PASSED),
        "failed": report.count(CheckStatus.FAILED),
        "inconclusive": report.count(CheckStatus.INCONCLUSIVE),
    }
    try:
        async with Target(url, admin_key=admin_key) as target:
            answer = await target.ask(
                Request("PUT", VERIFY_RUN_PATH, body), deadline_seconds=DEADLINE_SECONDS
            )
    except NoAnswerError as error:
        said = redacted(str(error), (admin_key,))
        return f"the status page does not show the verdict: {said}"
    if answer.status != 200:
        return f"the status page does not show the verdict: the server answered {answer.status}"
    return "the status page shows the verdict"
