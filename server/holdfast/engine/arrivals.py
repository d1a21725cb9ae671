"""Makes a request of a call, with an ID by which the engine, and a death, can name it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from holdfast.engine.request import EngineOutputs, EngineRequest, Method
from holdfast.request_context import current_request

MAX_REQUEST_ID_CHARACTERS = 128
"""A longer request ID is replaced, as is one with other than visible ASCII characters."""


class Arrivals:
    """Makes the requests of one `ReplayManager`."""

    def __init__(self, outputs: EngineOutputs, requests: Iterable[EngineRequest]) -> None:
        """Take all requests, as they are at any time."""
        self._outputs = outputs
        self._requests = requests
        self._numbers = count(1)

    def request(self, method: Method, arguments: Mapping[str, Any]) -> EngineRequest:
        """Return the request of a call, with an ID that no other request has now."""
        named = {**arguments, "request_id": self._unique_id(str(arguments.get("request_id", "")))}
        is_replayable = self._outputs.is_replayable(arguments)
        return EngineRequest(
            method,
            named,
            current_request(),
            is_replayable=is_replayable,
            is_streamed=self._outputs.is_streamed(arguments),
            is_continuable=is_replayable and self._outputs.is_continuable(arguments),
            is_answer_streamed=self._outputs.is_answer_streamed(arguments),
            number=next(self._numbers),
        )

    def end_streams_with_engine(self) -> None:
        """Have no present stream go on in the next engine, which has other weights."""
        for request in self._requests:
            request.is_continuable = False

    def _unique_id(self, given: str) -> str:
        """Return an ID that no other request has now: clients choose, and may choose alike.

        A request is aborted, and blamed, by its ID.
        """
        name = safe_request_id(given)
        if all(other.request_id != name for other in self._requests):
            return name
        return safe_request_id(f"{name}~{next(self._numbers)}")


def safe_request_id(given: str) -> str:
    """Shorten a request ID to fit a worker's record of its step, but keep it distinct."""
    if len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    digest = hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    visible = "".join(char for char in given if char.isascii() and char.isprintable())
    return f"{visible[: MAX_REQUEST_ID_CHARACTERS - len(digest) - 1]}~{digest}"
