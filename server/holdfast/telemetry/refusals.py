"""Requests and connections that were turned away, by reason."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.records import REFUSAL_REASONS, RefusalReason


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
