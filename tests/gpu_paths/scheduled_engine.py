"""vLLM's own Scheduler behind our engine interface, with no model, no worker and no device.

`ScheduledEngine` is the engine of `fake_engine` whose steps are formed by `vllm.v1.core.sched`: the
loop is that of `EngineCore.step_with_batch_queue` (vLLM 0.32), the model samples one token a
request and no draft is ever accepted, so that every decode keeps asking for all its drafts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

from fake_engine import FakeEngine, FakeRequest
from holdfast.patches.continued import SENT_TOKENS
from holdfast.records import EngineFacts, EngineStep
from holdfast.workspace.stats import RECENT_STEPS
from stub_engine import FakeClock

SAMPLED = 9
MAX_EMPTY_STEPS = 100


def facts_of(config: Any, tasks: frozenset[str] = frozenset({"generate"})) -> EngineFacts:
    """What our engine says of itself under this configuration."""
    from holdfast.engine.model.facts import engine_facts

    engine = SimpleNamespace(vllm_config=config, renderer=SimpleNamespace(tokenizer=None))
    return engine_facts(
        engine, tasks, fingerprint="scheduled", has_template=False, is_unified=False
    )


class _Lane:
    """One EngineCore: vLLM's scheduler and the queue of the batches that run."""

    def __init__(self, config: Any, kv_cache: Any) -> None:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
        from vllm.v1.structured_output import StructuredOutputManager

        block_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache, config)
        self.config = config
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_tokens,
            hash_block_size=hash_tokens,
        )
        self.hasher = _hasher(config, hash_tokens)
        self.asked: dict[str, FakeRequest] = {}
        self.running_batches: deque[tuple[Any, list[list[int]]]] = deque()
        self.steps: deque[EngineStep] = deque(maxlen=RECENT_STEPS)
        self.scheduled_tokens = 0
        self.growths = 0
        self.done_steps = 0
        self.empty_steps = 0
        """How often in a row the scheduler formed no step."""

    @property
    def requests(self) -> int:
        return len(self.asked)

    @property
    def has_work(self) -> bool:
        return bool(self.running_batches) or self.scheduler.has_requests()


def _hasher(config: Any, hash_tokens: int) -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    if not config.cache_config.enable_prefix_caching:
        return None
    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    return get_request_block_hasher(hash_tokens, function)


def _core_request(name: str, prompt: list[int], sampling: Any) -> Any:
    """What the front end sends to EngineCore."""
    from vllm.v1.engine import EngineCoreRequest

    nothing: Any = dict.fromkeys(
        ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    )
    return EngineCoreRequest(
        request_id=name,
        external_req_id=name,
        prompt_token_ids=prompt,
        sampling_params=sampling,
        arrival_time=0.0,
        **nothing,
    )


