"""Where vLLM's own code sends a sequence to its engine, and where it is done with one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor

from holdfast.engine.checked_llm import CheckedLLM, UnsentError
from holdfast.engine.outputs import VllmOutputs
from holdfast.engine.sequence_queue import Capacity, SequenceQueue
from holdfast.request_context import REQUEST, RequestContext

DEADLINE_SECONDS = 60.0
RUNNING = 4
STEP_TOKENS = 8


class Core:
    """In the place of the client of EngineCore: notes what it is sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.aborted: list[str] = []
        self.resources = SimpleNamespace(engine_dead=False)

    async def add_request_async(self, request: Any) -> None:
        self.sent.append(request.request_id)

    def shutdown(self, **_: Any) -> None:
        pass

    async def abort_requests_async(self, names: list[str]) -> None:
        self.aborted += names


class Engine:
    """vLLM's AsyncLLM with its own books, without the processes."""

    def __init__(self) -> None:
        self.core = Core()
        self.llm: Any = CheckedLLM.__new__(CheckedLLM)
        self.llm.output_processor = OutputProcessor(None, log_stats=False)
        self.llm.engine_core = self.core
        self.llm.output_handler = asyncio.get_running_loop().create_future()
        self.llm.log_requests = False
        self.llm.admission_stats = None
        self.llm.input_processor = SimpleNamespace(
            assign_request_id=InputProcessor.assign_request_id,
            apply_watermarking=lambda *_: None,
            resolve_watermarking=lambda _: False,
        )
        self.llm.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
            scheduler_config=SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None),
        )
        self.llm.observability_config = SimpleNamespace(otlp_traces_endpoint=None)
        self.llm.scheduler_config = self.llm.vllm_config.scheduler_config
        self.llm.model_config = None
        self.sequences = SequenceQueue(Capacity(RUNNING, RUNNING + 2, STEP_TOKENS), lambda: 3)
        self.llm.queue_sequences(self.sequences)

    def ask(
        self,
        name: str,
        context: RequestContext,
        answers: int = 1,
        extra: dict[str, Any] | None = None,
        *,
        prompt_tokens: int = 1,
    ) -> asyncio.Task[list[Any]]:
        """A caller of `generate`."""
        parameters = SamplingParams(
            n=answers,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
            extra_args=extra,
        )
        nothing: Any = dict.fromkeys(
            ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
        )
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[1] * prompt_tokens,
            sampling_params=parameters,
            arrival_time=0.0,
            **nothing,
        )

        async def collect() -> list[Any]:
            REQUEST.set(context)
            return [output async for output in self.llm.generate(request, parameters, name)]

        return asyncio.create_task(collect())

    def finish(self, place: int) -> None:
        """The engine is done with what it was sent as the `place`th."""
        output = EngineCoreOutput(self.core.sent[place], [7], finish_reason=FinishReason.LENGTH)
        self.llm.output_processor.process_outputs([output])

    def read(self, place: int) -> None:
        """The engine makes the first token of what it was sent as the `place`th."""
        output = EngineCoreOutput(self.core.sent[place], [7])
        self.llm.output_processor.process_outputs([output])

    async def until_sent(self, count: int) -> None:
        """Return when so many are in the engine; nothing else was sent."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(self.core.sent) < count:  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(self.core.sent) == count


def play(scene: Callable[[Engine], Awaitable[None]]) -> None:
    """Run a scene within a deadline."""

    async def within_time() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await scene(Engine())

    asyncio.run(within_time())


def test_many_answers_are_sent_one_by_one() -> None:
    """So that `n` takes no more of the engine than its key may have, and all of them come."""

    async def scene(engine: Engine) -> None:
        asking = engine.ask("a", RequestContext(key="a"), 10)
        await engine.until_sent(RUNNING - 1)
        other = engine.ask("b", RequestContext(key="b"))
        await engine.until_sent(RUNNING)
        engine.finish(RUNNING - 1)
        await other
        for place in range(RUNNING - 1):
            engine.finish(place)
        await engine.until_sent(2 * RUNNING - 1)
        for place in range(RUNNING, 2 * RUNNING - 1):
            engine.finish(place)
        await engine.until_sent(3 * RUNNING - 2)
        for place in range(2 * RUNNING - 1, 3 * RUNNING - 2):
            engine.finish(place)
        await engine.until_sent(11)
        engine.finish(10)
        (output,) = await asking
        assert len(output.outputs) == 10

    play(scene)


def test_a_prompt_is_read_when_its_first_token_comes() -> None:
    """Then the engine gets the next long one of the same key."""

    async def scene(engine: Engine) -> None:
        engine.ask("a", RequestContext(key="a"), prompt_tokens=10 * STEP_TOKENS)
        engine.ask("b", RequestContext(key="a"), prompt_tokens=10 * STEP_TOKENS)
        await engine.until_sent(1)
        engine.read(0)
        await engine.until_sent(2)

    play(scene)


@pytest.mark.parametrize("answers", [1, 10])
def test_a_caller_that_leaves_its_turn_leaves_nothing(answers: int) -> None:
    """Neither in vLLM's books nor in ours, and the next has the place."""

    async def scene(engine: Engine) -> None:
        full = engine.ask("full", RequestContext(key="a"), RUNNING - 1)
        await engine.until_sent(RUNNING - 1)
        context = RequestContext(key="a")
        gone, last = (
            engine.ask("gone", context, answers),
            engine.ask("last", RequestContext(key="a")),
        )
        await engine.until_sent(RUNNING - 1)
        gone.cancel()
        await asyncio.wait({gone})
        assert context.sequences == 0
        for place in range(RUNNING - 1):
            engine.finish(place)
        await full
        await engine.until_sent(RUNNING)
        engine.finish(-1)
        await last
        assert engine.llm.output_processor.request_states == {}
        assert engine.llm.output_processor.parent_requests == {}

    play(scene)


