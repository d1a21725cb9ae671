"""vLLM's own metrics, without the probe's traffic in them, and the length of its queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger


class Queues:
    """Requests that run and wait in each engine, as its scheduler last said."""

    def __init__(self) -> None:
        self._by_engine: dict[int, tuple[int, int]] = {}

    def said(self, engine: int, running: int, waiting: int) -> None:
        """Take in what a scheduler said."""
        self._by_engine[engine] = (running, waiting)

    def clear(self) -> None:
        """The engine is gone, and what it had with it."""
        self._by_engine.clear()

    def totals(self) -> tuple[int, int]:
        """(running, waiting) over all engines."""
        counts = tuple(self._by_engine.values())
        return sum(running for running, _ in counts), sum(waiting for _, waiting in counts)


def prometheus_logger(is_probing: Callable[[], bool], queues: Queues) -> type:
    """A class for `AsyncLLM(stat_loggers=[...])`, which takes the place of vLLM's default one."""

    class QuietPrometheusStatLogger(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is Any
        """Records what users ask for, and nothing while the probe is the only one who asks."""

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            *args: Any,
            engine_idx: int = 0,
            **kwargs: Any,
        ) -> None:
            if scheduler_stats is not None:
                queues.said(
                    engine_idx, scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
                )
            if not is_probing():
                super().record(
                    scheduler_stats, iteration_stats, *args, engine_idx=engine_idx, **kwargs
                )

    return QuietPrometheusStatLogger
