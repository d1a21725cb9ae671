"""What `engine.stat_logger` takes from vLLM's metrics, and what it makes of them."""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from vllm.config import LoRAConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.parser import metrics as parser_metrics
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.buckets import histogram_buckets
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

from holdfast.patches.stat_logger import STALE_SECONDS, LastingStatLogger, Queues, prometheus_logger
from holdfast.telemetry.counters import WAIT_BOUNDS_SECONDS
from holdfast.telemetry.exposition import render, vllm_registry
from holdfast.telemetry.load import SATURATED_WAITING, Load, SchedulerReport, with_running
from holdfast.telemetry.vllm_gauges import KV_USAGE, WAITING, WAITING_BY_REASON, LoadedRegistry
from stub_engine import FakeClock

Series = tuple[str, frozenset[tuple[str, str]]]
CONFIGURATION: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 1000,
}
RUNNING = "vllm:num_requests_running"
GENERATED = "vllm:generation_tokens_total"
CACHE_CONFIG = "vllm:cache_config_info"
LORA_INFO = "vllm:lora_requests_info"


def make_config(directory: Path) -> Any:
    """A configuration with every kind of metric that needs no other package."""
    (directory / "config.json").write_text(json.dumps(CONFIGURATION))
    return AsyncEngineArgs(
        model=str(directory),
        served_model_name=["tiny"],
        skip_tokenizer_init=True,
        kv_cache_metrics=True,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 2,
        },
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
        },
    ).create_engine_config()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
def lora_config(config: Any) -> Any:
    """The same with adapters."""
    changed = copy.deepcopy(config)
    changed.lora_config = LoRAConfig(max_loras=4)
    return changed


@pytest.fixture(autouse=True)
def no_metric_left() -> Iterator[None]:
    """No test sees the metrics of another."""
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


class Server:
    """The loggers of one server, a generation at a time."""

    def __init__(self, config: Any, *, is_probing: Callable[[], bool] = lambda: False) -> None:
        self.config = config
        self.queues = Queues()
        self.logger_class: Any = prometheus_logger(is_probing, self.queues)

    def start(self, blocks: int = 100, engines: int = 1) -> Any:
        """A logger as this number of engines makes it, whose KV caches have `blocks` blocks."""
        config = copy.deepcopy(self.config)
        config.cache_config.num_gpu_blocks = blocks
        logger = self.logger_class(vllm_config=config, engine_indexes=[*range(engines)])
        logger.log_engine_initialized()
        return logger


@pytest.fixture
def server(config: Any) -> Server:
    return Server(config)


def page(registry: Collector | None = None) -> dict[Series, float]:
    """Every series of vLLM's on the page."""
    text = render([registry or vllm_registry()])
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }


def values(name: str, registry: Collector | None = None) -> list[float]:
    return [value for (found, _), value in page(registry).items() if found == name]


def is_cumulative(series: Series) -> bool:
    return series[0].endswith(("_total", "_bucket", "_sum", "_count"))


def serve(logger: Any, tokens: int = 7) -> None:
    """Record a step in which one request ended and others run and wait."""
    iteration = IterationStats()
    iteration.num_generation_tokens = tokens
    iteration.time_to_first_tokens_iter.append(0.2)
    iteration.finished_requests.append(
        FinishedRequestStats(
            finish_reason=FinishReason.LENGTH, num_prompt_tokens=5, num_generation_tokens=tokens
        )
    )
    scheduler = SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.5)
    logger.record(scheduler, iteration, engine_idx=0)


def test_vllms_own_logger_starts_over(config: Any) -> None:
    """What ours is for: a second engine sets the counters of the first to 0."""
    serve(PrometheusStatLogger(config, [0]))
    assert values(GENERATED) == [7]
    PrometheusStatLogger(config, [0])
    assert values(GENERATED) == [0]


def test_nothing_is_on_the_page_that_vllm_has_not(config: Any, server: Server) -> None:
    """Ours makes the families, the labels and the buckets that vLLM's makes."""
    PrometheusStatLogger(config, [0]).log_engine_initialized()
    expected = {name: dict(labels).keys() for name, labels in page()}
    buckets = {series for series in page() if series[0].endswith("_bucket")}
    unregister_vllm_metrics()
    server.start()
    assert {name: dict(labels).keys() for name, labels in page()} == expected
    assert {series for series in page() if series[0].endswith("_bucket")} == buckets


