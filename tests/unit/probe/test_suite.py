"""The suite against a fake engine over a real socket: what passes and what fails, and why."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import httpx
import pytest
import uvloop
from PIL import Image

from asgi_server import serving
from fake_engine import ADAPTER, IMAGE_PROMPT, FakeEngine, FakeRequest, FakeStep, Faults
from fake_openai_app import openai_app
from holdfast.engine.baseline import BaselineWatch
from holdfast.labels import PROBE_STEPS, QUICK_STEPS, StepName
from holdfast.probe import ProbeJournal, Prober, ProbeTimeouts
from holdfast.records import EngineFacts, ProbeReport, ProbeStep
from holdfast.settings import ProbeSettings, Suite
from holdfast.telemetry.progress import LogProgress
from holdfast.verify.baseline import Baseline, Noise, RecordedSequence
from keep_alive import NO_KEEP_ALIVE
from killed_probe import kill_during_last
from stub_engine import FACTS, FakeClock

SHORT_TIMEOUTS = ProbeTimeouts(proof_seconds=0.1, death_seconds=0.1, cleanup_seconds=5.0)
GIB = 1024**3
RECORDED = Baseline(
    sequences=tuple(
        RecordedSequence(
            tuple(range(tokens, 2 * tokens)),
            (7, 8),
            tuple(((token, -1.0),) for token in [*range(tokens + 1, 2 * tokens), 7, 8]),
        )
        for tokens in (20, 40)
    )
)
"""What a fake engine without faults says of two sequences."""
T = TypeVar("T")


def run_in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run in the event loop that the server runs in."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class Heard(LogProgress):
    """A `Progress` that remembers."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("a.probe"))
        self.sizes: list[tuple[str, int]] = []
        self.finished: list[ProbeStep] = []

    def step_started(self, step: str, detail: str, tokens: int) -> None:
        super().step_started(step, detail, tokens)
        self.sizes.append((step, tokens))

    def step_finished(self, step: ProbeStep) -> None:
        super().step_finished(step)
        self.finished.append(step)

    def of(self, step: StepName) -> list[int]:
        return [tokens for name, tokens in self.sizes if name == step]


@dataclass
class Bed:
    """An engine, a server before it, and everything a prober needs."""

    engine: FakeEngine
    url: httpx.URL
    settings: ProbeSettings
    journal: ProbeJournal
    heard: Heard = field(default_factory=Heard)
    available_memory: Callable[[], int] = lambda: 64 * GIB
    baseline: BaselineWatch | None = field(default_factory=lambda: BaselineWatch(RECORDED))

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, limits=NO_KEEP_ALIVE)

    async def probe(self, steps: Sequence[StepName] | None = None) -> ProbeReport:
        return await self.prober().run(steps)

    def prober(self) -> Prober:
        return Prober(
            self.settings,
            self.engine,
            self.client,
            self.journal,
            self.heard,
            available_memory=self.available_memory,
            clock=self.engine.clock,
            timeouts=SHORT_TIMEOUTS,
            baseline=self.baseline,
            random=Random(7),
        )


@asynccontextmanager
async def bed(
    faults: Faults | None = None,
    *,
    facts: EngineFacts = FACTS,
    suite: Suite = "worst-case",
    timeout_seconds: float = 600.0,
    max_tokens: int | None = None,
    tokens_per_second: float = 1e6,
    journal: ProbeJournal | None = None,
) -> AsyncIterator[Bed]:
    engine = FakeEngine(facts, faults, FakeClock(), tokens_per_second)
    async with serving(openai_app(engine)) as client, engine:
        yield Bed(
            engine,
            client.base_url,
            ProbeSettings(suite=suite, timeout_seconds=timeout_seconds, max_tokens=max_tokens),
            journal or ProbeJournal(None, facts.fingerprint),
        )


def probe(
    faults: Faults | None = None,
    *,
    steps: Sequence[StepName] | None = None,
    facts: EngineFacts = FACTS,
    suite: Suite = "worst-case",
    timeout_seconds: float = 600.0,
    max_tokens: int | None = None,
    tokens_per_second: float = 1e6,
    journal: ProbeJournal | None = None,
    available_memory: Callable[[], int] = lambda: 64 * GIB,
) -> tuple[ProbeReport, Bed]:
    async def run() -> tuple[ProbeReport, Bed]:
        made = bed(
            faults,
            facts=facts,
            suite=suite,
            timeout_seconds=timeout_seconds,
            max_tokens=max_tokens,
            tokens_per_second=tokens_per_second,
            journal=journal,
        )
        async with made as the_bed:
            the_bed.available_memory = available_memory
            return await the_bed.probe(steps), the_bed

    return run_in_loop(run())


def step_of(report: ProbeReport, name: StepName) -> ProbeStep:
    return next(step for step in report.steps if step.name == name)


def failed_step(report: ProbeReport) -> ProbeStep:
    return next(step for step in report.steps if step.outcome == "failed")


def test_whole_engine_passes_every_step() -> None:
    """All twelve steps pass, the whole context is proven, and nothing is limited."""
    report, the_bed = probe()
    assert [(step.name, step.outcome) for step in report.steps] == [
        (name, "passed") for name in PROBE_STEPS
    ], report
    assert report.passed
    assert not report.limited
    assert report.proven_tokens == FACTS.max_model_len - 1
    assert the_bed.heard.finished == list(report.steps)
    assert report.slowest_step_seconds > 0


def test_compiling_is_not_a_slow_step() -> None:
    """A stall is found no later where the first token had to wait for a compiler."""
    report, _ = probe(Faults(compiles_seconds=60.0))
    assert 0 < report.slowest_step_seconds < 60


