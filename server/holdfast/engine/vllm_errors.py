"""The one place where vLLM's errors become ours, in the words of the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from holdfast.errors import EngineLostError, EngineStartError, HoldfastError, UsageError
from holdfast.processes.exit_codes import OUT_OF_MEMORY, ended_by

_CORRECT = "correct what the message names, or see the engine's log above."
_MORE_MEMORY = (
    "see the kernel's log; give the engine more memory, or serve a smaller model, context or KV "
    "cache."
)
_FAILED = re.compile(r"Failed (?:core|frontend) proc\(s\): (\{.*\})")
_LONGEST_CHARACTERS = 600


@contextmanager
def usage_errors(logged: Callable[[], str] = str) -> Iterator[None]:
    """Map what vLLM raises for flags, files and models that it cannot use to UsageError.

    `logged` says what it has logged as an exception before, to which it may point.

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
    except (
        TypeError,
        ValueError,
        KeyError,
        OSError,
        ImportError,
        NotImplementedError,
        AssertionError,
        RuntimeError,
        VLLMError,
    ) as error:
        cause, said = _first_lines(error), logged()
        raise UsageError(
            f"{cause} ({said})" if said and said not in cause else cause,
            remedy="correct the model or the flag that the message names.",
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
        found = cause() or _killed_cores(error) or _first_lines(error)
        is_killed = found.endswith(OUT_OF_MEMORY)
        raise EngineStartError(
            f"the engine could not start: {found}", remedy=_MORE_MEMORY if is_killed else _CORRECT
        ) from error


@contextmanager
def death_errors() -> Iterator[None]:
    """Map vLLM's EngineDeadError, which carries no cause, to EngineLostError."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineLostError("the engine died during a call to it") from error


@contextmanager
def refusal_errors() -> Iterator[None]:
    """Map what vLLM raises for a request that it does not take to EngineLostError."""
    try:
        yield
    except (
        ValueError,
        TypeError,
        RuntimeError,
        LookupError,
        NotImplementedError,
        EngineGenerateError,
    ) as error:
        raise EngineLostError(f"the engine did not accept a request: {error}") from error


def _first_lines(error: BaseException) -> str:
    """The message without pydantic's and transformers' appendices."""
    errors = getattr(error, "errors", None)
    if callable(errors):  # pydantic.ValidationError
        # A flag that may be of several types has a message for each: the first is enough.
        first_said = {_place(item["loc"]): _said(item) for item in reversed(errors())}
        return "; ".join(f"{place}{first_said[place]}" for place in reversed(first_said))
    text = " ".join(str(error).split())[:_LONGEST_CHARACTERS]
    if isinstance(error, KeyError):  # whose message is the key alone
        return f"KeyError: {text}"
    return text or type(error).__name__


def _killed_cores(error: BaseException) -> str:
    """The processes that signals ended, by what vLLM says of them; empty if there is none."""
    found = _FAILED.search(str(error))
    if found is None:
        return ""
    try:
        codes = ast.literal_eval(found[1])
    except (ValueError, SyntaxError):
        return ""
    named = (f"{name} {ended_by(code)}" for name, code in codes.items() if code and code < 0)
    return " and ".join(named)


def _place(names: tuple[int | str, ...]) -> str:
    """The flag, or what else it is that is wrong in a configuration; empty for the whole."""
    if not names:
        return ""
    first = str(names[0])
    is_flag = first in AsyncEngineArgs.__dataclass_fields__
    return f"--{first.replace('_', '-')}: " if is_flag else f"{first}: "


def _said(item: dict[str, Any]) -> str:
    if item["type"] == "dict_type" and isinstance(item["input"], str):
        return f"{item['input']!r} is not a JSON object"
    return str(item["msg"]).removeprefix("Value error, ")
