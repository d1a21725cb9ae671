"""Requests that may harm a server, and that are too large for a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from holdfast.verify.checks.asking import PROMPT, either
from holdfast.verify.target import PATIENT_SECONDS, Answer, NoAnswerError
from holdfast.verify.trial import SkippedError, Trial, UnexpectedStatusError
from holdfast.verify.waiting import is_too_many

_OK = 200


def require_consent(trial: Trial) -> None:
    """Holdfast claims to survive all this; any other server is tried only if the user says so.

    Raises:
        SkippedError: neither is the case.
    """
    if trial.server.holdfast is None and not trial.options.kill_command:
        raise SkippedError(
            "the server is not Holdfast, and may not survive this",
            "give --kill-command to try it all the same",
        )


async def ask_large(
    trial: Trial, what: str, path: str, body: Mapping[str, Any] | None = None, raw: str = ""
) -> Answer | None:
    """The answer to a request that no report should repeat; None if the connection was closed.

    Raises:
        InconclusiveError: it is 429 until the deadline.
    """
    request = trial.request(path, body, raw=raw)
    try:
        ask = partial(trial.target.ask, request)
        return await trial.admitted(ask, PATIENT_SECONDS, is_refused=is_too_many)
    except NoAnswerError as error:
        trial.measure(f"{what}: connections closed", 1)
        trial.warn(f"{what}: {error}")
        return None


async def require_life(trial: Trial, is_refused: Callable[[Answer], bool] = is_too_many) -> None:
    """A small request gets its answer; what `is_refused` is asked for again.

    By default that is not 503: a gateway says it while a server is started again that has died.

    Raises:
        NoAnswerError: there is none in time.
        UnexpectedStatusError: its status is not 200.
        InconclusiveError: it is refused until the deadline.
    """
    path, body = either(trial, PROMPT, max_tokens=4)
    ask = partial(trial.ask, path, body)
    answer = await trial.admitted(ask, PATIENT_SECONDS, is_refused=is_refused)
    if answer.status != _OK:
        raise UnexpectedStatusError(answer)
