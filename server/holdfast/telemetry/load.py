"""How loaded is the server? What runs and what waits, in the front end and in vLLM's schedulers.

Requests are counted as vLLM counts them: each sequence of a request that the engine has, and one
for a request that the engine has not seen yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

SATURATED_WAITING = 10
"""Requests for each engine. Twice what llm-d's router accepts by default, so that a headroom does
not open the server (https://github.com/llm-d/llm-d-router, `saturationdetector/utilization`); few
enough that an autoscaler does not answer one lost engine with a fleet."""
SATURATED_KV_USAGE = 1.0


@dataclass(frozen=True, slots=True)
class SchedulerReport:
    """What the scheduler of one engine reported last; zeros if it has reported nothing."""

    running: int = 0
    waiting: int = 0
    """Requests that wait for capacity."""
    deferred: int = 0
    """Requests that wait for something else: a grammar, a transfer or an adapter."""
    kv_usage: float | None = 0.0
    """The used share of the KV cache, from 0 to 1; None if schedulers report nothing."""
    running_loras: frozenset[str] = frozenset()
    waiting_loras: frozenset[str] = frozenset()

    @property
    def all_waiting(self) -> int:
        """Requests that wait, whatever for."""
        return self.waiting + self.deferred


@dataclass(frozen=True, slots=True)
class Load:
    """All requests of one moment that were accepted and not finished."""

    held: int = 0
    """Requests that wait in the front end: for capacity, for their turn, or for an engine."""
    sent: int = 0
    """Requests that an engine has."""
    schedulers: tuple[SchedulerReport, ...] = (SchedulerReport(),)
    """By the index of the engine; at least one."""

    @property
    def running(self) -> int:
        """Requests that run, over all engines."""
        return sum(report.running for report in self.schedulers)

    @property
    def waiting(self) -> int:
        """Requests that were accepted and do not run yet, over all engines and in the front end.

        A scheduler reports at the end of a step, so a request that was sent during one is in no
        report: it waits as long as none says that it runs.
        """
        return self.held + max(self.sent - self.running, self._waiting_in_schedulers)

    @property
    def kv_usage(self) -> float | None:
        """The used share of the KV caches of all engines together; None if it is unknown."""
        known = [report.kv_usage for report in self.schedulers if report.kv_usage is not None]
        return sum(known) / len(known) if known else None

    @property
    def running_loras(self) -> tuple[str, ...]:
        """The adapters with running requests, in order."""
        return _united(report.running_loras for report in self.schedulers)

    @property
    def waiting_loras(self) -> tuple[str, ...]:
        """The adapters with requests that wait in a scheduler, in order."""
        return _united(report.waiting_loras for report in self.schedulers)

    def waiting_by_engine(self) -> tuple[int, ...]:
        """Divide `waiting` among the engines: what its scheduler has, and a share of the rest."""
        share, left = divmod(self.waiting - self._waiting_in_schedulers, len(self.schedulers))
        return tuple(
            report.all_waiting + share + (index < left)
            for index, report in enumerate(self.schedulers)
        )

    def saturated(self) -> Load:
        """Return this load, raised as far as a router must see to send nothing here."""
        missing = SATURATED_WAITING * len(self.schedulers) - self.waiting
        full = (replace(report, kv_usage=SATURATED_KV_USAGE) for report in self.schedulers)
        return replace(self, held=self.held + max(0, missing), schedulers=tuple(full))

    @property
    def _waiting_in_schedulers(self) -> int:
        return sum(report.all_waiting for report in self.schedulers)


def with_running(
    reports: tuple[SchedulerReport, ...], sent: int, running_at_once: float
) -> tuple[SchedulerReport, ...]:
    """Return the reports of schedulers that do not tell what runs: as much as fits.

    A scheduler reports at the end of a step, and has forgotten by then what the step has finished:
    every request of a pooling model whose prompt fits into one step.
    """
    ready = max(0, sent - sum(report.all_waiting for report in reports))
    share, left = divmod(int(min(ready, running_at_once)), len(reports))
    return tuple(
        replace(report, running=share + (index < left)) for index, report in enumerate(reports)
    )


def _united(names: Iterable[frozenset[str]]) -> tuple[str, ...]:
    return tuple(sorted(frozenset().union(*names)))
