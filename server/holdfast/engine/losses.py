"""Counts the calls that an engine's death ended, by reason, and words their clients' errors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from holdfast.engine.request import Call, Dialect
from holdfast.errors import (
    HoldfastError,
    NotReadyError,
    QuarantinedError,
    RequestLostError,
    SuspectedError,
)
from holdfast.records import LOSS_REASONS, LossReason


class Losses:
    """Counts each call that is lost, and makes the exception that ends it."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._counts: dict[LossReason, int] = dict.fromkeys(LOSS_REASONS, 0)

    @property
    def counts(self) -> Mapping[LossReason, int]:
        """How many calls were lost, by reason."""
        return MappingProxyType(self._counts)

    def lifted(self, call: Call, error: HoldfastError, reason: LossReason) -> Exception:
        """Count a loss, and return the exception that makes vLLM's routes answer with `error`."""
        self._counts[reason] += 1
        call.context.is_broken = True
        call.context.error = reason
        is_suspect = call.deaths > 0 or isinstance(error, SuspectedError | QuarantinedError)
        # A client can resend a call that is merely not replayable, though we cannot.
        if is_suspect or reason != "not_replayable":
            call.context.may_be_retried = isinstance(error, NotReadyError) and not is_suspect
        return self._dialect.lifted(error)


def loss_of(refusal: HoldfastError) -> LossReason:
    """Return the reason for a loss by this refusal."""
    if isinstance(refusal, QuarantinedError):
        return "quarantined"
    return "suspected" if isinstance(refusal, SuspectedError) else "not_replayable"


def lost_error() -> RequestLostError:
    """Return the error of a call that its dead engine had and that cannot be made again."""
    return RequestLostError("The engine died while it worked on this request.")


def quarantine_error() -> QuarantinedError:
    """Return the error of a request that no engine gets again."""
    return QuarantinedError(
        "Requests like this one have ended the engine, so this one is not tried again."
    )


def suspected_error() -> SuspectedError:
    """Return the error of a request that the engine may have died of."""
    return SuspectedError(
        "The engine died while it worked on this request, which may have caused it."
    )