def test_the_only_steps_are_the_slowest() -> None:
    """Where the first token is all that can be proven, its steps are what is known."""
    report, _ = probe(Faults(compiles_seconds=60.0), steps=["first_token"])
    assert report.slowest_step_seconds >= 60


def test_sizes_follow_the_engine() -> None:
    """Contexts double to the longest prompt, batches reach the scheduler's, decodes fill seats."""
    report, the_bed = probe()
    assert the_bed.heard.of("context_sweep") == [128, 256, 512, 1000]
    assert the_bed.heard.of("full_context") == [1000]
    batches = the_bed.heard.of("batch_sweep")
    assert {7, 8, 9, 127, 128, 129, 232, 511, 512} <= set(batches)
    assert max(batches) == 512
    assert step_of(report, "full_batch").tokens == 512
    assert step_of(report, "widest_decode").tokens == 8


def test_single_prompt_is_not_held() -> None:
    """A pause takes longer than most steps of the sweep, and one prompt needs none."""
    report, swept = probe(steps=["batch_sweep"])
    assert report.passed
    assert not swept.engine.pauses
    _, full = probe(steps=["full_batch"])
    assert full.engine.pauses == 2


def test_engines_of_a_group_take_their_prompts_together() -> None:
    """Experts get the tokens of all engines in one step, so each size is proven on all at once."""
    facts = replace(FACTS, world=((0, 0), (1, 0)), data_parallel_size=2)
    _, swept = probe(steps=["batch_sweep"], facts=facts)
    assert swept.engine.pauses == len(swept.heard.of("batch_sweep"))


def test_sweep_extends_one_prompt() -> None:
    """With prefix caching the sweep computes little more than its longest prompt."""
    _, with_cache = probe(steps=["context_sweep"])
    facts = replace(FACTS, has_prefix_caching=False)
    _, without = probe(steps=["context_sweep"], facts=facts)
    assert sum(step.tokens for step in with_cache.engine.steps) < 1100
    assert sum(step.tokens for step in without.engine.steps) == 128 + 256 + 512 + 1000


def is_whole_prompt(step: FakeStep) -> bool:
    """Whether the step has only a prompt of the longest length, with nothing of it cached."""
    return any(len(r.prompt) == 1000 and not r.cached_tokens for r in alone(step))


def is_swept_context(step: FakeStep) -> bool:
    """Whether the step ends a context where only the sweep does."""
    return any(len(r.prompt) == 256 and r.cached_tokens for r in alone(step))


def alone(step: FakeStep) -> list[FakeRequest]:
    return step.prefilling if len(step.taken) == 1 else []


def is_odd_batch(step: FakeStep) -> bool:
    """The need of a kernel that is not monotone in rows."""
    return step.tokens == 232


def is_skewed_full_batch(step: FakeStep) -> bool:
    """A full step in which nearly every token is the same, as for one expert alone."""
    tokens = [token for request in step.prefilling for token in request.prompt]
    return step.tokens == 512 and max(map(tokens.count, set(tokens))) > 400


def is_wide_decode(step: FakeStep) -> bool:
    """All seats taken by requests that decode."""
    return len(step.taken) == 8 and not step.prefilling


def is_mixed(step: FakeStep) -> bool:
    """A prefill while others decode."""
    return bool(step.prefilling) and len(step.prefilling) < len(step.taken)


def refuses_chat(path: str, body: dict[str, Any]) -> int:
    return 500 if path == "/v1/chat/completions" and body.get("stream") else 200


def is_image(step: FakeStep) -> bool:
    """The tokens of an image, which no other step makes."""
    return any(request.prompt == IMAGE_PROMPT for request in step.prefilling)


def refuses_top_k(_: str, body: dict[str, Any]) -> int:
    return 500 if "top_k" in body else 200


def refuses_adapters(_: str, body: dict[str, Any]) -> int:
    return 500 if body.get("model") == ADAPTER else 200


CATCHES: dict[StepName, Faults] = {
    "first_token": Faults(refuses=refuses_chat),
    "context_sweep": Faults(kills=is_swept_context),
    "full_context": Faults(kills=is_whole_prompt),
    "prefix_continuation": Faults(forgets_prefixes=True),
    "batch_sweep": Faults(kills=is_odd_batch),
    "full_batch": Faults(kills=is_skewed_full_batch),
    "widest_decode": Faults(kills=is_wide_decode),
    "mixed": Faults(kills=is_mixed),
    "baseline": Faults(prompt_logprob=lambda position: -1.0 if position < 30 else -1.25),
    "first_sampling": Faults(refuses=refuses_top_k),
    "first_image": Faults(kills=is_image),
    "first_adapter": Faults(refuses=refuses_adapters),
}


def test_each_step_has_a_fault() -> None:
    """No step can be added or removed without saying what it alone finds."""
    assert tuple(CATCHES) == PROBE_STEPS


@pytest.mark.parametrize(("allowed", "asked"), [(20, [1]), (-1, [1]), (0, [])])
def test_the_first_token_comes_with_its_log_prob(allowed: int, asked: list[int]) -> None:
    """Every process of an engine compiles their rank at first use, which no client should wait for.

    A server may allow none.
    """

    async def run() -> list[int]:
        async with bed(facts=replace(FACTS, max_logprobs=allowed)) as made:
            assert (await made.prober().run_again(0)).passed
            return [body["logprobs"] for _, body, _ in made.engine.received if "logprobs" in body]

    assert run_in_loop(run()) == asked


