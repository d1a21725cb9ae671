"""One engine request, a call of `generate()` or `encode()`; its turn, and counts of lost ones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

from holdfast.errors import (
    HoldfastError,
    HostMemoryError,
    NotReadyError,
    OverloadedError,
    QuarantinedError,
    RequestAbortedError,
    RequestLostError,
    SuspectedError,
)
from holdfast.labels import LOSS_REASONS, LossReason
from holdfast.request_context import RequestContext

Method = Literal["generate", "encode"]


@dataclass(slots=True)
class SentAnswer:
    """What the client has got of an answer; empty until a part of a stream was sent."""

    token_ids: list[int] = field(default_factory=list)
    last_output: Any = None
    """The engine's output that had the last of these tokens."""


class EngineOutputs(Protocol):
    """Reads a request's arguments and what the engine makes of them, and speaks vLLM's errors.

    `outputs.VllmOutputs` implements it, so that replay and blame do not import vLLM.
    """

    def is_death(self, error: Exception, llm: Any) -> bool:
        """Whether an error says that the engine is gone, not that the request is wrong."""

    def is_unsent(self, error: Exception) -> bool:
        """Whether the engine died before it got the request."""

    def is_abort(self, output: Any) -> bool:
        """Whether an output says that the engine aborted the request."""

    def is_cut(self, output: Any) -> bool:
        """Whether an output is the last, and a limit or a stop string ended an answer in it."""

    def is_failure(self, output: Any) -> bool:
        """Whether an output says that the engine failed, for this request alone."""

    def is_answer(self, output: Any) -> bool:
        """Whether an output is the last of a whole answer, which needs the engine no more."""

    def as_vllm_error(self, error: HoldfastError) -> Exception:
        """Return the exception that makes vLLM's routes answer with `error`."""

    def is_replayable(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the same request can be made again."""

    def is_streamed(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the prompt is a stream, so the engine may have to wait for the rest of it."""

    def is_continuable(self, arguments: Mapping[str, Any]) -> bool:
        """Whether another engine can go on with a replayable request after a part was sent."""

    def is_answer_streamed(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the engine yields each part of the answer, rather than all of it at its end."""

    def add_sent(self, sent: SentAnswer, output: Any) -> None:
        """Add an output to what was sent."""

    def continued_arguments(
        self, arguments: Mapping[str, Any], sent: SentAnswer, llm: Any
    ) -> Mapping[str, Any] | None:
        """Return arguments that make `llm` go on within its limits; None if it has no room."""

    def digest_of(self, arguments: Mapping[str, Any]) -> str:
        """Return a digest of the prompt and parameters, 64 hexadecimal digits.

        May be called from another thread.
        """

    def size_bytes(self, arguments: Mapping[str, Any]) -> int:
        """Estimate how much memory the prompt takes."""

    def trial_arguments(self, method: Method, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments that make the engine yield after each token."""

    def context_tokens(self, output: Any) -> int:
        """Count the tokens of prompt and answer so far, in an output of a trial."""

    def given_tokens(self, arguments: Mapping[str, Any]) -> int:
        """Count the tokens of the prompt before the engine has it; 0 if that is unknown."""

    def prompt_tokens(self, output: Any) -> int:
        """Count the tokens of an output's prompt."""

    def new_tokens(self, output: Any) -> int:
        """Count the answer's tokens that came with this output and with none before it."""

    def request_ids(self, internal_id: str) -> tuple[str, ...]:
        """List the values of `request_id` that may stand behind vLLM's internal ID, one or two."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class EngineRequest:
    """One request, from when it arrives until its caller leaves it."""

    method: Method
    arguments: Mapping[str, Any]
    context: RequestContext
    is_replayable: bool
    is_streamed: bool
    is_continuable: bool = False
    """Whether another engine can go on with it after a part of the answer was sent."""
    is_answer_streamed: bool = False
    is_later_step: bool = False
    """Whether it is a step of a beam search after the first, which had the prompt."""
    number: int = 0
    """A later request has a larger number."""
    sent: SentAnswer = field(default_factory=SentAnswer)
    generation: int = 0
    """The generation that has or had the request; 0 if none."""
    given_generation: int = 0
    """The last generation that it was given to, even if that died before it was sent; 0 if none."""
    has_been_given: bool = False
    """Whether an engine was given it, even if that engine died before it was sent."""
    is_in_engine: bool = False
    is_pending: bool = False
    """Whether its caller waits for an output, rather than the engine for its caller."""
    has_yielded: bool = False
    is_finished: bool = False
    """Whether the engine that had it, and is gone, was done with it."""
    is_abort_expected: bool = False
    deaths: int = 0
    """How many unexplained deaths in a row found it in the engine, no further than the first."""
    has_met_rejection: bool = False
    """Whether a workspace was refused at one of these deaths."""
    reached_tokens: int = 0
    """Its length in tokens at the engine's last death: getting further, even on trial, acquits."""
    passed_alone: int = 0
    """How many trials of its own have acquitted it."""
    passed_tokens: int = 0
    """The length that it had reached in the last of them."""
    is_prefilling: bool = False
    """Whether the last failed step computed part of its prompt."""
    waiter: asyncio.Future[None] | None = None
    refusal: HoldfastError | None = None
    """Why no generation may run it any more."""
    held_since_seconds: float | None = None
    """Since when it has been waiting because the host is short of memory; None if it is not."""
    digest: str | None = None
    """See `EngineOutputs.digest_of`; None until it is needed."""
    digesting: Future[str] | None = None
    """The pending computation of its digest, started once its client leaves it."""
    size_bytes: int = 0
    """See `EngineOutputs.size_bytes`; 0 until its client leaves it."""

    @property
    def request_id(self) -> str:
        """The ID that the caller gave."""
        return str(self.arguments.get("request_id", ""))

    @property
    def is_harmless_alone(self) -> bool:
        """Whether trials have shown that it does not end an engine alone where the last one died.

        A stream gets further in between, and is tried once more, but not again and again.
        """
        is_past = self.reached_tokens > self.passed_tokens
        return self.passed_alone > is_past

    @property
    def outlives_engine(self) -> bool:
        """Whether the next engine can take it, from its beginning or from where it stopped."""
        return self.is_continuable if self.has_yielded else self.is_replayable

    def acquit(self) -> None:
        """Forget the deaths that have found it in the engine."""
        self.deaths, self.has_met_rejection = 0, False

    def forget_prompt(self) -> None:
        """Drop all except its ID: it cannot be made again."""
        self.arguments = {"request_id": self.request_id}
        self.sent = SentAnswer()
        self.is_replayable = False


def wake(request: EngineRequest) -> None:
    """Have a waiting request check again whether it may run."""
    if request.waiter is not None and not request.waiter.done():
        request.waiter.set_result(None)


class Losses:
    """Counts the requests that are lost, and makes the exceptions that end them."""

    def __init__(self, outputs: EngineOutputs) -> None:
        self._outputs = outputs
        self._counts: dict[LossReason, int] = dict.fromkeys(LOSS_REASONS, 0)
        self._planned_end: tuple[int, HoldfastError] = (0, lost_error())

    @property
    def counts(self) -> Mapping[LossReason, int]:
        """How many requests were lost, by reason."""
        return MappingProxyType(self._counts)

    def plan_end(self, generation: int, error: HoldfastError) -> None:
        """Take the error of the requests that are lost with a generation, ended on purpose."""
        self._planned_end = (generation, error)

    def lost(self, request: EngineRequest) -> Exception:
        """Return the error of a request that is lost with the engine that it was given to."""
        reason = "drained" if self._is_planned(request) else broken_reason(request)
        return self.record(request, self._error_of_end(request), reason)

    def without_room(self, request: EngineRequest) -> Exception:
        """Return the error of a stream that the next engine has no room for.

        It does not count as drained after a planned end: no longer wait would have kept it.
        """
        return self.record(request, self._error_of_end(request), "stream_broken")

    def record(self, request: EngineRequest, error: HoldfastError, reason: LossReason) -> Exception:
        """Count a lost request, and return `error` as the exception that vLLM's routes expect."""
        self._counts[reason] += 1
        request.context.is_broken = True
        request.context.error = reason
        is_suspect = request.deaths > 0 or isinstance(error, SuspectedError | QuarantinedError)
        # One that cannot be made again is lost before it is known what ended its engine.
        is_suspect |= reason == "not_replayable" and request.generation > 0
        # A client can resend a request that no engine has had, though we cannot.
        if is_suspect or reason != "not_replayable":
            may_be_retried = isinstance(error, NotReadyError) and not is_suspect
            request.context.advise(error, may_be_retried=may_be_retried)
        return self._as_vllm_error(request, error)

    def refused(self, request: EngineRequest, refusal: HoldfastError) -> Exception:
        """Return the refusal of a request as the exception that vLLM's routes expect.

        It counts as lost, unless its abort was asked for, or the host's memory is the reason and
        the answer has not begun: then the client can come again, except with a request that an
        engine died with.
        """
        if isinstance(refusal, RequestAbortedError):
            return self.uncounted(request, refusal, "aborted", may_be_retried=False)
        if not isinstance(refusal, HostMemoryError):
            return self.record(request, refusal, loss_of(refusal, request))
        if request.has_yielded:
            return self.record(request, refusal, "stream_broken")
        return self.uncounted(request, refusal, "host_memory", may_be_retried=not request.deaths)

    def uncounted(
        self, request: EngineRequest, error: HoldfastError, word: str, *, may_be_retried: bool
    ) -> Exception:
        """Return `error` as `record` does, for a request that does not count as lost."""
        request.context.is_broken = True
        request.context.error = word
        request.context.advise(error, may_be_retried=may_be_retried)
        return self._as_vllm_error(request, error)

    def _is_planned(self, request: EngineRequest) -> bool:
        """Whether the engine that the request was given to was ended on purpose."""
        return request.given_generation == self._planned_end[0]

    def _error_of_end(self, request: EngineRequest) -> HoldfastError:
        """Return what happened to the engine that the request was given to."""
        return self._planned_end[1] if self._is_planned(request) else lost_error()

    def _as_vllm_error(self, request: EngineRequest, error: HoldfastError) -> Exception:
        """Return the exception; a stream that has begun has no status left to change."""
        told = RequestLostError(error.cause) if request.has_yielded else error
        return self._outputs.as_vllm_error(told)


async def await_turn(request: EngineRequest, losses: Losses) -> None:
    """Return when the caller of a new request has capacity, which it may have given back.

    A transcription that has its language detected first, one in parts and a response that calls
    tools need the engine several times. Others get the capacity in between.

    Raises the exception that vLLM's routes expect if there is none in time.
    """
    try:
        await request.context.regain_capacity()
    except (NotReadyError, OverloadedError) as error:
        may_be_retried = error.may_be_retried
        raise losses.uncounted(
            request, error, error.openai_type, may_be_retried=may_be_retried
        ) from error


def loss_of(refusal: HoldfastError, request: EngineRequest) -> LossReason:
    """Return the reason under which the refusal of a request counts."""
    if isinstance(refusal, QuarantinedError):
        return "quarantined"
    if isinstance(refusal, SuspectedError):
        return "suspected"
    return broken_reason(request)


def broken_reason(request: EngineRequest) -> LossReason:
    """Return the reason under which a request counts that can neither start over nor go on."""
    return "stream_broken" if request.has_yielded else "not_replayable"


def require_progress(request: EngineRequest, begun_tokens: int) -> None:
    """Raise RequestLostError if nothing has come of a stream that was to go on."""
    if has_not_gone_on(request, begun_tokens):
        raise lost_error()


def has_not_gone_on(request: EngineRequest, begun_tokens: int) -> bool:
    """Whether nothing has come of a stream that an engine began after `begun_tokens`."""
    return 0 < begun_tokens == len(request.sent.token_ids) and request.refusal is None


def lost_error() -> RequestLostError:
    """Return the error of a request that died with its engine and cannot be made again."""
    return RequestLostError("The engine died while it worked on this request.")


def aborted_error() -> RequestAbortedError:
    """Return the error of a request that the engine has aborted, as it was asked to."""
    return RequestAbortedError("The request was aborted.")


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
