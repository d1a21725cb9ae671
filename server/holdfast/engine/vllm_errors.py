"""Turns vLLM's errors into ours, in the words of the command line, and ours into vLLM's."""

from __future__ import annotations

import ast
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, StrictDataclassError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, VLLMError
from vllm.v1.engine.exceptions import EngineDeadError

from holdfast.errors import (
    EngineStartError,
    HoldfastError,
    NotReadyError,
    OverloadedError,
    UsageError,
)
from holdfast.processes.exits import OUT_OF_MEMORY, killed_by
from holdfast.request_context import RequestContext, Session, current_request

_CORRECT = "correct what the message names, or see the engine's log above."
_MORE_MEMORY = (
    "see the kernel's log; give the engine more memory, or serve a smaller model, context or KV "
    "cache."
)
_FAILED = re.compile(r"Failed (?:core|frontend) proc\(s\): (\{.*\})")
_MAX_CHARACTERS = 600
_OF_USAGE = (
    TypeError,
    ValueError,
    KeyError,
    OSError,
    ImportError,
    NotImplementedError,
    AssertionError,
    RuntimeError,
    VLLMError,
)
_TOO_LONG = re.compile(
    r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len "
    r"\(\w+=([\d.]+) or model_max_length=(?:([\d.]+)|None) "
)
_NO_CONFIG = re.compile("Invalid repository ID or local directory specified: '(.+?)'")
_NO_DEVICE = "Failed to infer device type"
_HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]
"""The error of httpx or httpx2, whichever the installed huggingface_hub uses."""


@contextmanager
def usage_errors(logged: Callable[[], str] = str) -> Iterator[None]:
    """Map what vLLM raises for flags, files and models that it cannot use to UsageError.

    `logged` returns what it has logged as an exception before, to which its error may point. What
    may pass by itself, an unreachable Hub or a missing device, is an EngineStartError.

    vLLM raises VLLMError for some, and else TypeError, ValueError (also pydantic's
    ValidationError), KeyError, OSError (from Hugging Face look-ups), ImportError (an optional
    package) and NotImplementedError, and its parser ends the process.
    """
    try:
        yield
    except HoldfastError:
        raise
    except SystemExit as error:
        raise UsageError(
            "vLLM's parser refused the command line.", remedy="see `holdfast serve --help=all`."
        ) from error
    except Exception as error:
        if (passing := _passing_error(error)) is not None:
            raise passing from error
        if not isinstance(error, _OF_USAGE):
            raise
        cause, said = _first_lines(error), logged()
        if (plain := _in_plain_words(cause)) is not None:
            raise plain from error
        raise UsageError(
            f"{cause} ({said})" if said and said not in cause else cause,
            remedy="correct the model or the flag that the message names.",
        ) from error


@contextmanager
def model_errors(model: str) -> Iterator[None]:
    """Map what a wrong value in the model's own configuration raises to UsageError.

    Whatever vLLM and transformers compute from it may fail, in any way that Python has. Errors to
    which a wrong flag leads too, such as a KeyError, are left to `usage_errors`.
    """
    try:
        yield
    except (StrictDataclassError, ArithmeticError, AttributeError, IndexError) as error:
        said = _first_lines(error)
        raise UsageError(
            f"the configuration of {model} cannot be used: {type(error).__name__}: {said}",
            remedy="correct its config.json, or what --hf-overrides makes of it; if both are "
            "right, report what --log-level debug shows.",
        ) from error


@contextmanager
def start_errors(cause: Callable[[], str]) -> Iterator[None]:
    """Map a failed start to EngineStartError; `cause` says what the engine's processes left behind.

    vLLM's own message is "Engine core initialization failed. See root cause above", and names at
    most the exit codes of cores.
    """
    try:
        yield
    except HoldfastError:
        raise
    except (
        RuntimeError,
        ValueError,
        OSError,  # TimeoutError, too
        AssertionError,
        TypeError,
        KeyError,
        VLLMError,
        EngineDeadError,
    ) as error:
        raise start_error(cause() or _killed_cores(error) or _first_lines(error)) from error


def _passing_error(error: Exception) -> EngineStartError | None:
    """Return the error of a start that may succeed later, as it is; None for any other."""
    for one in _chain(error):
        if _is_unanswered(one):
            said, told = _first_lines(one), _first_lines(error)
            return EngineStartError(
                f"the Hugging Face Hub cannot be reached: {said}"
                + (f" ({told})" if told != said else ""),
                remedy="check the network and HF_ENDPOINT; with HF_HUB_OFFLINE=1, a model in the "
                "cache needs no Hub. Begin a path with / or ./.",
            )
        if _NO_DEVICE in str(one):
            return EngineStartError(
                "vLLM finds no device to run on.",
                remedy="give the container its GPUs (`--gpus all`), check the driver, or see "
                "`holdfast doctor`.",
            )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes, as a traceback shows them."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_unanswered(error: BaseException) -> bool:
    """Whether a request to the Hub got no answer, or one that says to ask again later."""
    if not isinstance(error, _HTTP_ERROR):
        return False
    response = getattr(error, "response", None)
    return (
        response is None
        or response.status_code == HTTPStatus.TOO_MANY_REQUESTS
        or (response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR)
    )


