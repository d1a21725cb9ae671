"""Reads a replica as llm-d's endpoint picker does, and says when it would send requests there.

Every 50 ms it asks for the page of metrics, for at most a second. It takes one sample of each name,
and only of a gauge. Numbers that are older than 200 ms count as a saturated replica, and so do a
queue and a KV cache over their thresholds: https://github.com/llm-d/llm-d-router, below
`pkg/epp/framework/plugins`, `flowcontrol/saturationdetector/utilization` and
`datalayer/extractor/metrics`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

POLL_SECONDS = 0.05
LIMIT_SECONDS = 1.0
STALE_SECONDS = 0.2
QUEUE_THRESHOLD = 5
KV_THRESHOLD = 0.8
QUEUE = "vllm:num_requests_waiting"
RUNNING = "vllm:num_requests_running"
KV_USAGE = "vllm:kv_cache_usage_perc"
READY = "holdfast_ready"


@dataclass(frozen=True, slots=True)
class Seen:
    """What one page said."""

    at_seconds: float
    queue: float
    running: float
    kv_usage: float
    is_ready: bool

    @classmethod
    def on(cls, page: str, at_seconds: float) -> Seen:
        """Read a page; KeyError if it lacks a gauge that the picker needs."""
        gauges = {
            family.name: family.samples[0].value
            for family in text_string_to_metric_families(page)
            if family.type == "gauge"
        }
        is_ready = bool(gauges[READY])
        return cls(at_seconds, gauges[QUEUE], gauges[RUNNING], gauges[KV_USAGE], is_ready)

    @property
    def is_saturated(self) -> bool:
        """Whether these numbers, while they are fresh, keep the picker from sending anything."""
        return max(self.queue / QUEUE_THRESHOLD, self.kv_usage / KV_THRESHOLD) >= 1

    def is_stale(self, now_seconds: float) -> bool:
        """Whether they are too old to be believed."""
        return now_seconds - self.at_seconds > STALE_SECONDS


class EndpointPicker:
    """What one picker knows of one replica."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.history: list[Seen] = []
        """Every page that was read, in order."""

    def read(self, page: str) -> Seen:
        """Take the numbers of a page that has just come."""
        self.history.append(Seen.on(page, self._clock()))
        return self.history[-1]

    @property
    def sees_ready(self) -> bool:
        """Whether the last page said that requests are admitted."""
        return bool(self.history) and self.history[-1].is_ready

    def would_send(self) -> bool:
        """Whether it would send a request there now."""
        if not self.history or self.history[-1].is_stale(self._clock()):
            return False
        return not self.history[-1].is_saturated


@contextmanager
def picking(url: str, path: str = "/metrics/routing") -> Iterator[EndpointPicker]:
    """While entered, a thread polls a replica; at least once, and a poll that fails is an error."""
    picker = EndpointPicker()
    is_over = threading.Event()
    failures: list[Exception] = []

    def poll() -> None:
        with httpx.Client(base_url=url, timeout=LIMIT_SECONDS, trust_env=False) as client:
            while not is_over.is_set():
                try:
                    picker.read(client.get(path).raise_for_status().text)
                except httpx.TimeoutException:
                    pass  # on a loaded machine: what it knows becomes stale, as for the real one
                except (httpx.HTTPError, KeyError) as error:
                    failures.append(error)
                is_over.wait(POLL_SECONDS)

    thread = threading.Thread(target=poll, name="endpoint picker")
    thread.start()
    try:
        yield picker
    finally:
        is_over.set()
        thread.join()
    assert picker.history
    assert not failures, failures
