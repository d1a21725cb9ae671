"""Where vLLM's own code sends a sequence to its engine, and where it is done with one."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.exceptions import (
    GracefulHTTPError,
    MaxQueuedTokensError,
    QueueOverflowError,
    VLLMValidationError,
)
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
    core_client,
)
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.serial_utils import MsgpackEncoder, UtilityResult

from holdfast.engine import checked_llm
from holdfast.engine.checked_llm import CheckedLLM, UnsentError
from holdfast.engine.outputs import VllmOutputs
from holdfast.engine.proxy import EngineProxy
from holdfast.engine.replay import ReplayManager
from holdfast.engine.requests.aborts import Aborts
from holdfast.engine.requests.continuation import ContinuedPrompt
from holdfast.engine.requests.load import EngineLoad
from holdfast.engine.requests.long_prompts import long_prompt_tokens
from holdfast.engine.requests.request import EngineRequest, SentAnswer
from holdfast.engine.requests.sequence_queue import Capacity, SequenceQueue
from holdfast.engine.requests.sizes import media_bytes_of
from holdfast.engine.suspects.blame import Blame, BlameVerdict
from holdfast.engine.suspects.suspicions import Suspicions
from holdfast.engine.suspects.trial_runner import TrialRunner
from holdfast.patches.continued import SENT_TOKENS
from holdfast.patches.parameters import MAX_MEDIA_COPIES_BYTES, check_media_copies
from holdfast.records import Death
from holdfast.request_context import REQUEST, RequestContext
from stub_engine import FACTS

DEADLINE_SECONDS = 60.0
STOPPED = FinishReason.STOP
RUNNING = 4
STEP_TOKENS = 8


class Core:
    """In the place of the client of EngineCore: notes what it is sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.parameters: list[SamplingParams] = []
        self.aborted: list[str] = []
        self.resources = SimpleNamespace(engine_dead=False)
        self.utility_results: dict[int, Any] = {}
        self.error: Exception | None = None
        """What it raises for whatever it is sent."""
        self.dies = asyncio.get_running_loop().create_future()

    async def ask(self) -> None:
        """Ask workers, as vLLM's client does, and wait for the reply."""
        reply = self.utility_results[1] = asyncio.get_running_loop().create_future()
        await reply

    async def get_output_async(self) -> Any:
        await self.dies
        raise EngineDeadError

    async def add_request_async(self, request: Any) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(request.request_id)
        self.parameters.append(request.sampling_params)

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
        self.llm.logger_manager = None
        self.llm.input_processor = SimpleNamespace(
            assign_request_id=InputProcessor.assign_request_id,
            apply_watermarking=lambda *_: None,
            resolve_watermarking=lambda _: False,
        )
        self.llm.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
            scheduler_config=SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None),
            use_v2_model_runner=True,
        )
        self.llm.observability_config = SimpleNamespace(otlp_traces_endpoint=None)
        self.llm.scheduler_config = self.llm.vllm_config.scheduler_config
        self.llm.model_config = SimpleNamespace(max_model_len=4096)
        self.sequences = SequenceQueue(Capacity(RUNNING, RUNNING + 2, STEP_TOKENS), lambda: 3)
        self.aborted: list[str] = []
        """What the engine has aborted, as it is told at once."""
        self.llm.queue_sequences(self.sequences, self.aborted.extend)

    def ask(
        self,
        name: str,
        context: RequestContext,
        answers: int = 1,
        extra: dict[str, Any] | None = None,
        *,
        prompt_tokens: int = 1,
        sent: SentAnswer | None = None,
        kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
        interval: int | None = None,
    ) -> asyncio.Task[list[Any]]:
        """A caller of `generate`, which goes on after what was sent."""
        arguments = self.arguments(
            name, answers, extra, prompt_tokens=prompt_tokens, kind=kind, interval=interval
        )
        if sent is not None:
            arguments["prompt"] = ContinuedPrompt(arguments["prompt"], sent)
        return calling(context, self.llm.generate(**arguments))

    @staticmethod
    def arguments(
        name: str,
        answers: int = 1,
        extra: dict[str, Any] | None = None,
        *,
        prompt_tokens: int = 1,
        kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
        interval: int | None = None,
    ) -> dict[str, Any]:
        """What `generate` takes for one request."""
        parameters = SamplingParams(
            n=answers,
            output_kind=kind,
            stream_interval=interval,
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

        return {"prompt": request, "sampling_params": parameters, "request_id": name}

    def finish(self, place: int) -> None:
        """The engine is done with what it was sent as the `place`th."""
        output = EngineCoreOutput(self.core.sent[place], [7], finish_reason=FinishReason.LENGTH)
        self.llm.output_processor.process_outputs([output])

    def read(self, place: int) -> None:
        """The engine makes the first token of what it was sent as the `place`th."""
        output = EngineCoreOutput(self.core.sent[place], [7])
        self.llm.output_processor.process_outputs([output])

    async def until_sent(self, count: int) -> None:
        """Return when `count` requests are in the engine; nothing else was sent."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(self.core.sent) < count:  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(self.core.sent) == count


def calling(context: RequestContext, outputs: AsyncIterator[Any]) -> asyncio.Task[list[Any]]:
    """A caller that takes all outputs of a request."""

    async def collect() -> list[Any]:
        REQUEST.set(context)
        return [output async for output in outputs]

    return asyncio.create_task(collect())


def play(scene: Callable[[Engine], Awaitable[None]]) -> None:
    """Run a scene within a deadline."""

    async def within_time() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await scene(Engine())

    asyncio.run(within_time())


def embedding(name: str) -> dict[str, Any]:
    """What `encode` takes for one request."""
    parameters = PoolingParams(task="embed")
    nothing: Any = dict.fromkeys(
        ("mm_features", "sampling_params", "lora_request", "cache_salt", "data_parallel_rank")
    )
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1],
        pooling_params=parameters,
        arrival_time=0.0,
        **nothing,
    )
    return {"prompt": request, "pooling_params": parameters, "request_id": name}


def test_an_engine_may_abort_an_embedding_without_a_vector() -> None:
    """It does so when it pauses or sleeps. vLLM's own code ends with an AssertionError there."""

    async def scene(engine: Engine) -> None:
        aborted, kept = (
            calling(RequestContext(), engine.llm.encode(**embedding(name))) for name in "ab"
        )
        await engine.until_sent(2)
        first, second = engine.core.sent
        process = engine.llm.output_processor.process_outputs
        process([EngineCoreOutput(first, [], finish_reason=FinishReason.ABORT)])
        (output,) = await aborted
        assert VllmOutputs().is_abort(output)
        vector = torch.ones(2)
        process([EngineCoreOutput(second, [], pooling_output=vector, finish_reason=STOPPED)])
        (output,) = await kept
        assert output.outputs.data is vector
        assert not engine.llm.output_processor.request_states

    play(scene)


@pytest.mark.parametrize("missing", [None, ["a hash"]])
def test_an_engine_may_fail_on_an_embedding(missing: list[str] | None) -> None:
    """Its client gets an error; that of a missing image says that it can come again."""

    async def scene(engine: Engine) -> None:
        failed = calling(RequestContext(), engine.llm.encode(**embedding("a")))
        await engine.until_sent(1)
        output = EngineCoreOutput(
            engine.core.sent[0],
            [],
            finish_reason=FinishReason.ERROR,
            mm_cache_miss_hashes=missing,
        )
        engine.llm.output_processor.process_outputs([output])
        if missing:
            (output,) = await failed
            assert output.error.retryable
            return
        with pytest.raises(GracefulHTTPError) as caught:
            await failed
        assert caught.value.http_status == HTTPStatus.INTERNAL_SERVER_ERROR

    play(scene)


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


def test_what_was_sent_of_an_answer_is_read_with_the_prompt() -> None:
    """It goes to the engine with the request, and the answer ends after it."""

    async def scene(engine: Engine) -> None:
        completion = CompletionOutput(0, "", [7], None, None)
        last = RequestOutput(
            "a",
            None,
            [1],
            None,
            [completion],
            False,
            num_cached_tokens=0,
        )
        context = RequestContext(key="a")
        going_on = engine.ask("a", context, sent=SentAnswer([7] * 10 * STEP_TOKENS, last))
        await engine.until_sent(1)
        assert engine.core.parameters[0].extra_args == {SENT_TOKENS: [7] * 10 * STEP_TOKENS}
        other = engine.ask("b", context, prompt_tokens=10 * STEP_TOKENS)
        await engine.until_sent(1)
        engine.read(0)
        await engine.until_sent(2)
        assert engine.core.parameters[1].extra_args is None
        for place in (0, 1):
            engine.finish(place)
        (output,) = await going_on
        assert list(output.outputs[0].token_ids) == [7] * (10 * STEP_TOKENS + 2)
        await other

    play(scene)


def test_streams_go_on_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nothing else would be served while all their answers are read."""
    rounds, restored_in = [0], list[int]()

    async def count_rounds() -> None:
        while True:
            rounds[0] += 1
            await asyncio.sleep(0)

    def restore(*_: Any) -> None:
        restored_in.append(rounds[0])

    monkeypatch.setattr(checked_llm, "restore", restore)

    async def scene(engine: Engine) -> None:
        counting = asyncio.create_task(count_rounds())
        sent = SentAnswer([7])
        asking = [engine.ask(name, RequestContext(), sent=sent) for name in "abcd"]
        while len(restored_in) < len(asking):  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0)
        for task in (counting, *asking):
            task.cancel()
        await asyncio.wait(asking)

    play(scene)
    assert len(set(restored_in)) == len(restored_in)


def test_a_client_cannot_say_what_was_sent() -> None:
    """An engine believes it, and would take tokens that no model has."""

    async def scene(engine: Engine) -> None:
        with pytest.raises(VLLMValidationError, match="reserved"):
            await engine.ask("a", RequestContext(), extra={SENT_TOKENS: [10**9]})
        assert engine.core.sent == []

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


def test_what_was_generated_for_a_caller_that_left_is_counted() -> None:
    """An answer that vLLM returns as a whole has cost the engine as much as one that was read."""

    async def scene(engine: Engine) -> None:
        context = RequestContext(key="a")
        call = engine.ask("a", context, prompt_tokens=5)
        await engine.until_sent(1)
        engine.read(0)
        engine.read(0)
        call.cancel()
        await asyncio.wait({call})
        assert (context.prompt_tokens, context.output_tokens) == (5, 2)

    play(scene)


def test_several_answers_for_a_caller_that_left_are_counted() -> None:
    """Finished ones and others, and their prompt once."""

    async def scene(engine: Engine) -> None:
        context = RequestContext(key="a")
        call = engine.ask("a", context, 3, prompt_tokens=2)
        await engine.until_sent(3)
        engine.finish(0)
        engine.read(1)
        engine.read(1)
        call.cancel()
        await asyncio.wait({call})
        assert (context.prompt_tokens, context.output_tokens) == (2, 3)

    play(scene)


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
@pytest.mark.parametrize("answers", [1, 2])
def test_a_prompt_whose_caller_left_before_its_first_token_is_counted_once(
    kind: RequestOutputKind, answers: int
) -> None:
    """The engine may have worked on it for minutes."""

    async def scene(engine: Engine) -> None:
        context = RequestContext(key="a")
        call = engine.ask("a", context, answers, prompt_tokens=5, kind=kind)
        await engine.until_sent(answers)
        call.cancel()
        await asyncio.wait({call})
        assert (context.prompt_tokens, context.output_tokens) == (5, 0)

    play(scene)


def test_a_prompt_that_the_engine_was_not_given_is_not_counted() -> None:
    """Its caller left the queue."""

    async def scene(engine: Engine) -> None:
        engine.ask("a", RequestContext(key="a"), prompt_tokens=10 * STEP_TOKENS)
        context = RequestContext(key="a")
        call = engine.ask("b", context, prompt_tokens=10 * STEP_TOKENS)
        await engine.until_sent(1)
        call.cancel()
        await asyncio.wait({call})
        assert (context.prompt_tokens, context.output_tokens) == (0, 0)

    play(scene)


def test_the_prompt_of_a_stream_is_told_with_its_first_output() -> None:
    """What takes that output counts the prompt, however many answers it has."""

    async def scene(engine: Engine) -> None:
        context = RequestContext(key="a")
        kind = RequestOutputKind.DELTA
        calls = [engine.ask(str(n), context, n, prompt_tokens=5, kind=kind) for n in (1, 2)]
        await engine.until_sent(3)
        engine.read(0)
        engine.finish(1)
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert (context.prompt_tokens, context.output_tokens) == (0, 0)

    play(scene)


def test_what_vllm_collects_for_a_stream_is_counted() -> None:
    """With `stream_interval`, its caller gets the first token, and later several at once."""

    async def scene(engine: Engine) -> None:
        context = RequestContext(key="a")
        call = engine.ask("a", context, kind=RequestOutputKind.DELTA, interval=10)
        await engine.until_sent(1)
        for _ in range(4):
            engine.read(0)
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        assert (context.prompt_tokens, context.output_tokens) == (0, 3)

    play(scene)


def test_what_a_caller_that_reads_no_more_has_not_taken_is_counted() -> None:
    """Also when the engine is done with it."""

    async def scene(engine: Engine) -> None:
        context = RequestContext(key="a")
        REQUEST.set(context)
        outputs = engine.llm.generate(**engine.arguments("a", kind=RequestOutputKind.DELTA))
        first = asyncio.ensure_future(anext(outputs))
        await engine.until_sent(1)
        engine.read(0)
        await first
        engine.read(0)
        engine.finish(0)
        await outputs.aclose()
        assert (context.prompt_tokens, context.output_tokens) == (0, 2)

    play(scene)


@pytest.mark.parametrize("answers", [1, 2])
def test_what_an_engine_aborts_is_told_before_any_caller_knows(answers: int) -> None:
    """A caller that reads slowly knows much later, and `n` answers only once all have ended."""

    async def scene(engine: Engine) -> None:
        asking = engine.ask("a", RequestContext(), answers)
        await engine.until_sent(answers)
        engine.read(0)
        assert not engine.aborted
        process = engine.llm.output_processor.process_outputs
        sent = engine.core.sent
        process([EngineCoreOutput(sent[0], [], finish_reason=FinishReason.ABORT)])
        assert engine.aborted == sent[:1]
        assert VllmOutputs().request_ids(sent[0])[-1] == "a"
        for place in range(1, answers):
            engine.finish(place)
        (output,) = await asking
        assert VllmOutputs().is_abort(output)

    play(scene)


def test_what_waits_for_its_turn_when_the_engine_dies_was_not_sent() -> None:
    """It is a death like any other, but the request had no part in it."""

    async def scene(engine: Engine) -> None:
        sent = engine.ask("a", RequestContext(key="a"), RUNNING - 1)
        waits = engine.ask("b", RequestContext(key="a"))
        await engine.until_sent(RUNNING - 1)
        engine.core.resources.engine_dead = True
        engine.llm.output_processor.propagate_error(EngineDeadError())
        assert engine.sequences.unsent(["a", "b"], VllmOutputs().request_ids) == {"b"}
        engine.sequences.end(UnsentError)
        with pytest.raises(UnsentError):
            await waits
        with pytest.raises(EngineDeadError) as died:
            await sent
        assert not isinstance(died.value, UnsentError)

    play(scene)


@pytest.mark.parametrize("sent", [None, SentAnswer([7])], ids=["new", "goes on"])
def test_what_comes_after_the_death_was_not_sent(sent: SentAnswer | None) -> None:
    """The supervisor has not noticed yet, so that requests still come."""

    async def scene(engine: Engine) -> None:
        engine.llm.declare_dead()
        with pytest.raises(UnsentError):
            await engine.ask("a", RequestContext(), sent=sent)

    play(scene)


class SilentClient(AsyncMPClient):  # type: ignore[misc]  # vLLM is Any to us
    """vLLM's own client of an EngineCore, which answers nothing."""

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.utility_results: dict[int, asyncio.Future[Any]] = {}
        self.encoder = MsgpackEncoder()
        self.client_index = 0
        self.core_engine = b"core"

    async def _send_input_message(self, *_: Any) -> None:
        self.ensure_alive()

    def _ensure_output_queue_task(self) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        pass


async def asked_before_the_death(engine: Engine) -> tuple[SilentClient, asyncio.Task[Any]]:
    """A client with a call that its engine died of, and the call."""
    engine.llm.engine_core = client = SilentClient()
    call = asyncio.create_task(client.collective_rpc_async("add_lora"))
    while not client.utility_results:  # noqa: ASYNC110 - the loop is all there is
        await asyncio.sleep(0)
    engine.llm.declare_dead()
    return client, call


def test_what_workers_were_asked_ends_with_the_engine() -> None:
    """vLLM ends only requests; the reply would be awaited without end."""

    async def scene(engine: Engine) -> None:
        client, call = await asked_before_the_death(engine)
        with pytest.raises(EngineDeadError):
            await call
        with pytest.raises(EngineDeadError):
            await client.collective_rpc_async("add_lora")

    play(scene)


def test_a_reply_that_comes_after_all_is_not_read() -> None:
    """From an engine that was stalled, and is declared dead before it ends."""

    async def scene(engine: Engine) -> None:
        client, call = await asked_before_the_death(engine)
        (name,) = client.utility_results
        reply = UtilityOutput(name, result=UtilityResult([]))
        core_client._process_utility_output(reply, client.utility_results)
        with pytest.raises(EngineDeadError):
            await call

    play(scene)


def test_a_call_that_could_not_be_sent_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM keeps it among those that wait for a reply; asyncio would log that nobody reads it."""

    async def scene(engine: Engine) -> None:
        client, call = await asked_before_the_death(engine)
        with pytest.raises(EngineDeadError):
            await call
        with pytest.raises(EngineDeadError):
            await client.collective_rpc_async("add_lora")
        engine.llm.declare_dead()
        client.utility_results.clear()
        gc.collect()

    play(scene)
    assert "never retrieved" not in caplog.text


def test_a_stream_that_waits_for_others_to_go_on_when_the_engine_dies_was_not_sent() -> None:
    """Each has the answers before it read first."""

    async def scene(engine: Engine) -> None:
        async with engine.llm.restoring:
            waits = engine.ask("a", RequestContext(), sent=SentAnswer([7]))
            await engine.until_sent(0)
            engine.llm.declare_dead()
        with pytest.raises(UnsentError):
            await waits

    play(scene)


def test_a_dead_engine_gets_nothing_more() -> None:
    """Though a caller leaves it, so that another could have its turn."""

    async def scene(engine: Engine) -> None:
        leaves = engine.ask("a", RequestContext(key="a"), RUNNING - 1)
        waits = engine.ask("b", RequestContext(key="a"))
        await engine.until_sent(RUNNING - 1)
        engine.core.resources.engine_dead = True
        leaves.cancel()
        await asyncio.wait({leaves})
        await engine.until_sent(RUNNING - 1)
        assert engine.sequences.unsent(["b"], VllmOutputs().request_ids) == {"b"}
        engine.sequences.end(UnsentError)
        with pytest.raises(UnsentError):
            await waits

    play(scene)


def test_what_the_engine_had_in_part_was_sent() -> None:
    """Some answers to a prompt waited for their turn, but those before them had theirs."""

    async def scene(engine: Engine) -> None:
        asking = engine.ask("a", RequestContext(key="a"), RUNNING)
        await engine.until_sent(RUNNING - 1)
        engine.llm.declare_dead()
        engine.sequences.end(UnsentError)
        with pytest.raises(EngineDeadError) as died:
            await asking
        assert not isinstance(died.value, UnsentError)

    play(scene)


def test_a_request_that_vllm_has_not_registered_yet_did_not_end_the_engine() -> None:
    """It waits for others to go on, so that the engine and our queue know nothing of it."""

    async def scene(engine: Engine) -> None:
        requests = ReplayManager(VllmOutputs())
        requests.engine_started(engine.llm, 1)
        requests.open()
        requests.presence.unsent = engine.sequences.unsent
        arguments = engine.arguments("a")
        arguments["prompt"] = ContinuedPrompt(arguments["prompt"], SentAnswer([7]))
        async with engine.llm.restoring:
            call = calling(RequestContext(key="a"), requests.run("generate", arguments))
            await engine.until_sent(0)
            engine.llm.declare_dead()
            death = Death("worker_exception", "rank 0: ZeroDivisionError", blames_requests=True)
            assert requests.assign_blame(death) == BlameVerdict()
        call.cancel()

    play(scene)


def test_a_stream_whose_client_reads_slowly_is_unfinished_until_the_engine_is_done() -> None:
    """Its last output waits for the client then, and nothing of it is in the engine."""

    async def scene(engine: Engine) -> None:
        requests = ReplayManager(VllmOutputs())
        requests.engine_started(engine.llm, 1)
        requests.open()
        presence = requests.presence
        presence.unsent = engine.sequences.unsent
        REQUEST.set(RequestContext(key="a"))
        arguments = engine.arguments("a", kind=RequestOutputKind.DELTA)
        stream = requests.run("generate", arguments)
        first = asyncio.ensure_future(anext(stream))
        await engine.until_sent(1)
        engine.read(0)
        assert not (await first).finished
        assert [request.request_id for request in presence.unfinished()] == ["a"]
        engine.finish(0)
        assert presence.unfinished() == []
        assert (await anext(stream)).finished

    play(scene)


class ImageThread(BaseRenderer[Any]):  # type: ignore[misc]  # vLLM is Any to us
    """vLLM's own renderer, without a model: it has the thread that reads images."""

    def __init__(self) -> None:
        model = SimpleNamespace(renderer_num_workers=1, supports_multimodal_inputs=False)
        parallel = SimpleNamespace(_api_process_rank=0)
        super().__init__(SimpleNamespace(model_config=model, parallel_config=parallel), None)

    def render_messages(self, *_: Any) -> Any:
        raise NotImplementedError


class ToldCore:
    """In the place of the client of EngineCore: notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        async def tell(*_: Any, **__: Any) -> None:
            self.told.append(name.partition("_")[0])

        return tell

    def shutdown(self, **_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("pause_generation", "resume_generation"), ["pause", "resume"]),
        (("sleep", "wake_up"), ["sleep", "wake"]),
    ],
)
def test_no_call_overtakes_a_pause_or_a_sleep(names: tuple[str, str], told: list[str]) -> None:
    """vLLM first has the thread that reads images empty a cache, and sends the pause after that."""

    async def scene(engine: Engine) -> None:
        core = engine.llm.engine_core = ToldCore()
        renderer = engine.llm.renderer = ImageThread()
        proxy = EngineProxy()
        proxy._current = engine.llm
        are_read = threading.Event()
        renderer._mm_executor.submit(are_read.wait)
        calls = [asyncio.ensure_future(getattr(proxy, name)()) for name in names]
        for _ in range(20):
            await asyncio.sleep(0)
        calls[0].cancel()
        are_read.set()
        await asyncio.gather(*calls, return_exceptions=True)
        assert core.told[:2] == told
        renderer.shutdown()

    play(scene)


def test_a_dead_engine_is_freed_although_vllm_has_frozen_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing that was made before vLLM froze its heap is in a reference cycle after its death."""
    # pytest would keep the record of the error that the engine ends with.
    caplog.set_level(logging.CRITICAL, "vllm.v1.engine.async_llm")

    async def client_after_its_death() -> weakref.ref[Core]:
        engine = Engine()
        engine.llm.log_stats = False
        engine.llm.renderer = SimpleNamespace(mm_processor_cache=None, shutdown=bool)
        engine.llm.output_handler = None
        engine.llm._run_output_handler()
        gc.freeze()
        asked: list[asyncio.Task[Any]]
        asked = [engine.ask(name, RequestContext(key="a")) for name in ("a", "b")]
        asked.append(asyncio.create_task(engine.core.ask()))
        await engine.until_sent(2)
        engine.llm.declare_dead()
        await asyncio.wait(asked)
        engine.sequences.end(UnsentError)
        engine.llm.stop_queueing()
        engine.core.dies.set_result(None)
        await asyncio.wait({engine.llm.output_handler})
        assert {type(one.exception()) for one in asked} == {EngineDeadError}
        return weakref.ref(engine.core)

    try:
        client = asyncio.run(client_after_its_death())
        gc.collect()
        assert client() is None
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@pytest.mark.parametrize("names", ["b", ["b"]], ids=["one", "as the proxy does"])
def test_an_aborted_request_is_not_sent(names: str | list[str]) -> None:
    """What another task aborts while it waits for its turn ends as aborted."""

    async def scene(engine: Engine) -> None:
        engine.ask("a", RequestContext(key="a"), RUNNING - 1)
        await engine.until_sent(RUNNING - 1)
        waits = engine.ask("b", RequestContext(key="a"))
        await engine.until_sent(RUNNING - 1)
        await engine.llm.abort(names)
        (output,) = await waits
        assert output.outputs[0].finish_reason == "abort"
        engine.finish(0)
        await engine.until_sent(RUNNING - 1)

    play(scene)


@pytest.mark.parametrize("answers", [1, 3])
def test_a_prompt_that_is_given_up_leaves_the_engine(answers: int) -> None:
    """While it is read or waits for its turn; its caller gets 429, and others go on."""

    async def scene(engine: Engine) -> None:
        requests = ReplayManager(VllmOutputs())
        requests.engine_started(engine.llm, 1)
        requests.open()
        requests.long_prompts.engine_started(FACTS, engine.sequences.prefilling)
        context = RequestContext(key="a")
        arguments = engine.arguments("long", answers, prompt_tokens=2 * long_prompt_tokens(FACTS))
        long = calling(context, requests.run("generate", arguments))
        await engine.until_sent(1)
        other = engine.ask("other", RequestContext(key="b"))
        await engine.until_sent(2)
        await requests.long_prompts.give_up_longest()
        with pytest.raises(GracefulHTTPError) as refused:
            await long
        assert refused.value.http_status == HTTPStatus.TOO_MANY_REQUESTS
        assert context.sequences == 0
        assert engine.core.sent[0] in engine.core.aborted
        engine.finish(1)
        await other
        assert engine.llm.output_processor.request_states == {}

    play(scene)


def test_a_prompt_that_was_read_is_not_given_up() -> None:
    """Its answer is being made."""

    async def scene(engine: Engine) -> None:
        requests = ReplayManager(VllmOutputs())
        requests.engine_started(engine.llm, 1)
        requests.open()
        requests.long_prompts.engine_started(FACTS, engine.sequences.prefilling)
        arguments = engine.arguments("long", prompt_tokens=2 * long_prompt_tokens(FACTS))
        long = calling(RequestContext(key="a"), requests.run("generate", arguments))
        await engine.until_sent(1)
        engine.read(0)
        await requests.long_prompts.give_up_longest()
        engine.finish(0)
        assert len(await long) == 1

    play(scene)


def test_a_request_of_too_many_sequences_is_refused() -> None:
    """Prompts times `n`, of all that it has at a time; what came before may end."""

    async def scene(engine: Engine) -> None:
        context = RequestContext(key="a", sequences=2000)
        with pytest.raises(VLLMValidationError, match="2048 sequences"):
            await engine.ask("a", context, 49)
        assert engine.core.sent == []

    play(scene)


LARGE: Any = torch.empty(1).expand(1 + MAX_MEDIA_COPIES_BYTES // 8)
"""More than half of what all copies may have, without taking any of it."""


@pytest.mark.parametrize(
    "prompt",
    [
        {"type": "embeds", "prompt_embeds": LARGE},
        {
            "type": "multimodal",
            "prompt_token_ids": [1],
            "mm_kwargs": MultiModalKwargsItems(
                {
                    "image": [
                        MultiModalKwargsItem(
                            {"pixel_values": MultiModalFieldElem(LARGE, MultiModalBatchedField())}
                        )
                    ]
                }
            ),
        },
    ],
)
def test_images_and_embeddings_are_not_copied_for_many_answers(prompt: Any) -> None:
    """vLLM encodes them once for each; a single answer is not refused for it."""

    async def scene(engine: Engine) -> None:
        with pytest.raises(VLLMValidationError, match="2 answers to a prompt whose media"):
            await engine.llm.add_request("a", prompt, SamplingParams(n=2))
        assert engine.core.sent == []

    play(scene)
    assert media_bytes_of(prompt) >= LARGE.nbytes
    check_media_copies(1, MAX_MEDIA_COPIES_BYTES)
    check_media_copies(2, MAX_MEDIA_COPIES_BYTES // 2)


@pytest.mark.parametrize(
    ("tokens", "is_refused"), [(100_000, True), (2**20 - 3, False), (70_000, False)]
)
def test_a_longer_answer_with_log_probs_is_refused_where_a_client_asks_for_it(
    tokens: int, *, is_refused: bool
) -> None:
    """And not where it is what the context leaves, a default, or was admitted before."""

    async def scene(engine: Engine) -> None:
        model = engine.llm.model_config
        model.max_model_len = 2**20
        model.get_diff_sampling_param = lambda: {"max_tokens": 70_000}
        given = SamplingParams(
            max_tokens=tokens, logprobs=19, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt = {"type": "token", "prompt_token_ids": [1, 2, 3]}
        assert engine.llm._is_length_given(given, prompt) == is_refused
        if is_refused:
            with pytest.raises(VLLMValidationError, match="smaller max_tokens"):
                await engine.llm.add_request("a", prompt, given)
        context = RequestContext()
        REQUEST.set(context)
        context.given_to(1)
        context.given_to(2)
        assert not engine.llm._is_length_given(given, prompt)

    play(scene)


@pytest.mark.parametrize("limit", ["max_num_queued_reqs", "max_num_queued_tokens"])
@pytest.mark.parametrize("answers", [1, 2])
def test_what_an_earlier_engine_had_is_admitted(limit: str, answers: int) -> None:
    """After a death all come at once, and vLLM would refuse what is over its limit of the queue."""

    async def scene(engine: Engine) -> None:
        setattr(engine.llm.scheduler_config, limit, 1)
        first = engine.ask("first", RequestContext())
        await engine.until_sent(1)
        fresh, replayed = RequestContext(), RequestContext()
        fresh.given_to(2)
        with pytest.raises((QueueOverflowError, MaxQueuedTokensError)) as refused:
            await engine.ask("fresh", fresh, answers)
        assert refused.value.http_status == HTTPStatus.TOO_MANY_REQUESTS
        replayed.given_to(1)
        replayed.given_to(2)
        second = engine.ask("replayed", replayed, answers)
        await engine.until_sent(1 + answers)
        for place in range(1 + answers):
            engine.finish(place)
        await asyncio.gather(first, second)

    play(scene)


@pytest.mark.parametrize("limit", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_the_probe_is_admitted(limit: str) -> None:
    """Its decodes fill the queue before its prompt joins them, and no client waits meanwhile."""

    async def scene(engine: Engine) -> None:
        setattr(engine.llm.scheduler_config, limit, 1)
        asking = engine.ask("first", RequestContext(is_probe=True))
        await engine.until_sent(1)
        with pytest.raises((QueueOverflowError, MaxQueuedTokensError)):
            await engine.ask("of a client", RequestContext(), 2)
        joining = engine.ask("second", RequestContext(is_probe=True))
        await engine.until_sent(2)
        for place in range(2):
            engine.finish(place)
        await asyncio.gather(asking, joining)

    play(scene)


@pytest.mark.parametrize("limit", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_all_that_are_tried_together_are_admitted(limit: str) -> None:
    """One that vLLM refused would be acquitted without having run."""

    async def scene(engine: Engine) -> None:
        setattr(engine.llm.scheduler_config, limit, 1)
        outputs = VllmOutputs()
        aborts = Aborts(outputs, ())
        blame = Blame(outputs, Suspicions(), in_step=tuple, refused=lambda _: None)
        runner = TrialRunner(outputs, EngineLoad(time.monotonic), aborts, blame)
        suspects = [tried(engine, name) for name in ("a", "b")]
        trial = asyncio.create_task(runner.run(engine.llm, suspects))
        await engine.until_sent(2)
        for place in range(2):
            engine.finish(place)
        assert await trial == []

    def tried(engine: Engine, name: str) -> EngineRequest:
        context = RequestContext()
        context.given_to(1)
        arguments = engine.arguments(name)
        return EngineRequest("generate", arguments, context, is_replayable=True, is_streamed=False)

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


@pytest.mark.parametrize("answers", [1, 2])
def test_what_cannot_be_encoded_leaves_nothing(answers: int) -> None:
    """vLLM registers a request before it encodes it, and keeps one that has no encoding."""

    async def scene(engine: Engine) -> None:
        engine.core.error = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
        for number in range(2 * RUNNING):
            with pytest.raises(VLLMValidationError, match="encoding"):
                await engine.ask(str(number), RequestContext(key="a"), answers)
        assert not engine.llm.output_processor.request_states
        engine.core.error = None
        room = RUNNING - 1  # one place is kept for the other keys
        asking = [engine.ask(f"b{number}", RequestContext(key="a")) for number in range(room)]
        await engine.until_sent(room)
        for place in range(room):
            engine.finish(place)
        await asyncio.gather(*asking)

    play(scene)


def test_what_goes_beside_the_parameters_has_to_have_an_encoding() -> None:
    """The engine gets the arguments of a chat's template, if a parser of reasoning wants them."""

    async def scene(engine: Engine) -> None:
        arguments = engine.arguments("a")
        odd = {"x": "\ud800"}
        with pytest.raises(VLLMValidationError, match="encoding"):
            await calling(
                RequestContext(), engine.llm.generate(**arguments, reasoning_parser_kwargs=odd)
            )
        assert engine.core.sent == []

    play(scene)


@pytest.mark.parametrize(("said", "kept"), [(3, 3), (4, None), (-1, None), (2**64 - 1, None)])
def test_a_client_cannot_say_that_more_than_its_prompt_was_cached(
    said: int, kept: int | None
) -> None:
    """vLLM's metrics would add it up as it is."""

    async def scene(engine: Engine) -> None:
        transfer = {"do_remote_prefill": True, "remote_prefill_cached_tokens": said}
        asking = engine.ask(
            "a", RequestContext(), extra={"kv_transfer_params": transfer}, prompt_tokens=3
        )
        await engine.until_sent(1)
        (state,) = engine.llm.output_processor.request_states.values()
        assert state.remote_prefill_cached_tokens == kept
        engine.finish(0)
        await asking

    play(scene)