@pytest.mark.parametrize("name", PROBE_STEPS)
def test_step_catches_what_no_other_does(name: StepName) -> None:
    """With one thing broken exactly this step fails, and without it the suite would pass."""
    report, _ = probe(CATCHES[name])
    assert not report.passed
    assert failed_step(report).name == name, report
    others, _ = probe(CATCHES[name], steps=[step for step in PROBE_STEPS if step != name])
    assert others.passed, others


def test_steps_after_a_failure_are_not_run() -> None:
    """The rest is reported as skipped, and says why."""
    report, _ = probe(CATCHES["full_context"])
    after = report.steps[3:]
    assert {step.outcome for step in after} == {"skipped"}
    assert {step.reason for step in after} == {"not run, because full_context failed"}


def test_refused_workspace_is_named() -> None:
    """The reason of a failure has step, size, caller, bytes needed and bytes held."""
    report, _ = probe(CATCHES["batch_sweep"])
    reason = failed_step(report).reason
    for part in ("batch_sweep", "232 tokens", "died", "fake.py:7:forward", "2048", "1024"):
        assert part in reason, reason


def test_dead_engine_ends_a_request_that_would_hang() -> None:
    """A request that gets no answer fails as soon as the engine is known to be dead."""

    async def run() -> ProbeReport:
        async with bed(Faults(hangs=lambda step: step.tokens == 512)) as the_bed:
            task = asyncio.create_task(the_bed.probe())
            await the_bed.engine.until_stepped(512)
            the_bed.engine.kill("process 7 ended")
            async with asyncio.timeout(60):
                return await task

    report = run_in_loop(run())
    assert "process 7 ended" in failed_step(report).reason


def test_suite_is_over_at_its_time_limit() -> None:
    """A step that runs when the time is over fails, and the reason has its size."""
    faults = Faults(hangs=lambda step: step.tokens == 232)
    report, the_bed = probe(faults, steps=["batch_sweep"], timeout_seconds=2.0)
    assert failed_step(report).name == "batch_sweep"
    assert "232 tokens" in failed_step(report).reason
    assert "probe's time limit" in failed_step(report).reason
    assert not the_bed.engine.is_held


def test_slow_engine_is_limited() -> None:
    """What the measured rate cannot finish is left out, and less is proven."""
    report, _ = probe(tokens_per_second=10.0, timeout_seconds=120.0)
    sweep = step_of(report, "context_sweep")
    assert report.passed, report
    assert report.limited
    assert 0 < report.proven_tokens < 1000
    assert sweep.limited
    assert "measured rate" in sweep.reason


def test_quick_suite_is_limited_too() -> None:
    """Without a sweep the rate is measured before the full context is tried."""
    report, _ = probe(suite="quick", tokens_per_second=10.0, timeout_seconds=200.0)
    assert report.passed, report
    assert report.limited
    assert 0 < report.proven_tokens < 1000


def test_quick_suite_has_its_three_steps() -> None:
    """`quick` proves the first token, the full context and the full batch."""
    report, _ = probe(suite="quick")
    assert tuple(step.name for step in report.steps) == QUICK_STEPS
    assert report.passed
    assert report.proven_tokens == 1000
    assert not report.limited


def test_suite_off_sends_nothing() -> None:
    """`off` passes, says that nothing is proven, and leaves the engine alone."""
    report, the_bed = probe(suite="off")
    assert report.passed
    assert report.limited
    assert report.proven_tokens == 0
    assert the_bed.engine.received == []


def test_one_step_alone() -> None:
    """A chosen step runs by itself, also where the suite is off."""
    report, _ = probe(suite="off", steps=["first_token"])
    assert [step.name for step in report.steps] == ["first_token"]
    assert report.passed
    assert not report.limited


def test_cap_of_the_operator() -> None:
    """No prompt is longer than `--probe-max-tokens`, and the proof is limited."""
    report, the_bed = probe(max_tokens=300)
    assert report.passed, report
    assert report.limited
    assert report.proven_tokens == 300
    assert max(len(r.prompt) for step in the_bed.engine.steps for r in step.taken) == 300


def test_small_kv_cache_is_never_exceeded() -> None:
    """Where the KV cache holds less than the seats, every step is still made."""
    facts = replace(FACTS, kv_capacity_tokens=1024)
    report, _ = probe(facts=facts)
    assert report.passed, report
    assert report.proven_tokens == 1000


def test_size_in_the_journal_is_not_tried_again(tmp_path: Path) -> None:
    """A size whose attempt never ended is left out with all above it, and the proof is limited."""
    kill_during_last(tmp_path, "f", 512)
    report, the_bed = probe(journal=ProbeJournal(tmp_path, "f"))
    assert report.passed, report
    assert report.limited
    assert report.proven_tokens == 256
    longest = max(len(r.prompt) for step in the_bed.engine.steps for r in step.taken)
    assert longest < 512
    assert "took the machine down" in step_of(report, "context_sweep").reason


def test_a_size_that_took_the_hosts_memory_is_not_tried_again() -> None:
    """Without a directory this process remembers it, so a restart forgets it."""
    report, _ = probe(journal=ProbeJournal(None, "f", known_forbidden_tokens=512))
    assert (report.passed, report.proven_tokens) == (True, 256)
    assert "restart the server to try it again" in step_of(report, "context_sweep").reason


def test_failure_with_an_answer_is_not_forbidden(tmp_path: Path) -> None:
    """An engine that died is a clean end: the journal allows the size at the next start."""
    probe(CATCHES["full_context"], journal=ProbeJournal(tmp_path, "f"))
    assert ProbeJournal(tmp_path, "f").forbidden_tokens is None


