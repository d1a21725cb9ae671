"""Functions of vLLM that ours stand in for, each of which knows the one that it stands in for."""

from __future__ import annotations

from typing import Any

_MARK = "holdfast_original"


def original(owner: Any, name: str) -> Any:
    """What vLLM has under the name, in a class or a module, also where ours stands there."""
    found = getattr(owner, name)
    return getattr(found, _MARK, found)


def is_replaced(owner: Any, name: str) -> bool:
    """Whether ours stands there."""
    return hasattr(getattr(owner, name), _MARK)


def replace(owner: Any, name: str, function: Any) -> None:
    """Put ours there; a second time it stands in for vLLM's still."""
    setattr(function, _MARK, original(owner, name))
    setattr(owner, name, function)
