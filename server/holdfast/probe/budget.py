"""May this size be tried? The time left, the journal and the host's memory decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from holdfast.probe import measure
from holdfast.probe.journal import ProbeJournal

SHARE_OF_TIME_LEFT = 0.5
"""A size is tried if it is expected to take at most this share of the time left."""
SHARE_OF_AN_ATTEMPT = 0.75
"""A context that takes more than this share is given up, since devices get slower."""


class Budget:
    """The time and memory that one run of the suite may spend, and has spent so far."""

    def __init__(
        self,
        seconds: float,
        journal: ProbeJournal,
        clock: Callable[[], float],
        available_memory: Callable[[], int] | None,
    ) -> None:
        self._clock = clock
        self._deadline_seconds = clock() + seconds
        self._journal = journal
        self._available_memory = available_memory
        self._runs: list[measure.Run] = []
        self._cost_bytes = 0
        self._cost_tokens = 0

    def now_seconds(self) -> float:
        """Return the time of the clock that measures the runs."""
        return self._clock()

    def seconds_left(self) -> float:
        """Return the time until the end of the whole suite."""
        return self._deadline_seconds - self._clock()

    def seconds_of_an_attempt(self) -> float:
        """Return the longest time for one context: the rest is for the steps after it."""
        return SHARE_OF_AN_ATTEMPT * self.seconds_left()

    @property
    def is_rate_known(self) -> bool:
        """Whether a run was measured that sizes can be refused by."""
        return measure.expected_seconds(self._runs, 1) is not None

    @property
    def forbidden_tokens(self) -> int | None:
        """The smallest context that the journal forbids."""
        return self._journal.forbidden_tokens

    def time_obstacle(
        self, tokens: int, context_tokens: int = 0, *, least_seconds: float = 0.0
    ) -> str:
        """Return why `tokens` cannot be computed in the time left; empty if they can.

        They end at `context_tokens` if they belong to one prompt. Any size takes `least_seconds`,
        as the slowest steps seen tell.
        """
        left = self.seconds_left()
        measured = measure.expected_seconds(self._runs, tokens, context_tokens)
        expected = max(measured or 0.0, least_seconds)
        if left <= 0:
            return f"no time is left for {tokens} tokens"
        if expected > left * SHARE_OF_TIME_LEFT:
            return (
                f"{tokens} tokens would take about {expected:.0f} s at the measured rate, but "
                f"only {left:.0f} s are left"
            )
        return ""

    def context_obstacle(self, context_tokens: int, new_tokens: int) -> str:
        """Return why a context with `new_tokens` to compute is left out; empty if it is not."""
        forbidden = self._journal.forbidden_tokens
        if forbidden is not None and context_tokens >= forbidden:
            evidence = self._journal.evidence
            remedy = f"delete {evidence}" if evidence else "restart the server"
            return (
                f"an attempt at {forbidden} tokens took the machine down or exhausted its memory; "
                f"{remedy} to try it again"
            )
        return self._memory_obstacle(context_tokens) or self.time_obstacle(
            new_tokens, context_tokens
        )

    def _memory_obstacle(self, context_tokens: int) -> str:
        if self._available_memory is None:
            return ""
        available = self._available_memory()
        growth = context_tokens / self._cost_tokens if self._cost_tokens else 0.0
        if measure.leaves_margin(
            available_bytes=available, cost_bytes=self._cost_bytes, growth=growth
        ):
            return ""
        return (
            f"{context_tokens} tokens could leave the host less than its margin: {available} "
            f"bytes are available, and the last size used {self._cost_bytes}"
        )

    def image_obstacle(self, pixels: int) -> str:
        """Return why an image of this size is left out; empty if it is not."""
        forbidden = self._journal.forbidden_image
        if forbidden is None or pixels < forbidden[0]:
            return ""
        size, evidence = forbidden
        remedy = f"delete {evidence}" if evidence else "restart the server"
        return (
            f"an attempt at an image of {size} pixels took the machine down or exhausted its "
            f"memory; {remedy} to try it again"
        )

    def image_attempt(self, pixels: int) -> AbstractContextManager[None]:
        """Journal an attempt at an image; what it takes says nothing about longer contexts."""
        return self._journal.image_attempt(pixels)

    @contextmanager
    def attempt(self, context_tokens: int, new_tokens: int) -> Iterator[None]:
        """Journal an attempt at a context, and measure its time and memory if it is served.

        The memory that is missing afterwards is its cost, since allocators keep what they took.
        """
        before = self._available_memory() if self._available_memory else 0
        started = self._clock()
        with self._journal.attempt(context_tokens):
            yield
        if new_tokens:
            seconds = self._clock() - started
            self._runs.append(measure.Run(new_tokens, seconds, context_tokens))
        if self._available_memory:
            self._cost_bytes = max(0, before - self._available_memory())
            self._cost_tokens = context_tokens
