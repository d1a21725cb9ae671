"""Makes a request of a call, with an ID by which a death can name it, and finds it by that ID."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from holdfast.engine.requests.request import EngineOutputs, EngineRequest, Method
from holdfast.records import Suspect
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
        self._by_id: WeakValueDictionary[str, EngineRequest] = WeakValueDictionary()
        """All requests that are known here, also those whose callers have left."""

    def request(self, method: Method, arguments: Mapping[str, Any]) -> EngineRequest:
        """Return the request of a call, with an ID that no other request has."""
        named = {**arguments, "request_id": self._unique_id(str(arguments.get("request_id", "")))}
        is_replayable = self._outputs.is_replayable(arguments)
        context = current_request()
        request = EngineRequest(
            method,
            named,
            context,
            is_replayable=is_replayable,
            is_streamed=self._outputs.is_streamed(arguments),
            is_continuable=is_replayable and self._outputs.is_continuable(arguments),
            is_answer_streamed=self._outputs.is_answer_streamed(arguments),
            is_later_step=context.beam_searches > 0 and not context.begins_search,
            number=next(self._numbers),
        )
        context.begins_search = False
        self._by_id[request.request_id] = request
        return request

    def end_streams_with_engine(self) -> None:
        """Have no present stream go on in the next engine, which has other weights."""
        for request in self._requests:
            request.is_continuable = False

    def _unique_id(self, given: str) -> str:
        """Return an ID that no other request has: clients choose, and may choose alike.

        A request is aborted, and blamed, by its ID, also after its caller has left.
        """
        name = wanted = safe_request_id(given)
        while name in self._by_id:
            name = safe_request_id(f"{wanted}~{next(self._numbers)}")
        return name


def safe_request_id(given: str) -> str:
    """Shorten a request ID to fit a worker's record of its step, but keep it distinct."""
    if len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    digest = hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    visible = "".join(char for char in given if char.isascii() and char.isprintable())
    return f"{visible[: MAX_REQUEST_ID_CHARACTERS - len(digest) - 1]}~{digest}"


def named_requests(
    outputs: EngineOutputs, suspects: Iterable[Suspect], requests: Iterable[EngineRequest]
) -> tuple[list[EngineRequest], bool]:
    """Return the requests that a death names, with how far they got, the first of each ID.

    The second value says whether all that were in a running step are among them.
    """
    by_name: dict[str, EngineRequest] = {}
    for request in requests:
        by_name.setdefault(request.request_id, request)
    named: dict[EngineRequest, None] = {}
    is_complete = True
    for suspect in suspects:
        names = outputs.request_ids(suspect.request_id)
        found = [by_name[name] for name in names if name in by_name]
        if not found:
            is_complete = is_complete and not suspect.is_in_running_step
        elif (request := found[0]) not in named:
            request.reached_tokens = max(request.reached_tokens, suspect.reached_tokens)
            request.is_prefilling = suspect.is_prefill
            named[request] = None
    return list(named), is_complete


def sent_tokens(outputs: EngineOutputs, request: EngineRequest) -> int:
    """Return the length of prompt and answer as far as it was sent; 0 if nothing was."""
    sent = request.sent
    prompt_tokens = outputs.prompt_tokens(sent.last_output) if sent.token_ids else 0
    return prompt_tokens + len(sent.token_ids)