def test_attempts_are_journalled(tmp_path: Path) -> None:
    """While a context is computed, the one file on disk names it."""
    seen: set[int] = set()

    def look(step: FakeStep) -> bool:
        if any(len(request.prompt) == 512 for request in step.prefilling):
            (path,) = tmp_path.iterdir()
            seen.add(json.loads(path.read_text())["context_tokens"])
        return False

    probe(Faults(kills=look), steps=["context_sweep"], journal=ProbeJournal(tmp_path, "f"))
    assert seen == {512}
    assert not list(tmp_path.iterdir())


def test_unified_memory_stops_the_sweep() -> None:
    """A size that could take the host's last memory is left out."""
    free = iter([3 * GIB, 3 * GIB] + [GIB + GIB // 2] * 10)
    facts = replace(FACTS, is_unified_memory=True)
    report, the_bed = probe(
        steps=["context_sweep"], facts=facts, available_memory=lambda: next(free)
    )
    assert report.passed
    assert report.limited
    assert the_bed.heard.of("context_sweep") == [128]
    assert "margin" in report.steps[0].reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, -9999.0])
def test_log_prob_that_is_not_finite_fails(value: float | None) -> None:
    """NaN, infinity, nothing, and what vLLM writes for minus infinity are not log-probs."""
    report, _ = probe(Faults(logprob=value), steps=["widest_decode"])
    assert failed_step(report).name == "widest_decode"
    assert "log-prob" in failed_step(report).reason


def test_decodes_ask_for_all_of_sampling() -> None:
    """The widest decode has log-probs, penalties and one structured output."""
    _, the_bed = probe(steps=["widest_decode"])
    bodies = [body for _, body, _ in the_bed.engine.received if body["max_tokens"] > 1]
    assert all(body["logprobs"] and body["frequency_penalty"] for body in bodies)
    assert [len(b["prompt"]) for b in bodies if "structured_outputs" in b] == [1]


def test_log_probs_off() -> None:
    """The probe asks for no log-probs if the server has none, and the report says so."""
    report, the_bed = probe(steps=["widest_decode"], facts=replace(FACTS, max_logprobs=0))
    assert report.passed
    assert "without log-probs" in report.steps[0].reason
    assert not any("logprobs" in body for _, body, _ in the_bed.engine.received)


@pytest.mark.parametrize("most", [10, 3, 2])
@pytest.mark.parametrize(
    ("is_chunked", "kv_capacity_tokens"),
    [(True, FACTS.kv_capacity_tokens), (True, 1024), (False, 1024)],
)
def test_answers_that_the_server_cuts_are_asked_for_as_short(
    most: int, *, is_chunked: bool, kv_capacity_tokens: int
) -> None:
    """With `--override-generation-config '{"max_new_tokens": 10}'` all of it is proven."""
    steps: list[StepName] = ["first_token", "widest_decode", "mixed", "first_sampling"]
    facts = replace(
        FACTS,
        max_answer_tokens=most,
        has_chunked_prefill=is_chunked,
        kv_capacity_tokens=kv_capacity_tokens,
    )
    report, _ = probe(steps=[*steps, "first_adapter"], facts=facts)
    assert report.passed, report
    assert not report.limited, report
    assert step_of(report, "widest_decode").tokens == 8
    assert step_of(report, "mixed").outcome == "passed"


def test_where_answers_have_one_token_nothing_decodes() -> None:
    """No request can need such a step, so the proof is not limited."""
    report, _ = probe(facts=replace(FACTS, max_answer_tokens=1))
    assert report.passed, report
    assert not report.limited
    skipped = {step.name: step.reason for step in report.steps if step.outcome == "skipped"}
    reason = "no answer has a second token"
    assert skipped == {"widest_decode": reason, "mixed": reason}


def test_refused_structured_output_is_left_out() -> None:
    """A server that refuses structured outputs is proven without, and the report says so."""
    faults = Faults(refuses=lambda _, body: 400 if "structured_outputs" in body else 200)
    report, _ = probe(faults, steps=["widest_decode"])
    assert report.passed, report
    assert report.steps[0].tokens == 8
    assert "without a structured output" in report.steps[0].reason


@pytest.mark.parametrize(
    "faults",
    [
        Faults(streams_error=True),
        Faults(streams_done=False),
        Faults(finish_reason="abort"),
        Faults(refuses=lambda *_: 503),
        Faults(blind_ranks=frozenset({(0, 0)})),
    ],
    ids=["error event", "no end", "abort", "status", "no step"],
)
def test_first_token_that_is_not_whole_fails(faults: Faults) -> None:
    """A stream counts only with its end, its usage and a step that the ranks noted."""
    report, _ = probe(faults, suite="quick")
    assert failed_step(report).name == "first_token"


@pytest.mark.parametrize("name", PROBE_STEPS)
def test_every_rank_must_show_the_step(name: StepName) -> None:
    """A step that one of two ranks does not show is not proven."""
    facts = replace(FACTS, world=((0, 0), (0, 1)))
    report, _ = probe(Faults(blind_ranks=frozenset({(0, 1)})), steps=[name], facts=facts)
    assert failed_step(report).name == name


def test_each_data_parallel_engine_is_proven() -> None:
    """Every engine gets every step by its address, and one that shows nothing fails the suite."""
    facts = replace(FACTS, world=((0, 0), (1, 0)), data_parallel_size=2)
    report, the_bed = probe(facts=facts)
    assert report.passed, report
    assert {engine for _, _, engine in the_bed.engine.received} == {0, 1}
    blind, _ = probe(Faults(blind_ranks=frozenset({(1, 0)})), facts=facts)
    assert not blind.passed


