"""Every plan of the probe against vLLM's own Scheduler: it asks for no step that cannot be.

The probe's whole suite runs against `ScheduledEngine`, over a real socket. Each pair of values of
the settings below meets in at least one test.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

import httpx
import pytest

from asgi_server import serving
from fake_openai_app import openai_app
from gpu_paths.reports import told
from gpu_paths.scheduled_engine import ScheduledEngine, facts_of
from gpu_paths.scheduler_settings import (
    MAMBA_BLOCK_TOKENS,
    METHODS,
    Groups,
    Setting,
    configured,
    decoder_configuration,
)
from holdfast.labels import StepName
from holdfast.probe import ProbeJournal, Prober, ProbeTimeouts
from holdfast.probe.sizes import EngineLimits, batch_sizes, fewest, largest_step, most
from holdfast.records import ProbeReport, ProbeStep
from holdfast.settings import ProbeSettings
from holdfast.telemetry.progress import LogProgress
from keep_alive import NO_KEEP_ALIVE

SHORT_TIMEOUTS = ProbeTimeouts(proof_seconds=0.5, death_seconds=0.1, cleanup_seconds=5.0)
PATIENCE_SECONDS = 240.0
"""Of real time, for a suite that takes a second on an idle machine."""
AMPLE_BLOCKS = 4000
AXES: dict[str, tuple[Any, ...]] = {
    "method": tuple(METHODS),
    "groups": ("full", "full and window", "window", "full and mamba"),
    "draft_tokens": (1, 3, 8),
    "blocks": (AMPLE_BLOCKS, None),
    "step_tokens": (640, 192),
    "is_chunked": (True, False),
    "is_async": (False, True),
    "has_second_runner": (False, True),
    "pipeline_stages": (1, 2),
    "engines": (1, 2),
    "has_lora": (False, True),
    "has_prefix_caching": (True, False),
}
UNFORMED = re.compile(r"does not form|formed no step|scheduler ran \d+ of|ended each time before")
"""What a reason says of a step that was planned and did not come."""
WITHOUT_SUBJECT = {"baseline", "first_image", "first_adapter"}
UNTOLD: dict[str, set[str]] = {
    "window": {"widest_decode", "mixed"},
    "full and mamba": {"batch_sweep", "full_batch", "widest_decode"},
}
"""What may not be formed where the KV cache has room for one whole context alone.

vLLM tells how many tokens of such contexts there is room for, and neither how few blocks those have
in a window nor that each request takes a block or more for its state, however short it is.
"""


def pairwise() -> Iterator[dict[str, Any]]:
    """Choices that together have each pair of values of two axes, chosen greedily."""
    random, names = Random(1), list(AXES)
    left = {
        ((first, one), (second, other))
        for first, second in combinations(names, 2)
        for one in AXES[first]
        for other in AXES[second]
    }
    while left:
        fixed = dict(min(left, key=repr))
        tried = [
            {name: fixed.get(name, random.choice(AXES[name])) for name in names} for _ in range(30)
        ]
        best = max(tried, key=lambda choice: len(left & _pairs(choice)))
        left -= _pairs(best)
        yield best


def _pairs(choice: Mapping[str, Any]) -> set[Any]:
    return set(combinations(choice.items(), 2))


def setting_of(choice: Mapping[str, Any]) -> Setting:
    """The choice, as vLLM takes it: a prompt that is not chunked fits in one step."""
    setting = Setting(**choice)
    return setting if setting.is_chunked else replace(setting, step_tokens=640)


def named(choice: Mapping[str, Any]) -> str:
    return "-".join(str(value) for value in choice.values())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's configuration of a model with a decoder alone."""
    with decoder_configuration(tmp_path_factory.mktemp("scheduler")) as found:
        yield found


def probed(base: Any, setting: Setting) -> ProbeReport:
    """What the whole suite finds of an engine whose steps vLLM's scheduler forms."""

    async def run() -> ProbeReport:
        engine = ScheduledEngine(*configured(base, setting))
        async with serving(openai_app(engine)) as client, engine:
            prober = Prober(
                ProbeSettings(
                    suite="worst-case", timeout_seconds=PATIENCE_SECONDS, max_tokens=None
                ),
                engine,
                lambda: httpx.AsyncClient(base_url=client.base_url, limits=NO_KEEP_ALIVE),
                ProbeJournal(None, "scheduled"),
                LogProgress(logging.getLogger("a.probe")),
                clock=engine.clock,
                timeouts=SHORT_TIMEOUTS,
                random=Random(7),
            )
            return await prober.run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(setting.has_second_runner)))
        return asyncio.run(run())


def step_of(report: ProbeReport, name: StepName) -> ProbeStep:
    return next(step for step in report.steps if step.name == name)


def unformed(report: ProbeReport) -> set[str]:
    """The steps that say that vLLM did not form what was planned."""
    return {step.name for step in report.steps if UNFORMED.search(step.reason)}


def skipped(report: ProbeReport) -> set[str]:
    """The steps that prove nothing."""
    return {step.name for step in report.steps if step.outcome == "skipped"}


