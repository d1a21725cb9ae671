"""The calls that the death of an engine ended: how many, why, and what their clients are told."""

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
        """Calls that were lost, by reason."""
        return MappingProxyType(self._counts)

    def lifted(self, call: Call, error: HoldfastError, reason: LossReason) -> Exception:
        """The exception that makes vLLM's routes answer with `error`, counted for `reason`."""
        self._counts[reason] += 1
        call.context.is_broken = True
        call.context.error = reason
        is_suspect = call.deaths > 0 or isinstance(error, SuspectedError | QuarantinedError)
        # What is only not replayable can be sent again by its client, if not by us.
        if is_suspect or reason != "not_replayable":
            call.context.may_be_retried = isinstance(error, NotReadyError) and not is_suspect
        return self._dialect.lifted(error)


def loss_of(refusal: HoldfastError) -> LossReason:
    """The reason for which a call is lost that is refused so."""
    if isinstance(refusal, QuarantinedError):
        return "quarantined"
    return "suspected" if isinstance(refusal, SuspectedError) else "not_replayable"


def lost_error() -> RequestLostError:
    """The error of a call that its engine had when it died, and that no other can make."""
    return RequestLostError("The engine died while it worked on this request.")


def quarantine_error() -> QuarantinedError:
    """The error of a request that is not given to an engine again."""
    return QuarantinedError(
        "Requests like this one have ended the engine, so this one is not tried again."
    )


def suspected_error() -> SuspectedError:
    """The error of a request that the engine may have died of."""
    return SuspectedError(
        "The engine died while it worked on this request, which may have caused it."
    )