def test_scheduler_that_cuts_prompts() -> None:
    """Steps that few long prompts do not make are made of many short ones."""
    report, _ = probe(Faults(longest_cut_tokens=64))
    assert report.passed, report
    assert step_of(report, "batch_sweep").tokens == 512


EMBEDDING = replace(
    FACTS, tasks=frozenset({"embed"}), has_chat_template=False, has_prefix_caching=False
)


@pytest.mark.parametrize("tasks", [{"embed"}, {"classify"}, {"token_embed"}])
def test_pooling_model(tasks: set[str]) -> None:
    """What decodes is skipped with a reason; the rest is proven up to the whole context."""
    report, _ = probe(facts=replace(EMBEDDING, tasks=frozenset(tasks)))
    skipped = [step for step in report.steps if step.outcome == "skipped"]
    assert [s.name for s in skipped] == [
        "prefix_continuation",
        "widest_decode",
        "mixed",
        "baseline",
        "first_sampling",
        "first_image",
    ]
    assert all(step.reason for step in skipped)
    assert report.passed, report
    assert report.proven_tokens == FACTS.max_model_len
    assert not report.limited


def test_encoder_model_without_kv_cache() -> None:
    """A model that keeps no KV cache and takes each prompt whole is proven by its step size."""
    facts = replace(
        EMBEDDING, kv_capacity_tokens=0, has_chunked_prefill=False, max_num_batched_tokens=1001
    )
    report, _ = probe(facts=facts)
    assert report.passed, report
    assert step_of(report, "full_batch").tokens == 1001


def test_embedding_that_is_not_finite_fails() -> None:
    """A vector with NaN is not an answer."""
    report, _ = probe(Faults(embedding=float("nan")), facts=EMBEDDING, suite="quick")
    assert failed_step(report).name == "first_token"


def test_pooling_requests_reach_any_engine() -> None:
    """Pooling requests cannot choose their engine, so composed steps are skipped."""
    facts = replace(EMBEDDING, world=((0, 0), (1, 0)), data_parallel_size=2)
    report, _ = probe(facts=facts)
    assert report.passed, report
    assert "engine" in step_of(report, "full_batch").reason


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"is_encoder_decoder": True}, "first_token"),
        ({"tasks": frozenset({"realtime"})}, "first_token"),
        ({"has_prefix_caching": False}, "prefix_continuation"),
        ({"max_num_seqs": 1}, "mixed"),
        ({"largest_image": None}, "first_image"),
        ({"has_chat_template": False}, "first_image"),
        ({"has_lora": False}, "first_adapter"),
    ],
)
def test_step_that_does_not_apply_is_skipped(changes: dict[str, Any], step: StepName) -> None:
    """Such a step neither passes nor fails, and says why."""
    report, _ = probe(facts=replace(FACTS, **changes))
    assert step_of(report, step).outcome == "skipped"
    assert step_of(report, step).reason
    assert report.passed


@pytest.mark.parametrize(
    ("allowed", "log_probs"),
    [(20, [0, 2, 5, 10, 15, 20]), (7, [0, 2, 5, 7]), (-1, [0, 2, 5, 10, 15, 20]), (0, [])],
)
def test_each_way_to_sample_is_asked_for_alone(allowed: int, log_probs: list[int]) -> None:
    """A kernel that is compiled for one request is another than that of a batch."""
    report, the_bed = probe(steps=["first_sampling"], facts=replace(FACTS, max_logprobs=allowed))
    assert report.passed, report
    bodies = [body for _, body, _ in the_bed.engine.received]
    drawn = [(body.get("top_k"), body.get("top_p")) for body in bodies if body["temperature"]]
    assert drawn == [(None, 0.9), (5, None), (5, 0.9)]
    assert [body["logprobs"] for body in bodies if "logprobs" in body] == log_probs
    assert all(len(body["prompt"]) == 1 for body in bodies)
    assert max(len(step.taken) for step in the_bed.engine.steps) == 1


def test_a_way_to_sample_that_is_refused_is_left_out() -> None:
    """A server may forbid what is not needed to answer: it starts, and the step says what it is."""
    faults = Faults(refuses=lambda _, body: 400 if "top_k" in body else 200)
    report, _ = probe(faults, steps=["first_sampling"])
    assert report.passed, report
    assert not report.limited
    reasons = step_of(report, "first_sampling").reason.split("; ")
    assert [reason.partition(":")[0] for reason in reasons] == [
        "without top_k",
        "without top_k and top_p",
    ]


def test_ways_to_sample_that_time_does_not_allow_are_named() -> None:
    """The first that is left out stands in the reason, and the proof is limited."""
    report, _ = probe(steps=["first_sampling"], timeout_seconds=100.0, tokens_per_second=0.5)
    assert report.passed, report
    assert report.limited
    assert step_of(report, "first_sampling").reason.startswith("not with 0 log-probs: ")


def sent_images(the_bed: Bed) -> list[tuple[int, ...]]:
    """Width, height and first colour of the images that were sent, read as a decoder does."""
    urls = [
        body["messages"][0]["content"][0]["image_url"]["url"]
        for path, body, _ in the_bed.engine.received
        if path == "/v1/chat/completions" and isinstance(body["messages"][0]["content"], list)
    ]
    files = [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls]
    return [
        (*image.size, *image.convert("RGB").tobytes()[:3])
        for image in (Image.open(BytesIO(file)) for file in files)
    ]


