"""Days in prompts: some templates insert that of today, and so make another prompt of each chat."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial

from holdfast.verify.answers import MalformedError, dig
from holdfast.verify.trial import Trial

_DETOKENIZE = "/detokenize"
_OK = 200
_FORMS = (
    "%A, %d %B %Y",
    "%A, %B %d, %Y",
    "%d %B %Y",
    "%d %b %Y",
    "%B %d, %Y",
    "%b %d, %Y",
    "%Y-%m-%d",
    "%Y/%m/%d",
    "%d-%m-%Y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d.%m.%Y",
)
_ONE_DAY = timedelta(days=1)
_PLACEHOLDER = "<day>"


async def differ_in_days(
    trial: Trial, then: Sequence[int], now: Sequence[int], recorded_at: str
) -> bool:
    """Whether nothing but the day, that of the record or today, makes two prompts differ.

    It takes the server's `/detokenize`: without one, nothing says so.
    """
    before, after = await _text_of(trial, then), await _text_of(trial, now)
    # The same text may also become other tokens, which is another fault.
    if before is None or after is None or before == after:
        return False
    days = [*_near(_day_of(recorded_at)), *_near(datetime.now(UTC).date())]
    return without_days(before, days) == without_days(after, days)


def without_days(text: str, days: Sequence[date]) -> str:
    """The text with a placeholder for each of the days, in any of the usual forms."""
    # The longest first: a shorter one may be a part of it.
    forms = sorted({form for day in days for form in _forms_of(day)}, key=len, reverse=True)
    named = "|".join(map(re.escape, forms))
    return re.sub(rf"(?<!\w)(?:{named})(?!\w)", _PLACEHOLDER, text) if forms else text


def _near(day: date | None) -> list[date]:
    """The day and those beside it: it depends on where the server is, and some name yesterday."""
    return [day - _ONE_DAY, day, day + _ONE_DAY] if day else []


def _forms_of(day: date) -> Iterator[str]:
    """With and without a zero before the number of the day."""
    for form in _FORMS:
        yield day.strftime(form)
        yield day.strftime(form.replace("%d", str(day.day)))


def _day_of(recorded_at: str) -> date | None:
    try:
        return datetime.fromisoformat(recorded_at).date()
    except ValueError:
        return None


async def _text_of(trial: Trial, ids: Sequence[int]) -> str | None:
    """What the tokens spell, in the server's words; None if it does not tell."""
    body = {"model": trial.server.model, "tokens": list(ids)}
    answer = await trial.admitted(partial(trial.ask, _DETOKENIZE, body))
    if answer.status != _OK:
        return None
    try:
        return dig(answer.document, "prompt", kind=str)
    except MalformedError:
        return None