@pytest.mark.parametrize("choice", tuple(pairwise()), ids=named)
def test_every_step_of_the_probe_can_be_formed(base: Any, choice: Mapping[str, Any]) -> None:
    """The suite passes, proves the whole context, and forms every step that it has planned."""
    setting = setting_of(choice)
    report = probed(base, setting)
    assert report.passed, told(report)
    assert not report.limited, told(report)
    assert report.proven_tokens == Setting().max_model_len - 1
    untold = UNTOLD.get(setting.groups, set()) if setting.blocks is None else set()
    assert unformed(report) <= untold, told(report)
    cached = set() if setting.has_prefix_caching else {"prefix_continuation"}
    assert skipped(report) <= WITHOUT_SUBJECT | cached | untold, told(report)


@pytest.mark.parametrize("draft_tokens", [1, 8])
@pytest.mark.parametrize("method", METHODS)
def test_a_planned_step_takes_all_its_prompts(base: Any, method: str, draft_tokens: int) -> None:
    """Also those whose drafts hold more of a small KV cache than they have tokens."""
    setting = Setting(method, draft_tokens, has_prefix_caching=False)
    config, kv_cache = configured(base, setting)
    limits = EngineLimits.of(facts_of(config), None)

    async def try_all() -> None:
        engine = ScheduledEngine(config, kv_cache)
        for size in batch_sizes(largest_step(limits)):
            for lengths in (fewest(limits, size), most(limits, size)):
                assert lengths is not None
                assert engine.first_step(lengths) == (size, len(lengths))

    asyncio.run(try_all())


@pytest.mark.parametrize(
    ("method", "blocks", "outcome"),
    [("none", 2, "passed"), ("eagle", 2, "skipped"), ("eagle", 3, "passed"), ("mtp", 2, "skipped")],
)
def test_a_cached_prefix_has_a_block_that_drafting_does_not_drop(
    base: Any, method: str, blocks: int, outcome: str
) -> None:
    """With one block, vLLM computes the whole prefix again, although nothing is wrong."""
    length = blocks * MAMBA_BLOCK_TOKENS + 100
    report = probed(base, Setting(method, groups="full and mamba", max_model_len=length))
    assert report.passed, told(report)
    assert step_of(report, "prefix_continuation").outcome == outcome, told(report)


@pytest.mark.parametrize("groups", UNTOLD)
def test_a_step_that_is_not_formed_is_said_so(base: Any, groups: Groups) -> None:
    """The suite passes with what the scheduler formed, which the reasons tell."""
    report = probed(base, Setting(groups=groups, step_tokens=192 if groups == "window" else 640))
    assert report.passed, told(report)
    assert unformed(report) == UNTOLD[groups], told(report)


def test_no_prompt_joins_decodes_where_the_first_step_takes_it_whole(base: Any) -> None:
    """Over a pipeline, in which nothing decodes at first; and the reason blames no lack of room."""
    setting = Setting(is_async=True, has_second_runner=True, pipeline_stages=2)
    report = probed(base, setting)
    assert report.passed, told(report)
    assert unformed(report) == {"mixed"}, told(report)


SLOTS = {"draft_model": 1, "P-EAGLE": 7, "PARD": 8, "DFlash": 8, "DSpark": 7}


@pytest.mark.parametrize("method", METHODS)
def test_batch_leaves_room_for_draft_slots(base: Any, method: str) -> None:
    """The largest step has a slot less for each that its one request drafts in, and says so."""
    setting = Setting(method, draft_tokens=8, step_tokens=256, blocks=AMPLE_BLOCKS)
    report = probed(base, setting)
    slots = SLOTS.get(method, 0)
    batch = step_of(report, "full_batch")
    assert step_of(report, "batch_sweep").tokens == batch.tokens == 256 - slots
    assert ("drafting takes" in batch.reason) == bool(slots)


@pytest.mark.parametrize("method", METHODS)
def test_decodes_leave_room_for_drafts(base: Any, method: str) -> None:
    """As many requests decode together as have room with drafts and slots, and the step says so."""
    setting = Setting(
        method, draft_tokens=8, step_tokens=512, step_requests=64, blocks=AMPLE_BLOCKS
    )
    decodes = step_of(probed(base, setting), "widest_decode")
    taken = 1 + (0 if method == "none" else 8) + SLOTS.get(method, 0)
    assert decodes.tokens == min(64, 512 // taken)
    assert ("decode together" in decodes.reason) == (method != "none")


@pytest.mark.parametrize(
    "others",
    [
        {"watermark": 0.5},
        {"long_prefill_token_threshold": 10},
        {"max_num_active_seqs": 5},
        {"scheduler_reserve_full_isl": False},
        {"max_num_scheduled_tokens": 100},
        {"prefill_schedule_interval": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["none", "PARD"])
def test_other_settings_of_the_scheduler(base: Any, method: str, others: dict[str, Any]) -> None:
    """Whatever else bounds a step is known, or seen."""
    report = probed(base, Setting(method, blocks=90, engines=2, others=others))
    assert report.passed, told(report)
    assert not report.limited, told(report)


@pytest.mark.parametrize("method", ["none", "eagle3", "PARD"])
def test_context_above_the_kv_cache(base: Any, method: str) -> None:
    """A prompt is no longer than the KV cache with what drafts hold of it; the rest fits too."""
    report = probed(base, Setting(method, blocks=20))
    assert report.passed, told(report)
    assert report.limited
    assert 280 < report.proven_tokens <= 304
