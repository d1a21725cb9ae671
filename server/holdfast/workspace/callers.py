"""Who asked? The caller of a module, named as vLLM's errors name it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType

_INSIDE = frozenset(
    {
        __name__,
        "holdfast.workspace.manager",
        "holdfast.workspace.resources",
        "holdfast.workspace.scratch",
        "vllm.v1.worker.workspace",
    }
)


def asking_frame() -> str:
    """The nearest caller outside of the workspace manager."""
    return first_frame(lambda frame: frame.f_globals.get("__name__") not in _INSIDE)


def first_frame(is_outside: Callable[[FrameType], bool]) -> str:
    """`file.py:line:function` of the nearest caller's frame for which `is_outside` holds."""
    frame = inspect.currentframe()
    frame = frame.f_back if frame else None
    while frame is not None and not is_outside(frame):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    code = frame.f_code
    _, _, file_name = code.co_filename.rpartition("/")
    return f"{file_name}:{frame.f_lineno}:{code.co_name}"