def test_every_metric_of_vllms_logger_lasts(server: Server) -> None:
    """No part of vLLM's logger makes a metric past the hooks: a second one adds no collector."""
    server.start()
    before = set(REGISTRY._collector_to_names)
    server.logger_class.generation_ended()
    server.start()
    assert set(REGISTRY._collector_to_names) == before


def test_counters_go_on_in_the_next_generation(server: Server) -> None:
    """What two generations generated is on the page as a sum, histograms too."""
    for _ in range(2):
        serve(server.start())
        server.logger_class.generation_ended()
    assert values(GENERATED) == [14]
    assert values("vllm:time_to_first_token_seconds_count") == [2]
    assert values("vllm:time_to_first_token_seconds_sum") == pytest.approx([0.4])


def test_a_series_was_created_once(server: Server) -> None:
    """`_created` stays too, by which a scraper sees a reset."""
    server.start()
    before = {s: value for s, value in page().items() if s[0].endswith("_created")}
    server.logger_class.generation_ended()
    server.start()
    assert before
    assert {s: value for s, value in page().items() if s[0].endswith("_created")} == before


def test_counters_never_fall_and_never_vanish(server: Server) -> None:
    """Whenever a scrape comes, also while a generation ends and the next one starts."""
    serve(server.start())
    pages = [page()]
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.is_set():
            pages.append(page())

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        for blocks in range(20):
            server.logger_class.generation_ended()
            serve(server.start(blocks))
    finally:
        is_over.set()
        scraper.join(timeout=60)
    pages.append(page())
    for earlier, later in itertools.pairwise(pages):
        for series in filter(is_cumulative, earlier):
            assert later[series] >= earlier[series]
    assert values(GENERATED) == [21 * 7]


