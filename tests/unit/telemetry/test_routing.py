"""The page for routers has each number once, in the forms that their parsers take."""

from __future__ import annotations

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from holdfast.telemetry.load import SATURATED_WAITING, Load, SchedulerReport
from holdfast.telemetry.routing import ROUTING_SERIES, Routing, routing_page

ODD_NAME = 'a "quoted\\ name\nof two lines'
REPORTS = (
    SchedulerReport(2, 1, 1, 0.5, frozenset({"one", "two"}), frozenset({ODD_NAME})),
    SchedulerReport(1, 0, 0, 0.25),
)
FULL = Routing(
    Load(held=3, sent=5, schedulers=REPORTS),
    is_ready=True,
    proven_tokens=8191,
    kv_block_tokens=16,
    kv_blocks=4096,
    max_loras=4,
    unix_seconds=1_800_000_000.5,
)


def families(now: Routing) -> dict[str, Metric]:
    """The families of the page, by name."""
    return {one.name: one for one in text_string_to_metric_families(routing_page(now).decode())}


def value(now: Routing, name: str) -> float:
    """The only sample of a family."""
    (sample,) = families(now)[name].samples
    return float(sample.value)


def test_each_series_stands_once_in_the_order_of_the_table() -> None:
    """Over all engines, and each says that it is a gauge: a router takes no other kind."""
    found = families(FULL)
    assert [*found] == [one.name for one in ROUTING_SERIES]
    assert {one.type for one in found.values()} == {"gauge"}
    assert {len(one.samples) for one in found.values()} == {1}
    assert [one.documentation for one in found.values()] == [one.help for one in ROUTING_SERIES]
    assert [tuple(one.samples[0].labels) for one in found.values()] == [
        one.labels for one in ROUTING_SERIES
    ]


def test_the_numbers_are_those_of_all_engines() -> None:
    """What waits in the front end is waiting."""
    assert value(FULL, "vllm:num_requests_waiting") == 3 + 2
    assert value(FULL, "vllm:num_requests_running") == 3
    assert value(FULL, "vllm:kv_cache_usage_perc") == 0.375
    assert value(FULL, "holdfast_ready") == 1
    assert value(FULL, "holdfast_proven_tokens") == 8191


def test_the_cache_is_described_by_labels() -> None:
    """As in vLLM's own series, from which routers size their index of prefixes."""
    (sample,) = families(FULL)["vllm:cache_config_info"].samples
    assert sample.labels == {"block_size": "16", "num_gpu_blocks": "4096"}


def test_the_adapters_are_described_by_labels() -> None:
    """Whatever their names; the value is the time, by which a router finds the newest."""
    (sample,) = families(FULL)["vllm:lora_requests_info"].samples
    assert sample.labels == {
        "max_lora": "4",
        "running_lora_adapters": "one,two",
        "waiting_lora_adapters": ODD_NAME,
    }
    assert sample.value == FULL.unix_seconds


@pytest.mark.parametrize("now", [FULL, Routing(Load(), is_ready=False)])
def test_openmetrics_reads_the_same(now: Routing) -> None:
    """The pages differ in the end marker alone."""
    plain, other = routing_page(now), routing_page(now, is_openmetrics=True)
    assert other == plain + b"# EOF\n"
    parsed = openmetrics_families(other.decode())  # type: ignore[no-untyped-call]
    assert [one.name for one in parsed] == [*families(now)]


def test_a_server_that_is_not_ready_is_full() -> None:
    """From the first second on: a router never takes an empty page for an idle replica."""
    now = Routing(Load(held=1), is_ready=False)
    assert value(now, "vllm:num_requests_waiting") == SATURATED_WAITING
    assert value(now, "vllm:kv_cache_usage_perc") == 1
    assert value(now, "holdfast_ready") == 0


def test_what_is_not_known_has_no_series() -> None:
    """The cache before the first engine, adapters without LoRA, the use of a silent cache."""
    silent = (SchedulerReport(running=1, kv_usage=None),)
    found = families(Routing(Load(sent=1, schedulers=silent), is_ready=True))
    missing = {one.name for one in ROUTING_SERIES} - set(found)
    assert missing == {
        "vllm:cache_config_info",
        "vllm:kv_cache_usage_perc",
        "vllm:lora_requests_info",
    }