def start_error(cause: str) -> EngineStartError:
    """Return the error of a start that failed for this cause."""
    is_killed = cause.endswith(OUT_OF_MEMORY)
    return EngineStartError(
        f"the engine could not start: {cause}", remedy=_MORE_MEMORY if is_killed else _CORRECT
    )


@asynccontextmanager
async def capacity_lent() -> AsyncIterator[None]:
    """Lend the running request's capacity to others while entered, and wait for capacity after.

    A step that does not need the engine may take long, such as compiling a grammar or fetching an
    image: it must not keep other requests from the engine.

    Raises:
        GracefulHTTPError: no capacity came back in time, or the step raised a NotReadyError or an
            OverloadedError; the client may retry the request.
    """
    context = current_request()
    with as_http_errors(context):
        async with context.away():
            yield


@asynccontextmanager
async def session_call(session: Session) -> AsyncIterator[None]:
    """Hold capacity for one call of a session while entered.

    Raises:
        GracefulHTTPError: there is none for it.
    """
    with as_http_errors(current_request()):
        async with session.call():
            yield


@contextmanager
def as_http_errors(context: RequestContext) -> Iterator[None]:
    """Raise what a client may send again as the exception that vLLM's routes answer with.

    Raises:
        GracefulHTTPError: instead of a NotReadyError or an OverloadedError.
    """
    try:
        yield
    except (NotReadyError, OverloadedError) as error:
        context.advise(error, may_be_retried=error.may_be_retried)
        raise GracefulHTTPError(error.cause, HTTPStatus(error.http_status)) from error


def _first_lines(error: BaseException) -> str:
    """Return the message without what pydantic and transformers append."""
    errors = getattr(error, "errors", None)
    if callable(errors):  # pydantic.ValidationError
        # A flag that accepts several types has a message for each: the first is enough.
        first_said = {_flag_of(item["loc"]): _message(item) for item in reversed(errors())}
        return "; ".join(f"{place}{first_said[place]}" for place in reversed(first_said))
    text = " ".join(str(error).split())[:_MAX_CHARACTERS]
    if isinstance(error, KeyError):  # `str` quotes what it was given: a sentence, or only the key
        said = str(error.args[0] if error.args else "")[:_MAX_CHARACTERS]
        return " ".join(said.split()) if " " in said else f"{text or 'a key'} is missing"
    return text.removeprefix("Error: ") or type(error).__name__


def _in_plain_words(cause: str) -> UsageError | None:
    """Return our error for a message of vLLM's that gives bad advice, or too much; else None."""
    if found := _TOO_LONG.search(cause):
        tokens = max(int(float(number)) for number in found.groups()[1:] if number is not None)
        return UsageError(
            f"--max-model-len {found[1]} is longer than the model's context of {tokens} tokens.",
            remedy=f"use at most {tokens}.",
        )
    if (found := _NO_CONFIG.search(cause)) and _lacks_config(Path(found[1])):
        return UsageError(f"{found[1]} has no config.json.", remedy="name the model's directory.")
    return None


def _lacks_config(path: Path) -> bool:
    return path.is_dir() and not (path / "config.json").exists()


def _killed_cores(error: BaseException) -> str:
    """Return which processes were ended by signals, from vLLM's message; empty if none was."""
    found = _FAILED.search(str(error))
    if found is None:
        return ""
    try:
        codes = ast.literal_eval(found[1])
    except (ValueError, SyntaxError):
        return ""
    named = (f"{name} {killed_by(code)}" for name, code in codes.items() if code and code < 0)
    return " and ".join(named)


def _flag_of(names: tuple[int | str, ...]) -> str:
    """Return the flag or the field that is wrong; empty for the whole configuration."""
    if not names:
        return ""
    first = str(names[0])
    is_flag = first in AsyncEngineArgs.__dataclass_fields__
    return f"--{first.replace('_', '-')}: " if is_flag else f"{first}: "


def _message(item: dict[str, Any]) -> str:
    if item["type"] == "dict_type" and isinstance(item["input"], str):
        return f"{item['input']!r} is not a JSON object"
    return str(item["msg"]).removeprefix("Value error, ")
