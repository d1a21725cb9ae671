"""Requests and connections that were turned away, by reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

RefusalReason = Literal[
    "not_ready",
    "draining",
    "failed",
    "overloaded",
    "key_concurrency",
    "unauthorized",
    "forbidden",
    "malformed",
    "url_too_long",
    "too_many_headers",
    "headers_too_large",
    "slow_headers",
    "body_too_large",
    "slow_body",
    "json_too_deep",
    "unsupported_media_type",
    "timed_out",
    "idle_connection",
    "too_many_connections",
]
REFUSAL_REASONS: tuple[RefusalReason, ...] = get_args(RefusalReason)


class Refusals:
    """Counts what is turned away. One event loop counts, any thread may read."""

    def __init__(self) -> None:
        self._counts: dict[RefusalReason, int] = dict.fromkeys(REFUSAL_REASONS, 0)

    def count(self, reason: RefusalReason) -> None:
        """Count one request or connection turned away."""
        self._counts[reason] += 1

    @property
    def counts(self) -> Mapping[RefusalReason, int]:
        """How often each reason turned something away; all are there from the beginning."""
        return dict(self._counts)
