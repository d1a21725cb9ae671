"""Requests that have ended an engine alone: they, and their like, are refused at once."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from typing import Any

from holdfast.engine.call import Dialect

REMEMBERED = 256
"""The latest of them; an older one would have to end two more engines."""


class Quarantine:
    """Remembers calls by what they ask, whoever asks it."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._digests: deque[str] = deque(maxlen=REMEMBERED)

    def add(self, arguments: Mapping[str, Any]) -> None:
        """Refuse calls with the same prompt and parameters from now on."""
        self._digests.append(self._digest(arguments))

    def has(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call is like one that is in it; next to nothing while it is empty."""
        return bool(self._digests) and self._digest(arguments) in self._digests

    def _digest(self, arguments: Mapping[str, Any]) -> str:
        return hashlib.sha256(self._dialect.identity(arguments).encode()).hexdigest()