def test_gauges_are_zero_without_an_engine(server: Server) -> None:
    """No balancer sees the queue of an engine that is dead, and nobody takes it for awake."""
    serve(server.start())
    assert values(RUNNING) == [3]
    assert server.queues.totals() == (3, 2)
    assert server.queues.kv_used() == {0: 0.5}
    server.logger_class.generation_ended()
    gauges = [RUNNING, "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
    assert [values(name) for name in gauges] == [[0], [0], [0]]
    assert set(values("vllm:engine_sleep_state")) == {0}
    assert (server.queues.totals(), server.queues.kv_used()) == ((0, 0), {})


def test_a_scheduler_says_what_it_defers(server: Server) -> None:
    """Apart from what waits: so an engine that only compiles a grammar is known."""
    logger = server.start()
    stats = SchedulerStats(num_skipped_waiting_reqs=1)
    logger.record(stats, None, engine_idx=0)
    assert server.queues.deferring() == {0}
    stats.num_running_reqs = 1
    logger.record(stats, None, engine_idx=0)
    assert server.queues.deferring() == set()


def test_what_a_scheduler_says_is_old_after_a_while() -> None:
    """One that hangs says nothing any more, whatever it said before."""
    clock = FakeClock()
    queues = Queues(clock)
    queues.update(0, SchedulerReport(deferred=1))
    clock.now_seconds += STALE_SECONDS + 1
    assert queues.deferring() == set()


def test_a_scheduler_whose_steps_finish_all_they_run_is_not_blocked() -> None:
    """A busy pooling model: its last report always says that requests wait and none runs."""
    queues = Queues(FakeClock())
    queues.update(0, SchedulerReport(waiting=2), has_answered=True)
    assert queues.blocked_since_seconds() == {}
    queues.update(0, SchedulerReport(waiting=2))
    assert queues.blocked_since_seconds().keys() == {0}
    queues.update(0, SchedulerReport(waiting=2), has_answered=True)
    assert queues.blocked_since_seconds() == {}


def test_a_logger_tells_that_a_step_has_answered(server: Server) -> None:
    """vLLM passes statistics of an iteration exactly for a step that has answered a request."""
    logger = server.start()
    waiting = SchedulerStats(num_waiting_reqs=2)
    logger.record(waiting, IterationStats(), engine_idx=0)
    assert server.queues.blocked_since_seconds() == {}
    logger.record(waiting, None, engine_idx=0)
    assert server.queues.blocked_since_seconds().keys() == {0}


def report(logger: Any, engine: int, **stats: Any) -> None:
    """Have the scheduler of one engine report."""
    logger.record(SchedulerStats(**stats), None, engine_idx=engine)


def test_what_waits_in_the_front_end_is_waiting(server: Server) -> None:
    """Exactly, over all engines of a data-parallel group, and each keeps what it has itself."""
    logger = server.start(engines=2)
    report(logger, 0, num_running_reqs=4, num_waiting_reqs=3)
    report(logger, 1, num_running_reqs=4, num_skipped_waiting_reqs=1)
    load = Load(held=7, sent=12, schedulers=server.queues.reports(2))
    registry = LoadedRegistry(vllm_registry(), load)
    assert values(WAITING, registry) == [3 + 4, 1 + 3]
    assert sum(values(WAITING_BY_REASON, registry)) == 7 + 4
    assert values(RUNNING, registry) == [4, 4]


def test_a_pooling_model_runs_what_no_scheduler_has_left_waiting(server: Server) -> None:
    """Its schedulers report 0 at the end of each step, and the page says what was sent."""
    logger = server.start(engines=2)
    report(logger, 0, num_waiting_reqs=1)
    report(logger, 1)
    reports = with_running(server.queues.reports(2), sent=6, running_at_once=8)
    registry = LoadedRegistry(vllm_registry(), Load(held=2, sent=6, schedulers=reports))
    assert values(RUNNING, registry) == [3, 2]
    assert sum(values(WAITING, registry)) == 2 + 1


def test_each_reason_to_wait_is_named(server: Server) -> None:
    """Those of vLLM as it counts them, and ours for what no scheduler has reported."""
    logger = server.start()
    report(logger, 0, num_running_reqs=1, num_waiting_reqs=2, num_skipped_waiting_reqs=3)
    load = Load(held=4, sent=7, schedulers=server.queues.reports(1))
    found = {
        dict(labels)["reason"]: value
        for (name, labels), value in page(LoadedRegistry(vllm_registry(), load)).items()
        if name == WAITING_BY_REASON
    }
    assert found == {"capacity": 2, "deferred": 3, "held": 5}


def test_every_engine_of_a_saturated_server_is_full(server: Server) -> None:
    """Whichever of them a router reads; no other gauge of vLLM's changes."""
    server.start(engines=2)
    load = Load(schedulers=2 * (SchedulerReport(),)).saturated()
    registry = LoadedRegistry(vllm_registry(), load)
    assert values(KV_USAGE, registry) == [1, 1]
    assert values(WAITING, registry) == [SATURATED_WAITING] * 2
    raised = {KV_USAGE, WAITING, WAITING_BY_REASON}
    before, after = (
        {series: value for series, value in one.items() if series[0] not in raised}
        for one in (page(), page(registry))
    )
    assert after == before


def test_a_page_without_vllms_gauges_gets_none(server: Server) -> None:
    """Before the first engine nothing of it was measured."""
    assert page(LoadedRegistry(vllm_registry(), Load(held=3))) == {}
    assert server.queues.reports(1) == (SchedulerReport(),)


def test_a_scheduler_reports_its_cache_and_adapters(server: Server) -> None:
    """As vLLM's own logger gets them: an adapter without a request is in neither list."""
    logger = server.start()
    running, waiting = {"a": 2, "b": 0}, {"a": 0, "b": 1}
    stats = {"running_lora_adapters": running, "waiting_lora_adapters": waiting}
    report(logger, 0, num_running_reqs=2, kv_cache_usage=0.25, **stats)
    (found,) = server.queues.reports(1)
    assert (found.running, found.kv_usage) == (2, 0.25)
    assert found.running_loras == {"a"}
    assert found.waiting_loras == {"b"}


def test_only_the_newest_adapters_have_a_series(lora_config: Any) -> None:
    """vLLM keeps one for each order in which its clients ever named adapters."""
    logger = Server(lora_config).start()
    for names in itertools.permutations(("a", "b", "c")):
        running = dict.fromkeys(names, 1)
        report(logger, 0, num_running_reqs=3, running_lora_adapters=running)
    (labels,) = (dict(labels) for name, labels in page() if name == LORA_INFO)
    assert labels["running_lora_adapters"] == "c,b,a"


def test_the_next_engine_is_awake(server: Server) -> None:
    """The gauges of the next generation are those of its own logger."""
    server.start()
    server.logger_class.generation_ended()
    serve(server.start())
    assert values(RUNNING) == [3]
    assert sorted(values("vllm:engine_sleep_state")) == [0, 0, 1]


def test_facts_of_a_dead_engine_are_gone(server: Server) -> None:
    """A KV cache of another size does not stand beside that of the generation before."""
    server.start(blocks=100)
    server.logger_class.generation_ended()
    assert values(CACHE_CONFIG) == []
    server.start(blocks=90)
    (labels,) = (dict(labels) for name, labels in page() if name == CACHE_CONFIG)
    assert labels["num_gpu_blocks"] == "90"


def test_a_start_that_failed_leaves_nothing(server: Server) -> None:
    """An engine that had a logger and never served has no facts beside those of the next."""
    server.start(blocks=100)
    server.start(blocks=90)
    (labels,) = (dict(labels) for name, labels in page() if name == CACHE_CONFIG)
    assert labels["num_gpu_blocks"] == "90"


def test_a_dead_engine_says_nothing_more(server: Server) -> None:
    """What vLLM still reads from the sockets of an engine that is gone changes no series."""
    dead = server.start()
    server.logger_class.generation_ended()
    before = page()
    serve(dead)
    assert page() == before
    assert server.queues.totals() == (0, 0)
    server.start()
    serve(dead)
    assert values(RUNNING) == [0]


def test_what_others_count_stays(server: Server) -> None:
    """Metrics that vLLM's parsers and routes made themselves outlive an engine."""
    parser_metrics.init_parser_metrics(model_name="tiny")
    parser_metrics.record_tool_parser_invocation(
        is_tool_called=True, is_streaming=False, request=None
    )
    name = "vllm:tool_call_parser_invocations_total"
    assert sum(values(name)) == 1
    server.start()
    server.logger_class.generation_ended()
    server.start()
    assert sum(values(name)) == 1


def test_probing_is_not_counted(config: Any) -> None:
    """While only the probe or a canary asks, vLLM's series stay, and the queues are known."""
    is_probing = True
    server = Server(config, is_probing=lambda: is_probing)
    logger = server.start()
    before = page()
    serve(logger)
    assert page() == before
    assert server.queues.totals() == (3, 2)
    is_probing = False
    serve(logger)
    assert values(GENERATED) == [7]


def test_servers_do_not_share(config: Any) -> None:
    """The class of one server knows nothing of another's."""
    first, second = Server(config), Server(config)
    assert first.logger_class is not second.logger_class
    assert issubclass(first.logger_class, LastingStatLogger)
    first.start()
    unregister_vllm_metrics()
    logger = second.start()
    first.logger_class.generation_ended()
    serve(logger)
    assert second.queues.totals() == (3, 2)


def write_two_generations(directory: Path) -> None:
    """Serve one request in each of two generations, and write what the page said of each."""
    server = Server(make_config(directory))
    serve(server.start(blocks=100))
    first = page()
    server.logger_class.generation_ended()
    between = [values(RUNNING), values(GENERATED)]
    serve(server.start(blocks=90))
    after = [values(RUNNING), values(GENERATED)]
    second = page()
    fallen = [
        series[0] for series in filter(is_cumulative, first) if second[series] < first[series]
    ]
    (directory / "said.json").write_text(json.dumps([between, after, fallen]))


def test_multi_process_mode_goes_on_too(tmp_path: Path) -> None:
    """With files instead of a registry nothing falls, gauges are zeroed and nothing warns."""
    (tmp_path / "files").mkdir()
    here = Path(__file__)
    program = (
        f"import pathlib, {here.stem}; "
        f"{here.stem}.write_two_generations(pathlib.Path({str(tmp_path)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "files"),
            "PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    said = json.loads((tmp_path / "said.json").read_text())
    assert said == [[[0], [7]], [[3], [14]], []]
    assert "multi-process mode" not in done.stderr


def test_every_bound_of_a_wait_is_one_for_the_first_token() -> None:
    """So both histograms can be asked at the same bound."""
    assert set(WAIT_BOUNDS_SECONDS) <= set(histogram_buckets("time_to_first_token"))
