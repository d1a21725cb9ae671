"""Every error that Holdfast raises, in one tree.

* HoldfastError
  x UsageError                 exit 2   the command line, the environment or a file is wrong
  x EngineStartError           exit 3   the engine could not start
    + PluginMissingError       exit 3   a rank runs without the workspace plugin
    + NodeLostError            none     another node was lost; the next start waits for it
    + HostFullError            exit 3   the host has too little memory; a later start waits for more
      - NodeFullError          exit 3   the host of another node has too little
  x ProbeFailedError           exit 4   the worst case was not served
    + ProbeTooSlowError        none     the time was over while the engine went on: a limited proof
  x EngineLostError            exit 5   the engine died and is not restarted
  x AddressInUseError          exit 6   another process listens there
  x NotReachableError          exit 3   of `verify`: there is no server that answers
  x ConflictError              HTTP 409 the state, or the way the server was started, forbids it
  x NotFoundError              HTTP 404 nothing has that name
  x EngineRefusedError         HTTP 500 the engine failed to do what an operator asked for
  x EngineSilentError          HTTP 504 the engine did not answer an operator in time
  x NotReadyError              HTTP 503 the gate is closed
  x OverloadedError            HTTP 429 there is too much of something, such as a full queue
    + HostMemoryError          HTTP 429 the host has too little memory for a long prompt
    + KeySuspendedError        HTTP 429 requests of the key have ended several engines
      - KeyUsedUpError         HTTP 429 the key has used its tokens of the day
  x RefusedError               HTTP 4xx, 503, 504: the request or its connection is over a limit
  x RequestLostError           HTTP 500 the engine died with the answer half given
    + RequestAbortedError      HTTP 500 it was aborted as an operator asked
    + SuspectedError           HTTP 422 the request may have ended the engine
    + QuarantinedError         HTTP 422 requests like it have ended engines

Each class has the exit code of a process that ends with it, and the HTTP status and OpenAI error
type of a request that fails with it. `remedy` tells the operator what to change.
"""

from __future__ import annotations

import json
import math
from enum import IntEnum
from http import HTTPStatus
from typing import ClassVar

from holdfast.labels import RefusalReason

RETRY_AFTER_SECONDS = 5
"""The time after which a client may retry if nothing better is known."""
MAX_RETRY_AFTER_SECONDS = 120
"""OpenAI's clients do not retry at all if they are told to wait longer than this."""