def test_largest_image_is_shown_to_every_engine() -> None:
    """Each engine encodes one of its own: none of them is in a cache of encoded images."""
    facts = replace(FACTS, world=((0, 0), (1, 0)), data_parallel_size=2)
    report, the_bed = probe(steps=["first_image"], facts=facts)
    assert report.passed, report
    assert step_of(report, "first_image").tokens == len(IMAGE_PROMPT)
    images = sent_images(the_bed)
    assert [image[:2] for image in images] == [(64, 48), (64, 48)]
    assert len({image[2:] for image in images}) == 2


def test_image_that_does_not_fit_is_halved() -> None:
    """The largest image that the server accepts is proven and named."""
    left = iter([400, 400])
    faults = Faults(refuses=lambda path, _: next(left, 200) if "chat" in path else 200)
    report, the_bed = probe(faults, steps=["first_image"])
    assert report.passed, report
    assert [image[:2] for image in sent_images(the_bed)] == [(64, 48), (32, 24), (16, 12)]
    assert "16 x 12" in step_of(report, "first_image").reason


def test_model_that_takes_no_image_after_all_is_limited() -> None:
    """Each size is refused: nothing is proven of images, and the server says so."""
    faults = Faults(refuses=lambda path, _: 400 if "chat" in path else 200)
    report, _ = probe(faults, steps=["first_image"])
    assert report.passed, report
    assert report.limited
    assert "refused by a test" in step_of(report, "first_image").reason


@pytest.mark.parametrize("forbidden", [len(IMAGE_PROMPT), 1])
def test_an_image_with_more_tokens_than_may_be_tried_is_not_computed(forbidden: int) -> None:
    """It may have taken the machine down; afterwards the server takes what it took before."""
    journal = ProbeJournal(None, "f", known_forbidden_tokens=forbidden)
    report, the_bed = probe(steps=["first_image"], journal=journal)
    step = step_of(report, "first_image")
    assert (step.outcome, step.limited) == ("skipped", True), step
    assert the_bed.engine.steps == []
    assert the_bed.engine.context_limit_tokens is None


def test_an_image_is_journalled(tmp_path: Path) -> None:
    """If it takes the machine down, the next start leaves such images out."""
    seen: set[int] = set()

    def look(_: FakeStep) -> bool:
        seen.update(json.loads(path.read_text())["image_pixels"] for path in tmp_path.iterdir())
        return False

    probe(Faults(kills=look), steps=["first_image"], journal=ProbeJournal(tmp_path, "f"))
    assert seen == {64 * 48}
    assert not list(tmp_path.iterdir())


def test_an_image_that_took_the_machine_down_is_halved(tmp_path: Path) -> None:
    """The next start shows a smaller one, and the reason says how to try it again."""
    kill_during_last(tmp_path, "f", 64 * 48, attempt="image_attempt")
    report, the_bed = probe(steps=["first_image"], journal=ProbeJournal(tmp_path, "f"))
    step = step_of(report, "first_image")
    assert (step.outcome, step.limited) == ("passed", True), step
    assert [image[:2] for image in sent_images(the_bed)] == [(32, 24)]
    (left,) = tmp_path.iterdir()
    assert step.reason == (
        "an image of 32 x 24; an attempt at an image of 3072 pixels took the machine down or "
        f"exhausted its memory; delete {left} to try it again"
    )


def test_if_every_image_took_the_machine_down_none_is_shown(tmp_path: Path) -> None:
    """The text contexts stay as long as they were."""
    kill_during_last(tmp_path, "f", 1, attempt="image_attempt")
    report, the_bed = probe(steps=["first_image"], journal=ProbeJournal(tmp_path, "f"))
    step = step_of(report, "first_image")
    assert (step.outcome, step.limited) == ("skipped", True), step
    assert "an image of 1 pixels" in step.reason
    assert sent_images(the_bed) == []


def test_adapter_gets_a_short_prompt_and_a_full_step() -> None:
    """Its kernels meet a decode and as many tokens as a step has."""
    report, the_bed = probe(steps=["first_adapter"])
    assert report.passed, report
    asked = [body for _, body, _ in the_bed.engine.received if body["model"] == ADAPTER]
    assert [len(body["prompt"][0]) for body in asked] == [8, 512]
    assert ADAPTER in step_of(report, "first_adapter").reason


def test_an_adapter_gets_a_short_prompt_where_no_context_may_be_tried() -> None:
    """The server starts, limited: vLLM refuses a prompt of no tokens."""
    report, the_bed = probe(journal=ProbeJournal(None, "f", known_forbidden_tokens=128))
    assert (report.passed, report.limited) == (True, True), report
    asked = [body for _, body, _ in the_bed.engine.received if body["model"] == ADAPTER]
    assert [len(body["prompt"][0]) for body in asked] == [8]
    step = step_of(report, "first_adapter")
    assert (step.tokens, step.limited) == (8, True)
    assert "no context may be tried" in step.reason


def test_without_a_listed_adapter_none_is_proven() -> None:
    """Without adapters there is nothing to ask, and the step says so."""
    report, _ = probe(Faults(adapters=()), steps=["first_adapter"])
    assert report.passed, report
    assert step_of(report, "first_adapter").outcome == "skipped"
    assert "no LoRA adapter" in step_of(report, "first_adapter").reason


def test_nothing_proven_is_limited() -> None:
    """A model that no step applies to passes, but not as a whole proof."""
    report, _ = probe(facts=replace(FACTS, is_encoder_decoder=True))
    assert report.limited
    assert report.proven_tokens == 0


