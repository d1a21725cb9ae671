"""What vLLM's exceptions say, on one line, in the words of the command line."""

from __future__ import annotations

import ast
import re
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from holdfast.engine.exit_codes import ended_by

_FAILED = re.compile(r"Failed (?:core|frontend) proc\(s\): (\{.*\})")
_LONGEST_CHARACTERS = 600


def first_lines(error: BaseException) -> str:
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


def killed_cores(error: BaseException) -> str:
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