class ScheduledEngine(FakeEngine):
    """An engine whose steps vLLM's scheduler forms. Use it as a context manager."""

    def __init__(self, config: Any, kv_cache: Any) -> None:
        super().__init__(facts_of(config), clock=FakeClock())
        self._numbers = count()
        self._lanes: dict[int, Any] = {
            engine: _Lane(config, kv_cache) for engine in {member for member, _ in self.facts.world}
        }

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        engine: int | None = None,
        *,
        ignores_cache: bool = False,
        sent: Sequence[int] = (),
    ) -> FakeRequest:
        """Hand a request to the scheduler of its engine.

        `sent` is what another engine has made of its answer, as our front end hands it over.
        """
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        lane = self._lanes[next(self._turns) if engine is None else engine]
        name = f"r{next(self._numbers)}"
        lane.asked[name] = request = FakeRequest(prompt, max_tokens)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            prompt_logprobs=1 if ignores_cache else None,
            extra_args={SENT_TOKENS: [*sent]} if sent else None,
        )
        asked = _core_request(name, prompt, sampling)
        lane.scheduler.add_request(Request.from_engine_core_request(asked, lane.hasher))
        self._work.set()
        return request

    def first_step(self, lengths: Sequence[int]) -> tuple[int, int]:
        """The tokens and requests of the first step of prompts of these lengths, then dropped."""
        requests = [self.submit([1] * length, 1, engine=0) for length in lengths]
        output = self._lanes[0].scheduler.schedule()
        for request in requests:
            self.abort(request)
        return output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)

    def abort(self, request: FakeRequest) -> None:
        """Drop a request whose client is gone."""
        from vllm.v1.request import RequestStatus

        for lane in self._lanes.values():
            for name in [name for name, one in lane.asked.items() if one is request]:
                del lane.asked[name]
                lane.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def kill(self, cause: str) -> None:
        """End the engine, and with it every request."""
        super_lanes, self._lanes = self._lanes, {}
        super().kill(cause)
        self._lanes = super_lanes
        for lane in self._lanes.values():
            for request in lane.asked.values():
                request.ended = cause
                request.changed.set()
            lane.asked.clear()

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache of every engine."""
        self.forgotten += 1
        for lane in self._lanes.values():
            lane.scheduler.reset_prefix_cache()

    @asynccontextmanager
    async def scheduling_paused(self) -> AsyncIterator[None]:
        """As in EngineCore, where a pause that keeps the requests lets the running batches end."""
        self.is_held = True
        for lane in self._lanes.values():
            while lane.running_batches:
                self._end_batch(lane)
        try:
            yield
        finally:
            self.is_held = False
            self._work.set()

    async def _run(self) -> None:
        while not self._death.done():
            busy = [lane for lane in self._lanes.values() if lane.has_work]
            if self.is_held or not busy:
                self._work.clear()
                await self._work.wait()
            for lane in busy:
                if not (self.is_held or self._death.done()):
                    self._step_of(lane)
            await asyncio.sleep(0)

    def _step_of(self, lane: _Lane) -> None:
        """One turn of `EngineCore.step_with_batch_queue`."""
        output = None
        if lane.scheduler.has_requests():
            lane.done_steps += 1
            interval = lane.config.scheduler_config.prefill_schedule_interval
            output = lane.scheduler.schedule(lane.done_steps % interval != 0)
            if output.total_num_scheduled_tokens:
                self._begin_batch(lane, output)
                if len(lane.running_batches) < lane.config.max_concurrent_batches:
                    return
        if lane.running_batches:
            self._end_batch(lane)
        elif output is not None:
            self._end_empty(lane, output)

    def _begin_batch(self, lane: _Lane, output: Any) -> None:
        lane.empty_steps = 0
        names = output.num_scheduled_tokens
        chunks = (lane.scheduler.requests[name].is_prefill_chunk for name in names)
        lane.running_batches.append((output, [[] if chunk else [SAMPLED] for chunk in chunks]))
        index = lane.steps[-1].index + 1 if lane.steps else 1
        tokens, now = output.total_num_scheduled_tokens, self.clock.now_seconds
        self.clock.now_seconds += tokens / self.tokens_per_second
        duration = self.clock.now_seconds - now
        lane.steps.append(EngineStep(index, tokens, len(names), now, duration))
        lane.scheduled_tokens += tokens

    def _end_batch(self, lane: _Lane) -> None:
        output, sampled = lane.running_batches.popleft()
        self._update(lane, output, sampled)
        speculation = lane.config.speculative_config
        if speculation and not lane.config.scheduler_config.async_scheduling:
            from vllm.v1.outputs import DraftTokenIds

            names = list(output.num_scheduled_tokens)
            drafts = [[SAMPLED] * speculation.num_speculative_tokens for _ in names]
            lane.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _end_empty(self, lane: _Lane, output: Any) -> None:
        """Tell a scheduler of a step in which nothing ran; one that goes on so is stuck."""
        self._update(lane, output, [])
        lane.empty_steps += 1
        if lane.asked and lane.empty_steps > MAX_EMPTY_STEPS:
            self.kill("the scheduler forms no step of what waits")

    def _update(self, lane: _Lane, output: Any, sampled: list[list[int]]) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        places = {name: index for index, name in enumerate(names)}
        made = ModelRunnerOutput(names, places, sampled_token_ids=sampled)
        for outputs in lane.scheduler.update_from_output(output, made).values():
            for one in outputs.outputs:
                self._answer(lane, one)

    @staticmethod
    def _answer(lane: _Lane, output: Any) -> None:
        request = lane.asked.get(output.request_id)
        if request is None:
            return
        request.made_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            request.ended = "length"
            del lane.asked[output.request_id]
        request.changed.set()
