"""May a key send another request now? Its limits are in the key file, what it used in `KeyUsage`.

A request counts once an engine was given it. One that was refused, or whose client left the queue,
costs its key nothing.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.api.errors import refuse_for_now
from holdfast.api.key_lines import KeyLimits
from holdfast.api.keyring import Keyring
from holdfast.api.router import Work, work_of
from holdfast.errors import KeyUsedUpError, OverloadedError
from holdfast.request_context import RequestContext, current_request
from holdfast.telemetry.counters import Refusals
from holdfast.telemetry.key_usage import KeyUsage

MINUTE_SECONDS = 60.0

_COUNTED = frozenset[Work]({"engine", "session"})
"""What a request occupies that counts; a session counts once, and its tokens as they come."""


class Quotas:
    """ASGI layer: refuses requests of a key that has reached its limits, and counts the others."""

    def __init__(  # noqa: PLR0913 - the composition root names each collaborator
        self,
        app: ASGIApp,
        keyring: Keyring,
        usage: KeyUsage,
        refusals: Refusals,
        *,
        root_path: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._usage = usage
        self._refusals = refusals
        self._root_path = root_path
        self._clock = clock
        self._minutes: dict[str, _Minute] = {}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass the request on, or answer 429 (close a WebSocket with 1013)."""
        context = current_request()
        if not context.key or work_of(scope, self._root_path) not in _COUNTED:
            return self._app(scope, receive, send)
        limits = self._keyring.limits_of(context.key)
        refusal = self._used_up(context.key) or self._too_many(context.key, limits)
        if refusal is not None:
            context.error = refusal.openai_type
            return refuse_for_now(refusal, scope, receive, send)
        return self._counted(context, limits, scope, receive, send)

    async def _counted(
        self, context: RequestContext, limits: KeyLimits, scope: Scope, receive: Receive, send: Send
    ) -> None:
        minute = self._minute(context.key) if limits.max_requests_per_minute else None
        used_up = partial(self._used_up, context.key)
        context.usage = request = _CountedRequest(context.key, self._usage, minute, used_up)
        try:
            await self._app(scope, receive, send)
        finally:
            request.response_ended()

    def _used_up(self, name: str) -> KeyUsedUpError | None:
        tokens = self._keyring.limits_of(name).max_tokens_per_day
        if tokens is None or self._usage.tokens_today(name) < tokens:
            return None
        self._refusals.count("key_daily_tokens")
        return KeyUsedUpError(
            f"This API key has used its {tokens} tokens for today (UTC).",
            retry_after_seconds=math.ceil(self._usage.day_seconds_left),
        )

    def _too_many(self, name: str, limits: KeyLimits) -> OverloadedError | None:
        requests = limits.max_requests_per_minute
        wait_seconds = 0.0 if requests is None else self._minute(name).wait_seconds(requests)
        if not wait_seconds:
            return None
        self._refusals.count("key_request_rate")
        return OverloadedError(
            f"This API key may send {requests} requests a minute.",
            retry_after_seconds=math.ceil(wait_seconds),
        )

    def _minute(self, name: str) -> _Minute:
        if name not in self._minutes:
            self._minutes[name] = _Minute(self._clock)
        return self._minutes[name]


class _Minute:
    """The requests of one key in the last minute, oldest first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrivals: OrderedDict[object, float] = OrderedDict()

    def add(self, request: object) -> None:
        """Count a request from now on; one that counts already keeps its place."""
        self._arrivals.setdefault(request, self._clock())

    def remove(self, request: object) -> None:
        """Forget a request that never ran."""
        self._arrivals.pop(request, None)

    def wait_seconds(self, limit: int) -> float:
        """Return the time until there is room for another request; 0 if there is."""
        horizon = self._clock() - MINUTE_SECONDS
        while self._arrivals and next(iter(self._arrivals.values())) <= horizon:
            self._arrivals.popitem(last=False)
        excess = len(self._arrivals) - limit
        if excess < 0:
            return 0.0
        return next(islice(self._arrivals.values(), excess, None)) - horizon


class _CountedRequest:
    """The `Usage` of one request. What it generates in the background counts after its response."""

    def __init__(
        self,
        name: str,
        usage: KeyUsage,
        minute: _Minute | None,
        used_up: Callable[[], KeyUsedUpError | None],
    ) -> None:
        self._name = name
        self._usage = usage
        self._minute = minute
        self.refusal = used_up
        self._has_begun = False
        # Counted at once: otherwise many that arrive together would all be below the limit.
        if minute is not None:
            minute.add(self)

    def request_began(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._usage.count(self._name, requests=1)
            if self._minute is not None:
                self._minute.add(self)

    def count_tokens(self, prompt_tokens: int, output_tokens: int) -> None:
        self._usage.count(self._name, prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    def response_ended(self) -> None:
        """Give its place back if no engine was given it."""
        if self._minute is not None and not self._has_begun:
            self._minute.remove(self)
