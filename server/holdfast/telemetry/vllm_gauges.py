"""vLLM's gauges of load, as they are exported: with what waits in the front end.

To vLLM, a request waits if it was accepted and does not run yet. Here most of those are still in
the front end, where vLLM cannot count them.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from holdfast.telemetry.load import Load, SchedulerReport

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
KV_USAGE = "vllm:kv_cache_usage_perc"
HELD_REASON = "held"
"""Beside vLLM's own reasons: no scheduler has reported the request yet."""


class LoadedRegistry(Collector):
    """Collects vLLM's families, with the load in place of what the schedulers reported.

    `vllm:num_requests_waiting`, summed over the engines, is the number of requests that wait, and
    so is the sum over the reasons, as vLLM documents it. A family that vLLM lacks is not added.
    """

    def __init__(self, registry: Collector, load: Load) -> None:
        self._registry = registry
        self._reports = dict(enumerate(load.schedulers))
        self._waiting = dict(enumerate(load.waiting_by_engine()))

    def collect(self) -> Iterator[Metric]:
        """Yield each family of the registry."""
        for family in self._registry.collect():
            if family.name == WAITING:
                family.samples = [self._waiting_sample(sample) for sample in family.samples]
            elif family.name == RUNNING:
                family.samples = [self._running_sample(sample) for sample in family.samples]
            elif family.name == WAITING_BY_REASON:
                family.samples = list(self._by_reason(family.samples))
            elif family.name == KV_USAGE:
                family.samples = [self._kv_sample(sample) for sample in family.samples]
            yield family

    def _waiting_sample(self, sample: Sample) -> Sample:
        return sample._replace(value=self._waiting.get(_engine(sample), sample.value))

    def _running_sample(self, sample: Sample) -> Sample:
        report = self._reports.get(_engine(sample))
        return sample if report is None else sample._replace(value=report.running)

    def _kv_sample(self, sample: Sample) -> Sample:
        usage = self._report(sample).kv_usage
        return sample if usage is None else sample._replace(value=usage)

    def _by_reason(self, samples: list[Sample]) -> Iterator[Sample]:
        for sample in samples:
            report = self._report(sample)
            values = {"capacity": report.waiting, "deferred": report.deferred}
            reason = sample.labels["reason"]
            yield sample._replace(value=values.get(reason, sample.value))
            if reason == "capacity":  # once for each engine
                held = self._waiting.get(_engine(sample), 0) - report.all_waiting
                yield sample._replace(labels={**sample.labels, "reason": HELD_REASON}, value=held)

    def _report(self, sample: Sample) -> SchedulerReport:
        return self._reports.get(_engine(sample), SchedulerReport())


def _engine(sample: Sample) -> int:
    return int(sample.labels["engine"])