def test_what_waits_for_its_turn_when_the_engine_dies_was_not_sent() -> None:
    """It is a death like any other, but the request had no part in it."""

    async def scene(engine: Engine) -> None:
        sent = engine.ask("a", RequestContext(key="a"), RUNNING - 1)
        waits = engine.ask("b", RequestContext(key="a"))
        await engine.until_sent(RUNNING - 1)
        engine.core.resources.engine_dead = True
        engine.llm.output_processor.propagate_error(EngineDeadError())
        assert engine.sequences.unsent(VllmOutputs().request_ids) == {"b"}
        engine.sequences.end(UnsentError)
        with pytest.raises(UnsentError):
            await waits
        with pytest.raises(EngineDeadError) as died:
            await sent
        assert not isinstance(died.value, UnsentError)

    play(scene)


def test_an_aborted_request_is_not_sent() -> None:
    """What somebody else aborts while it waits for its turn ends as aborted."""

    async def scene(engine: Engine) -> None:
        engine.ask("a", RequestContext(key="a"), RUNNING - 1)
        await engine.until_sent(RUNNING - 1)
        waits = engine.ask("b", RequestContext(key="a"))
        await engine.until_sent(RUNNING - 1)
        await engine.llm.abort("b")
        (output,) = await waits
        assert output.outputs[0].finish_reason == "abort"
        engine.finish(0)
        await engine.until_sent(RUNNING - 1)

    play(scene)


def test_a_request_of_too_many_sequences_is_refused() -> None:
    """Prompts times `n`, of all that it has at a time; what came before may end."""

    async def scene(engine: Engine) -> None:
        context = RequestContext(key="a", sequences=2000)
        with pytest.raises(VLLMValidationError, match="2048 sequences"):
            await engine.ask("a", context, 49)
        assert engine.core.sent == []

    play(scene)


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("value", ["x", 3, [{}]])
def test_what_is_said_of_a_transfer_has_to_be_an_object(name: str, value: Any) -> None:
    """vLLM and its connectors take it for one, in EngineCore too; nothing is left of the rest."""

    async def scene(engine: Engine) -> None:
        with pytest.raises(VLLMValidationError, match=name):
            await engine.ask("a", RequestContext(), extra={name: value})
        assert engine.core.sent == []
        assert not engine.llm.output_processor.request_states
        sent = engine.ask("b", RequestContext(), extra={name: {"a": 1}, "other": "x"})
        await engine.until_sent(1)
        engine.finish(0)
        await sent

    play(scene)