def probe_baseline(
    baseline: BaselineWatch | None,
    faults: Faults | None = None,
    *,
    facts: EngineFacts = FACTS,
    max_tokens: int | None = None,
) -> tuple[ProbeStep, Bed]:
    """Run the step of the baseline."""

    async def run() -> tuple[ProbeStep, Bed]:
        async with bed(faults, facts=facts, max_tokens=max_tokens) as the_bed:
            the_bed.baseline = baseline
            report = await the_bed.probe(["baseline"])
            return step_of(report, "baseline"), the_bed

    return run_in_loop(run())


def test_each_sequence_of_the_baseline_is_scored_alone_and_whole() -> None:
    """Every engine gets each, with nothing of it from a prefix cache."""
    facts = replace(FACTS, world=((0, 0), (1, 0)), data_parallel_size=2)
    watch = BaselineWatch(RECORDED)
    step, the_bed = probe_baseline(watch, facts=facts)
    assert step.outcome == "passed", step
    assert step.tokens == 42
    asked = [(engine, body) for _, body, engine in the_bed.engine.received]
    assert [(engine, len(body["prompt"][0])) for engine, body in asked] == [
        (0, 22),
        (1, 22),
        (0, 42),
        (1, 42),
    ]
    assert {body["prompt_logprobs"] for _, body in asked} == {8}
    assert len({body["cache_salt"] for _, body in asked}) == len(asked)
    assert {len(each.taken) for each in the_bed.engine.steps} == {1}
    assert watch.last()["probe"].worst_nats == 0.0


def test_a_difference_is_named_with_its_place() -> None:
    """The largest one: sequence, position, size, and what would have been allowed."""
    watch = BaselineWatch(replace(RECORDED, noise=Noise(p999=0.05)))
    faults = Faults(prompt_logprob=lambda position: {9: -1.125, 33: -1.5}.get(position, -1.0))
    step, _ = probe_baseline(watch, faults)
    assert step.outcome == "failed"
    assert "differ from the baseline by 0.5 nats at position 33 of sequence 2" in step.reason
    assert "allows 0.15" in step.reason
    assert not watch.last()["probe"].agrees


def test_a_difference_within_the_recorded_noise_passes() -> None:
    """And is kept, so that a metric shows it."""
    watch = BaselineWatch(replace(RECORDED, noise=Noise(p999=0.05)))
    step, _ = probe_baseline(watch, Faults(prompt_logprob=lambda _: -1.125))
    assert step.outcome == "passed", step
    assert watch.last()["probe"].worst_nats == 0.125


@pytest.mark.parametrize("logprob", [None, math.nan, -9999.0])
def test_a_log_prob_of_the_prompt_that_is_not_finite_fails(logprob: float | None) -> None:
    """It would be neither larger nor smaller than what was recorded."""
    step, _ = probe_baseline(BaselineWatch(RECORDED), Faults(prompt_logprob=lambda _: logprob))
    assert step.outcome == "failed"
    assert "not finite" in step.reason


def test_without_a_baseline_nothing_is_compared() -> None:
    """The step says which flag is missing."""
    step, the_bed = probe_baseline(None)
    assert (step.outcome, step.limited) == ("skipped", False)
    assert "--verify-baseline" in step.reason
    assert the_bed.engine.received == []


@pytest.mark.parametrize(("most", "outcome"), [(30, "passed"), (10, "skipped")])
def test_a_sequence_beyond_the_allowed_length_is_left_out(most: int, outcome: str) -> None:
    """The comparison is then limited, even if another sequence passes."""
    step, _ = probe_baseline(BaselineWatch(RECORDED), max_tokens=most)
    assert (step.outcome, step.limited) == (outcome, True)
    assert "sequences of the baseline are longer than" in step.reason


@pytest.mark.parametrize(("nats", "outcome"), [(0.0, "passed"), (0.5, "failed")])
def test_what_was_compared_counts_where_time_ends_the_rest(nats: float, outcome: str) -> None:
    """A difference that was found is one; without it, the comparison is limited."""
    faults = Faults(prompt_logprob=lambda position: -1.0 - nats * (position == 9))

    async def run() -> tuple[ProbeStep, BaselineWatch]:
        async with bed(faults, timeout_seconds=30.0) as the_bed:
            the_bed.baseline = watch = BaselineWatch(RECORDED)

            def ends_the_time(step: FakeStep) -> bool:
                the_bed.engine.clock.now_seconds += 30.0 * (step.tokens == 22)
                return False

            faults.kills = ends_the_time
            return step_of(await the_bed.probe(["baseline"]), "baseline"), watch

    step, watch = run_in_loop(run())
    assert step.outcome == outcome, step
    assert watch.last()["probe"].worst_nats == nats
    if outcome == "passed":
        assert (step.tokens, step.limited) == (22, True)
        assert step.reason == "sequence 2 of the baseline: no time was left"


def test_what_one_engine_has_shown_counts_where_time_ends_before_the_next() -> None:
    """The first of two engines differs; no time is left for the second."""
    facts = replace(FACTS, world=((0, 0), (1, 0)), data_parallel_size=2)
    faults = Faults(prompt_logprob=lambda position: -1.0 - 0.5 * (position == 9))

    async def run() -> ProbeStep:
        async with bed(faults, facts=facts, timeout_seconds=30.0) as the_bed:
            the_bed.baseline = BaselineWatch(RECORDED)
            clock = the_bed.engine.clock

            def ends_the_time(_: FakeStep) -> bool:
                clock.now_seconds += 30.0
                return False

            faults.kills = ends_the_time
            return step_of(await the_bed.probe(["baseline"]), "baseline")

    step = run_in_loop(run())
    assert step.outcome == "failed", step
    assert "differ from the baseline by 0.5 nats" in step.reason