_TYPES = {422: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable"}


def openai_error_body(message: str, *, kind: str, status: int) -> bytes:
    """Return an error in OpenAI's form, in ASCII: a message may quote what has no encoding.

    Anthropic's form has `type` beside `error`, which OpenAI's clients do not look at.
    """
    error = {"message": message, "type": kind, "param": None, "code": int(status)}
    return json.dumps({"type": "error", "error": error}, separators=(",", ":")).encode()


def openai_type_of(status: int) -> str:
    """Return the type of an error if only its HTTP status is known."""
    fallback = "server_error" if status >= 500 else "invalid_request_error"
    return _TYPES.get(status, fallback)


def our_type_of(said: str, status: int) -> str:
    """Return the type of an error of vLLM: as we say it, where vLLM has the phrase of the status.

    What a route of vLLM refuses for us, and what we refuse before it, then has the same type.
    """
    is_phrase = status in _TYPES and said == HTTPStatus(status).phrase
    return _TYPES[status] if is_phrase else said


def within_retry_bounds(seconds: float) -> int:
    """Return the whole seconds that `Retry-After` may have, from 1 to 120, rounded up."""
    return math.ceil(min(MAX_RETRY_AFTER_SECONDS, max(1.0, seconds)))


def reason_of(error: OSError | ValueError) -> str:
    """Return what went wrong, without the number and the path that `str()` of an OSError has."""
    return getattr(error, "strerror", None) or str(error)


class ExitCode(IntEnum):
    """Why the process ended, for `docker run --restart` and for people."""

    STOPPED = 0
    UNEXPECTED = 1
    USAGE = 2
    ENGINE_START = 3
    PROBE_FAILED = 4
    ENGINE_LOST = 5
    ADDRESS_IN_USE = 6


class HoldfastError(Exception):
    """A failure with a cause, a remedy and an exit code. `str()` returns the cause only."""

    exit_code: ClassVar[int] = ExitCode.UNEXPECTED
    http_status: int = 500
    openai_type: str = "server_error"
    outline: ClassVar[str] = "something unexpected happened"
    """The public description of the failure: the cause may quote the engine and contain paths."""

    def __init__(self, cause: str, *, remedy: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy

    @property
    def line(self) -> str:
        """Cause and remedy on one line, for the last line on standard error."""
        cause = " ".join(self.cause.split())
        if not self.remedy:
            return cause
        end = "" if cause.endswith((".", "!", "?")) else "."
        return f"{cause}{end} Remedy: {self.remedy}"


class UsageError(HoldfastError):
    """A flag, a variable or a file is wrong; a restart without a change will not help."""

    exit_code = ExitCode.USAGE
    outline = "a flag, a variable or a file is wrong"
    http_status = 400
    openai_type = "invalid_request_error"


class EngineStartError(HoldfastError):
    """The engine's processes ended, or did not answer, before the engine could serve."""

    exit_code = ExitCode.ENGINE_START
    outline = "the engine could not start"


class PluginMissingError(EngineStartError):
    """A rank of the world wrote no workspace statistics, so its memory use is unknown."""


class NodeLostError(EngineStartError):
    """Another node, or a process of it, was lost during a start; the next one waits for nodes."""


class HostFullError(EngineStartError):
    """The host had too little memory while the engine started: a later start waits for more."""


class NodeFullError(HostFullError):
    """Another node ended an engine that started, before the memory of its host ran out."""


class ProbeFailedError(HoldfastError):
    """A worst-case request was not answered correctly: the server is not ready."""

    exit_code = ExitCode.PROBE_FAILED
    outline = "the probe failed"


class ProbeTooSlowError(ProbeFailedError):
    """The probe ran out of time while the engine worked: the proof is limited, not failed."""


class EngineLostError(HoldfastError):
    """The engine died after it was ready, and it is not restarted."""

    exit_code = ExitCode.ENGINE_LOST
    outline = "the engine died and is not restarted"
    http_status = 503
    openai_type = "service_unavailable"


class AddressInUseError(HoldfastError):
    """The address to listen on belongs to another process."""

    exit_code = ExitCode.ADDRESS_IN_USE


class NotReachableError(HoldfastError):
    """`holdfast verify` or `holdfast top` found no server that answers."""

    exit_code = 3
    """The code of these commands, which start no engine and have exit codes of their own."""
    outline = "the server is not reachable"


class ConflictError(HoldfastError):
    """The state or the flags do not allow what an operator asks for; nothing has changed."""

    http_status = 409
    openai_type = "conflict_error"


class NotFoundError(HoldfastError):
    """Nothing has the given name."""

    http_status = 404
    openai_type = "not_found_error"


class EngineRefusedError(HoldfastError):
    """The engine is alive, but failed to do what an operator asked for."""


class EngineSilentError(HoldfastError):
    """The engine did not answer an operator in time, and may still do what it was asked."""

    http_status = 504
    openai_type = "timeout_error"


class NotReadyError(HoldfastError):
    """The request arrived while the gate was closed; `retry_after_seconds` is from 1 to 120."""

    http_status = 503
    openai_type = "service_unavailable"
    may_be_retried = True

    def __init__(
        self, cause: str, *, retry_after_seconds: int = RETRY_AFTER_SECONDS, remedy: str = ""
    ) -> None:
        super().__init__(cause, remedy=remedy)
        self.retry_after_seconds = within_retry_bounds(retry_after_seconds)


def shut_down_error() -> NotReadyError:
    """Return the error of a request that the server does not serve because it ends."""
    return NotReadyError("The server has shut down.")


class OverloadedError(HoldfastError):
    """There is too much to do, in all or for the key; `retry_after_seconds` is from 1 to 120.

    Routers take 503 for a replica that cannot serve, but this one serves others as before.
    """

    http_status = 429
    openai_type = "rate_limit_error"
    may_be_retried = True
    """Whether a client should wait for `retry_after_seconds` and try again by itself."""

    def __init__(self, cause: str, *, retry_after_seconds: int, remedy: str = "") -> None:
        super().__init__(cause, remedy=remedy)
        self.retry_after_seconds = within_retry_bounds(retry_after_seconds)


class HostMemoryError(OverloadedError):
    """The host has too little memory for the request now; the engine goes on without it."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause, retry_after_seconds=RETRY_AFTER_SECONDS)


class KeySuspendedError(OverloadedError):
    """Requests of the key have ended several engines; `retry_after_seconds` has no upper limit."""

    may_be_retried = False

    def __init__(self, cause: str, *, retry_after_seconds: int) -> None:
        super().__init__(cause, retry_after_seconds=retry_after_seconds)
        self.retry_after_seconds = retry_after_seconds


def suspended_error(seconds: float) -> KeySuspendedError:
    """Return the error of a key that stays suspended for `seconds`."""
    return KeySuspendedError(
        "This API key is suspended, because its requests have ended the engine several times.",
        retry_after_seconds=math.ceil(seconds),
    )


class KeyUsedUpError(KeySuspendedError):
    """The key has used its tokens for today."""


class RefusedError(HoldfastError):
    """A request, or its connection, exceeds a limit. It is counted under `reason`."""

    def __init__(
        self,
        cause: str,
        *,
        reason: RefusalReason,
        http_status: int,
        openai_type: str = "invalid_request_error",
        remedy: str = "",
    ) -> None:
        super().__init__(cause, remedy=remedy)
        self.reason: RefusalReason = reason
        self.http_status = http_status
        self.openai_type = openai_type


class RequestLostError(HoldfastError):
    """The engine died, and this request cannot be replayed on the next generation."""

    http_status = 500


class RequestAbortedError(RequestLostError):
    """An operator had the request aborted: no engine had it, or its answer cannot say so."""


class SuspectedError(RequestLostError):
    """The request was in the engine when it died and may be the cause; it is not replayed.

    Routers retry a 500, whatever the headers say, and an engine of each replica may die of it.
    """

    http_status = 422
    openai_type = "invalid_request_error"


class QuarantinedError(RequestLostError):
    """This request, or one with the same content, ended engines; it does not reach another."""

    http_status = 422
    openai_type = "invalid_request_error"