@pytest.mark.parametrize("compared", [42, 22, 0])
def test_a_restarted_engine_is_compared_again(compared: int) -> None:
    """The proof of its worst case holds, and its numbers are new, as far as they were proven."""

    async def run(baseline: BaselineWatch | None) -> list[tuple[str, int]]:
        async with bed() as the_bed:
            the_bed.baseline = baseline
            report = await the_bed.prober().run_again(compared)
            assert not report.is_whole
            return [(step.name, step.tokens) for step in report.steps]

    assert run_in_loop(run(BaselineWatch(RECORDED))) == [("first_token", 8), ("baseline", compared)]
    assert run_in_loop(run(None)) == [("first_token", 8)]


WHISPER = replace(FACTS, is_encoder_decoder=True, tasks=frozenset({"generate", "transcription"}))


@pytest.mark.parametrize(
    "facts", [WHISPER, replace(FACTS, tasks=frozenset({"transcription"}))], ids=["whisper", "other"]
)
def test_model_that_takes_audio_alone_transcribes_silence(facts: EngineFacts) -> None:
    """The one request that it can be asked is sent; what takes tokens is skipped."""
    report, the_bed = probe(facts=facts)
    outcomes = {step.name: step.outcome for step in report.steps}
    assert report.passed, report
    assert report.limited
    assert outcomes == {**dict.fromkeys(PROBE_STEPS, "skipped"), "first_token": "passed"}
    assert [path for path, _, _ in the_bed.engine.received] == ["/v1/audio/transcriptions"]


@pytest.mark.parametrize(
    "faults",
    [Faults(is_deaf=True), Faults(refuses=lambda _path, _body: 400)],
    ids=["no step of the engine", "refused"],
)
def test_silence_that_is_not_transcribed_fails(faults: Faults) -> None:
    """An answer that no engine has made proves nothing, and a refusal less."""
    report, _ = probe(faults, facts=WHISPER)
    assert failed_step(report).name == "first_token"


@pytest.mark.parametrize("facts", [WHISPER, replace(WHISPER, tasks=frozenset({"generate"}))])
def test_after_a_death_an_engine_is_proven_by_what_applies(facts: EngineFacts) -> None:
    """One step where one applies; where none does, the engine is let in as the first was."""

    async def run() -> ProbeReport:
        async with bed(facts=facts) as the_bed:
            return await the_bed.prober().run_again(0)

    report = run_in_loop(run())
    assert report.passed, report
    assert [step.name for step in report.steps] == ["first_token"]


def test_without_tokenizer() -> None:
    """Token ids alone suffice; no chat and no structured output is sent."""
    facts = replace(FACTS, has_tokenizer=False, has_chat_template=False)
    report, the_bed = probe(facts=facts)
    assert report.passed, report
    assert {path for path, _, _ in the_bed.engine.received} == {"/v1/completions"}


def test_special_tokens_are_never_sent() -> None:
    """Prompts are made of ordinary tokens."""
    _, the_bed = probe()
    sent = {t for step in the_bed.engine.steps for request in step.taken for t in request.prompt}
    assert not sent & FACTS.special_token_ids


def test_prefixes_are_forgotten_after_success_and_failure() -> None:
    """The cache is emptied at the end, whatever the outcome."""
    _, whole = probe(suite="quick")
    _, failed = probe(Faults(refuses=refuses_chat), suite="quick")
    assert (whole.engine.forgotten, failed.engine.forgotten) == (1, 1)


def test_cache_that_cannot_be_emptied_fails() -> None:
    """Users must not meet what the probe left behind."""
    report, _ = probe(Faults(forgetting_fails=True), suite="quick")
    assert not report.passed
    assert "prefix cache" in report.steps[-1].reason


def test_growth_is_reported() -> None:
    """A workspace that grew while the suite ran is told to the caller."""
    grown, _ = probe(Faults(grows_at_step=5), suite="quick")
    calm, _ = probe(suite="quick")
    assert (grown.grew, calm.grew) == (True, False)


def test_growth_on_another_node_is_reported() -> None:
    """Also in the last step, whose report arrives after the answer."""
    facts = replace(FACTS, world=((0, 0), (0, 1)))
    _, calm = probe(facts=facts, steps=["first_token"])
    last = Faults(grows_at_step=len(calm.engine.steps), late_ranks=frozenset({(0, 1)}))
    report, _ = probe(last, facts=facts, steps=["first_token"])
    assert report.passed
    assert report.grew


def test_cancellation_leaves_nothing_behind() -> None:
    """A cancelled suite raises, releases the engine and empties the cache."""

    async def run() -> FakeEngine:
        async with bed(Faults(hangs=lambda step: step.tokens == 232)) as the_bed:
            task = asyncio.create_task(the_bed.probe(["batch_sweep"]))
            await the_bed.engine.until_stepped(232)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return the_bed.engine

    engine = run_in_loop(run())
    assert not engine.is_held
    assert engine.forgotten == 1


def test_mixed_leaves_no_request_behind() -> None:
    """The decoders are aborted once the long prompt is answered."""

    async def run() -> int:
        async with bed() as the_bed:
            report = await the_bed.probe(["mixed"])
            assert report.passed, report
            return await the_bed.engine.queued_requests()

    assert run_in_loop(run()) == 0
