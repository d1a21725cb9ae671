"""Requests outlive their engine, in their old order, and no client sees one twice."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from http import HTTPStatus
from typing import Any, cast

import pytest

from holdfast.engine.replay import ReplayManager
from holdfast.engine.requests.long_prompts import long_prompt_tokens
from holdfast.engine.suspects.suspicions import CHARGES, Suspicions
from holdfast.errors import (
    HoldfastError,
    HostMemoryError,
    KeySuspendedError,
    NotReadyError,
    RequestAbortedError,
    RequestLostError,
    SuspectedError,
)
from holdfast.labels import DeathCause
from holdfast.records import Death, Suspect
from holdfast.request_context import REQUEST, RequestContext
from replay_harness import KILLED, RAISED, TRIAL_SECONDS, ReplayHarness, answered, run_scene
from scripted_capacity import ScriptedCapacity
from scripted_llm import AnsweredError, Output, PlainOutputs, ScriptedLLM, UnsentError
from stub_engine import FACTS

REQUESTED = Death("requested", "new weights")
ENDED = NotReadyError("The server has shut down.", retry_after_seconds=5)
LOST = RequestLostError("The files of the model have changed.")


def test_calls_go_to_the_next_generation_in_their_old_order() -> None:
    """Those that the dead engine had, and those that came when there was none."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        waiting = [harness.call("a"), harness.call("b")]
        await harness.llm.until_received(2)
        harness.bury()
        waiting += [harness.call("c"), harness.call("d")]
        await harness.until_held(4)
        second = harness.start()
        assert [await call for call in waiting] == [[Output(1, finished=True)]] * 4
        assert second.received == ["a", "b", "c", "d"]
        assert harness.requests.replayed == 2

    run_scene(scene)


class RecordedUsage:
    """What is counted for the key of a request."""

    def __init__(self) -> None:
        self.has_begun = False
        self.prompt_tokens = 0
        self.output_tokens = 0

    def refusal(self) -> None:
        """It has no limit."""

    def request_began(self) -> None:
        """An engine was given it."""
        self.has_begun = True

    def count_tokens(self, prompt_tokens: int, output_tokens: int) -> None:
        """An engine has done this much."""
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens


def test_a_key_pays_for_what_engines_made_of_its_requests() -> None:
    """As it is made, of an answer that a death breaks too; a prompt that starts over counts once.

    A request that no engine was given costs nothing.
    """

    async def scene(harness: ReplayHarness) -> None:
        replayed, broken, refused = (RecordedUsage() for _ in range(3))
        llm = harness.start(ScriptedLLM(answers=3))
        REQUEST.set(RequestContext(usage=broken))
        stream = harness.requests.run("generate", {"prompt": "a", "request_id": "a"})
        await anext(stream)
        assert (broken.prompt_tokens, broken.output_tokens) == (1, 1)
        llm.hold()
        waiting = harness.call("b", context=RequestContext(usage=replayed))
        await llm.until_received(2)
        assert replayed.has_begun
        harness.bury()
        with answered(RequestLostError):
            await anext(stream)
        late = harness.call("c", context=RequestContext(usage=refused))
        await harness.until_held(2)
        harness.requests.refuse(lambda request: request.arguments["prompt"] == "c", ENDED)
        with answered(NotReadyError):
            await late
        harness.start(ScriptedLLM(answers=3))
        await waiting
        assert (broken.prompt_tokens, broken.output_tokens) == (1, 1)
        assert (replayed.prompt_tokens, replayed.output_tokens) == (1, 3)
        assert not refused.has_begun

    run_scene(scene)


class WaitingLLM(ScriptedLLM):
    """In which nobody has had a turn yet when it dies."""

    async def generate(self, prompt: str, **_: Any) -> AsyncIterator[Output]:
        """Nothing."""
        self.received.append(prompt)
        await self.died.wait()
        if self.is_dead:
            raise UnsentError
        yield Output(0)


def test_a_call_that_waited_for_its_turn_is_not_accused() -> None:
    """The engine never had it: it goes to the next one with all others, and is tried by nobody."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(WaitingLLM())
        waiting = [harness.call("a"), harness.call("b")]
        await harness.llm.until_received(2)
        harness.llm.die()
        harness.requests.engine_ended()
        await harness.until_held(2)
        harness.requests.assign_blame(RAISED)
        second = harness.start(is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        assert second.received == []
        harness.requests.open()
        await asyncio.gather(*waiting)

    run_scene(scene)


def test_nobody_but_the_probe_gets_in_before_the_engine_is_proven() -> None:
    """`started` lets the probe's calls run, `opened` all others."""

    async def scene(harness: ReplayHarness) -> None:
        early = harness.call("early")
        harness.start(is_open=False)
        await harness.call("probe", context=RequestContext(is_probe=True))
        assert harness.llm.received == ["probe"]
        harness.requests.open()
        await early
        assert harness.llm.received == ["probe", "early"]

    run_scene(scene)


def test_each_request_that_an_engine_is_given_counts_once() -> None:
    """A replay does not count again, and the probe's requests do not count."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        call = harness.call("a")
        await harness.llm.until_received(1)
        assert harness.requests.given == 1
        harness.bury()
        harness.start()
        await call
        await harness.call("probe", context=RequestContext(is_probe=True))
        assert harness.requests.given == 1
        await harness.call("b")
        assert harness.requests.given == 2

    run_scene(scene)


def test_the_probe_is_never_sent_again() -> None:
    """Its failure is what it is there to find."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        probe = harness.call("probe", context=RequestContext(is_probe=True))
        await harness.llm.until_received(1)
        harness.bury(RAISED)
        with answered(RequestLostError):
            await probe
        assert set(harness.requests.lost.values()) == {0}

    run_scene(scene)


def test_a_call_that_has_yielded_is_lost() -> None:
    """Its caller has shown the beginning; the request is marked as broken and counted."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=2))
        context = RequestContext()
        REQUEST.set(context)
        outputs = harness.requests.run("generate", {"prompt": "a", "request_id": "a"})
        assert await anext(outputs) == Output(1)
        harness.bury()
        with answered(RequestLostError):
            await anext(outputs)
        assert context.is_broken
        assert context.may_be_retried is False
        assert harness.requests.lost["stream_broken"] == 1

    run_scene(scene)


def test_a_slow_reader_hears_of_a_planned_end_though_the_next_engine_has_started() -> None:
    """It was the engine before that had its request; one whose engine dies later hears that."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=2))
        outputs = harness.requests.run("generate", {"prompt": "a", "request_id": "a"})
        await anext(outputs)
        harness.requests.plan_end(ENDED)
        harness.bury()
        harness.start(ScriptedLLM(answers=2))
        later = harness.requests.run("generate", {"prompt": "b", "request_id": "b"})
        await anext(later)
        with pytest.raises(AnsweredError, match="shut down"):
            await anext(outputs)
        harness.bury()
        with pytest.raises(AnsweredError, match="died"):
            await anext(later)
        lost = harness.requests.lost
        assert (lost["drained"], lost["stream_broken"]) == (1, 1)

    run_scene(scene)


def test_an_engine_that_has_died_is_not_ended_as_planned() -> None:
    """A slow reader of it hears what happened, though the server stops before it reads."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=2))
        outputs = harness.requests.run("generate", {"prompt": "a", "request_id": "a"})
        await anext(outputs)
        harness.bury()
        harness.requests.plan_end(ENDED)
        with pytest.raises(AnsweredError, match="died"):
            await anext(outputs)
        assert harness.requests.lost["drained"] == 0

    run_scene(scene)


class Stream:
    """A caller that takes one token after the other of an answer that can go on."""

    def __init__(self, harness: ReplayHarness, prompt: str = "a", **options: Any) -> None:
        self.context = RequestContext()
        self.tokens: list[int] = []
        arguments = {"prompt": prompt, "request_id": prompt, "is_continuable": True, **options}
        REQUEST.set(self.context)
        self._outputs = harness.requests.run("generate", arguments)

    async def take(self, count: int = 1) -> None:
        """Take this many tokens."""
        for _ in range(count):
            self.tokens.append((await anext(self._outputs)).tokens)

    def taking(self) -> asyncio.Task[None]:
        """Take the next token in a task."""
        REQUEST.set(self.context)
        return asyncio.create_task(self.take())

    async def end(self) -> None:
        """Take the rest."""
        self.tokens += [output.tokens async for output in self._outputs]


async def over_a_death(
    harness: ReplayHarness, *streams: Stream, death: Death = KILLED, is_open: bool = True
) -> list[asyncio.Task[None]]:
    """Have the engine die while streams wait for their next token; start the next one."""
    answers = harness.llm.answers
    harness.llm.hold()
    waiting = [stream.taking() for stream in streams]
    await asyncio.sleep(0)
    harness.bury(death)
    await harness.until_held(len(streams))
    harness.start(ScriptedLLM(answers=answers), is_open=is_open)
    return waiting


def test_a_stream_goes_on_where_it_stopped() -> None:
    """The next engine gets what was sent, and its caller each token once; it is not a replay."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=5))
        stream = Stream(harness)
        await stream.take(2)
        await asyncio.gather(*await over_a_death(harness, stream, death=REQUESTED))
        assert harness.llm.went_on_after == [(1, 2)]
        await asyncio.gather(*await over_a_death(harness, stream))
        assert harness.llm.went_on_after == [(1, 2, 3)]
        await stream.end()
        assert stream.tokens == [1, 2, 3, 4, 5]
        assert (harness.requests.continued, harness.requests.replayed) == (2, 0)
        assert stream.context.continued_at_tokens == (2, 3)
        assert (stream.context.prompt_tokens, stream.context.output_tokens) == (1, 5)
        assert not stream.context.is_broken
        assert set(harness.requests.lost.values()) == {0}

    run_scene(scene)


def test_a_stream_of_which_nothing_was_sent_starts_over() -> None:
    """Its first token is to come, and the engine's own are not known."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=2))
        stream = Stream(harness)
        await asyncio.gather(*await over_a_death(harness, stream))
        await stream.end()
        assert stream.tokens == [1, 2]
        assert (harness.requests.continued, harness.requests.replayed) == (0, 1)

    run_scene(scene)


def test_a_stream_that_the_next_engine_has_no_room_for_is_lost() -> None:
    """Its context may be shorter: the stream ends with an error, as one that cannot go on."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=3))
        stream = Stream(harness)
        await stream.take(2)
        harness.bury()
        harness.start(ScriptedLLM(most_answers=2))
        with answered(RequestLostError):
            await stream.take()
        assert harness.requests.lost["stream_broken"] == 1
        assert harness.requests.continued == 0

    run_scene(scene)


def test_a_planned_end_has_drained_no_stream_that_the_next_engine_has_no_room_for() -> None:
    """Its client hears of the end. It was not waited for, so no longer wait would have kept it."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=3))
        stream = Stream(harness)
        await stream.take(2)
        harness.requests.plan_end(ENDED)
        harness.bury()
        harness.start(ScriptedLLM(most_answers=2))
        with pytest.raises(AnsweredError, match="shut down"):
            await stream.take()
        lost = harness.requests.lost
        assert (lost["drained"], lost["stream_broken"]) == (0, 1)
        assert stream.context.error == "stream_broken"

    run_scene(scene)


def test_a_stream_that_may_not_go_on_is_lost_and_what_has_not_begun_starts_over() -> None:
    """As where the next engine has other weights, or no longer an adapter."""

    async def scene(harness: ReplayHarness) -> None:
        llm = harness.start(ScriptedLLM(answers=3))
        stream = Stream(harness)
        await stream.take(2)
        llm.hold()
        waiting = harness.call("b")
        await llm.until_received(2)
        harness.bury()
        await harness.until_held(1)
        taking = stream.taking()
        await harness.until_held(2)
        harness.requests.refuse(lambda request: request.has_yielded, LOST)
        harness.start(ScriptedLLM(answers=3))
        with answered(RequestLostError):
            await taking
        await waiting
        assert harness.requests.lost["stream_broken"] == 1
        assert harness.requests.lost["not_replayable"] == 0
        assert stream.context.error == "stream_broken"

    run_scene(scene)


def test_a_slow_reader_is_refused_like_the_others() -> None:
    """It has not asked for the next token since its engine died."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=3))
        stream = Stream(harness)
        await stream.take(2)
        harness.bury()
        harness.requests.refuse(lambda request: request.has_yielded, LOST)
        harness.start(ScriptedLLM(answers=3))
        with answered(RequestLostError):
            await stream.take()
        assert harness.requests.continued == 0

    run_scene(scene)


class AnsweredLLM(ScriptedLLM):
    """Has made the whole answer, whether it lives or not."""

    async def generate(self, prompt: str, **_: Any) -> AsyncIterator[Output]:
        """Two outputs."""
        self.received.append(prompt)
        yield Output(1)
        yield Output(2, finished=True)


def test_an_answer_that_is_whole_is_read_to_its_end() -> None:
    """A slow reader needs no engine for what is left of it."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(AnsweredLLM())
        stream = Stream(harness)
        await stream.take()
        harness.bury()
        harness.requests.refuse(lambda request: request.has_yielded, LOST)
        await stream.end()
        assert stream.tokens == [1, 2]

    run_scene(scene)


def test_an_abort_that_was_asked_for_is_not_a_loss() -> None:
    """Operators are told of losses."""

    async def scene(harness: ReplayHarness) -> None:
        context = RequestContext()
        waiting = harness.call("a", context=context)
        await harness.until_held(1)
        harness.requests.refuse(lambda _: True, RequestAbortedError("It was aborted."))
        with answered(RequestAbortedError):
            await waiting
        assert not any(harness.requests.lost.values())
        assert (context.error, context.may_be_retried) == ("aborted", False)

    run_scene(scene)


class PoolingLLM(ScriptedLLM):
    """Aborts what it is asked to encode."""

    async def encode(self, prompt: str, **_: Any) -> AsyncIterator[Output]:
        """One output, which only says that it is aborted."""
        self.received.append(prompt)
        await self._go.wait()
        yield Output(1, finished=True, is_abort=True)


@pytest.mark.parametrize(
    ("refusal", "error", "may_be_retried"),
    [(None, RequestAbortedError, False), (HostMemoryError("It is full."), HostMemoryError, True)],
)
def test_an_aborted_embedding_ends_with_an_error(
    refusal: HoldfastError | None, error: type[HoldfastError], *, may_be_retried: bool
) -> None:
    """Its output is an empty vector, which a client would take for the answer."""

    async def scene(harness: ReplayHarness) -> None:
        context = RequestContext()
        llm = PoolingLLM()
        llm.hold()
        harness.start(llm)
        REQUEST.set(context)
        outputs = harness.requests.run("encode", {"prompt": "a", "request_id": "a"})
        waiting = asyncio.ensure_future(anext(outputs))
        await llm.until_received(1)
        (request,) = harness.requests._requests
        request.refusal, request.is_abort_expected = refusal, True
        llm.release()
        with answered(error):
            await waiting
        assert not any(harness.requests.lost.values())
        assert context.may_be_retried is may_be_retried

    run_scene(scene)


def test_what_the_engine_has_is_not_refused() -> None:
    """It may end its answer."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=3))
        stream = Stream(harness)
        await stream.take(2)
        harness.requests.refuse(lambda request: request.has_yielded, LOST)
        await stream.end()
        assert len(stream.tokens) == 3

    run_scene(scene)


class RefusingLLM(ScriptedLLM):
    """Does not take a stream to go on with: it raises an error, or yields one."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self._error = error

    async def generate(self, prompt: str, **_: Any) -> AsyncIterator[Output]:
        """One output at most."""
        self.received.append(prompt)
        if self._error is not None:
            raise self._error
        yield Output(0, finished=True, is_failure=True)


@pytest.mark.parametrize("error", [ValueError("the grammar does not accept it"), None])
def test_a_stream_that_the_next_engine_refuses_is_lost(error: Exception | None) -> None:
    """It is counted as one that cannot go on, which it is to its client."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=3))
        stream = Stream(harness)
        await stream.take()
        harness.bury()
        harness.start(RefusingLLM(error))
        with answered(RequestLostError):
            await stream.take()
        assert harness.requests.lost["stream_broken"] == 1
        assert stream.context.error == "stream_broken"

    run_scene(scene)


def test_an_error_of_a_request_itself_is_not_a_loss() -> None:
    """An engine that has done nothing wrong says no to it."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(RefusingLLM(ValueError("too long")))
        with pytest.raises(ValueError, match="too long"):
            await harness.call("a")
        assert set(harness.requests.lost.values()) == {0}

    run_scene(scene)


def test_a_stream_for_which_no_engine_comes_ends_with_an_error_of_a_stream() -> None:
    """No status can be sent any more; the words are those of the others."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=3))
        stream = Stream(harness)
        await stream.take()
        harness.bury()
        harness.requests.fail(ENDED, "engine_lost")
        with pytest.raises(AnsweredError, match="shut down") as caught:
            await stream.take()
        assert isinstance(caught.value.error, RequestLostError)
        assert harness.requests.lost["engine_lost"] == 1

    run_scene(scene)


async def dies_again(harness: ReplayHarness, stream: Stream) -> asyncio.Task[None]:
    """The next engine dies of a signal before it has made a token of a stream that it goes on with.

    The task ends with the token of the engine after it.
    """
    harness.bury()
    llm = harness.start(ScriptedLLM(answers=5))
    llm.hold()
    waiting = stream.taking()
    await llm.until_received(1)
    harness.bury()
    harness.start(ScriptedLLM(answers=5))
    return waiting


def test_a_stream_that_two_engines_die_under_is_a_suspect() -> None:
    """As a request that was replayed: it was in the engine both times, and got no further."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=5))
        stream = Stream(harness)
        await stream.take()
        with answered(RequestLostError):
            await (await dies_again(harness, stream))
        assert harness.requests.lost["suspected"] == 1

    run_scene(scene)


def test_a_stream_that_got_further_between_two_deaths_is_no_suspect() -> None:
    """What ended both engines came from outside: nothing that it did ended the first."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=5))
        stream = Stream(harness)
        await stream.take()
        for _ in range(3):
            await asyncio.gather(*await over_a_death(harness, stream))
        await stream.end()
        assert stream.tokens == [1, 2, 3, 4, 5]

    run_scene(scene)


@pytest.mark.parametrize("cause", ["node_lost", "host_memory"])
@pytest.mark.parametrize(
    "order", [(True, True), (True, False), (False, True)], ids=["both", "first", "second"]
)
def test_what_no_short_request_can_cause_makes_no_suspect(
    cause: DeathCause, order: tuple[bool, bool]
) -> None:
    """A cable that is pulled, and a neighbour that takes the memory, before a signal or after."""

    async def scene(harness: ReplayHarness) -> None:
        for is_such in order:
            harness.start().hold()
            harness.requests.long_prompts.engine_started(FACTS, tuple)
            if harness.generation == 1:
                call = harness.call("a")
            await harness.llm.until_received(1)
            harness.bury(Death(cause, "node b") if is_such else KILLED)
        harness.start()
        assert await call == [Output(1, finished=True)]

    run_scene(scene)


def test_a_long_prompt_that_two_engines_run_out_of_memory_under_is_a_suspect() -> None:
    """It may have taken the memory both times."""

    async def scene(harness: ReplayHarness) -> None:
        for _ in range(2):
            harness.start().hold()
            harness.requests.long_prompts.engine_started(FACTS, tuple)
            if harness.generation == 1:
                call = harness.call("a", tokens=long_prompt_tokens(FACTS) + 1)
            await harness.llm.until_received(1)
            harness.bury(Death("host_memory", "1 MiB is left"))
        harness.start()
        with answered(RequestLostError):
            await call

    run_scene(scene)


def test_a_suspected_stream_is_tried_from_where_it_stopped() -> None:
    """Where the engine died; past that it is acquitted, and goes on."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=3))
        streams = Stream(harness, "a"), Stream(harness, "b")
        for stream in streams:
            await stream.take()
        waiting = await over_a_death(harness, *streams, death=RAISED, is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        assert harness.llm.went_on_after == [(1,), (1,)]
        assert harness.llm.most_running == 1
        harness.requests.open()
        await asyncio.gather(*waiting)
        for stream in streams:
            await stream.end()
            assert stream.tokens == [1, 2, 3]

    run_scene(scene)


async def going_on_while_long_prompts_wait(harness: ReplayHarness) -> Stream:
    """A long stream whose next engine reads it, although its host is short of memory."""
    harness.start(ScriptedLLM(answers=3))
    stream = Stream(harness, tokens=long_prompt_tokens(FACTS))
    await stream.take()
    harness.bury()
    prompts = harness.requests.long_prompts
    llm = harness.start(ScriptedLLM(answers=3), is_open=False)
    llm.hold()
    prompts.engine_started(FACTS, lambda: tuple(llm.running))
    prompts.hold(are_held=True)
    harness.requests.open()
    return stream


def test_a_long_stream_does_not_wait_for_memory() -> None:
    """Its client has a part of the answer; only new prompts wait."""

    async def scene(harness: ReplayHarness) -> None:
        stream = await going_on_while_long_prompts_wait(harness)
        harness.llm.release()
        await stream.end()
        assert stream.tokens == [1, 2, 3]

    run_scene(scene)


def test_a_long_stream_gives_way_after_all_other_long_prompts() -> None:
    """The next engine has to read what was sent, too; the error is that of a stream."""

    async def scene(harness: ReplayHarness) -> None:
        stream = await going_on_while_long_prompts_wait(harness)
        prompts = harness.requests.long_prompts
        prompts.hold(are_held=False)
        other = harness.call("other", tokens=long_prompt_tokens(FACTS) + 1)
        waiting = stream.taking()
        await harness.llm.until_received(2)
        await prompts.give_up_longest()
        assert prompts.suspect_tokens() == long_prompt_tokens(FACTS) + 1
        await prompts.give_up_longest()
        harness.llm.release()
        with answered(RequestLostError):
            await waiting
        with answered(HostMemoryError):
            await other
        assert stream.context.error == "stream_broken"
        assert harness.requests.lost["stream_broken"] == 1

    run_scene(scene)


def test_a_stream_that_can_go_on_is_not_lost_with_its_engine() -> None:
    """A restart waits only for those that would be."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=2))
        streams = Stream(harness, "a"), Stream(harness, "b", is_continuable=False)
        for stream in streams:
            await stream.take()
        assert harness.requests.lost_with_engine == 1
        for stream in streams:
            await stream.end()

    run_scene(scene)


def test_a_consumed_prompt_is_not_replayed() -> None:
    """It came as a stream that has been read; its client is told not to send it again."""
    context = RequestContext()

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        call = harness.call("a", context=context, is_consumed=True)
        await harness.llm.until_received(1)
        harness.bury()
        with answered(RequestLostError):
            await call
        assert harness.requests.lost["not_replayable"] == 1

    run_scene(scene)
    assert context.may_be_retried is False


def test_a_consumed_prompt_that_no_engine_has_had_may_be_sent_again() -> None:
    """It waited for its turn when the engine died, and has ended nothing."""
    context = RequestContext()

    async def scene(harness: ReplayHarness) -> None:
        harness.start(WaitingLLM())
        call = harness.call("a", context=context, is_consumed=True)
        await harness.llm.until_received(1)
        harness.llm.die()
        with answered(RequestLostError):
            await call

    run_scene(scene)
    assert context.may_be_retried is None


def test_an_abort_that_nobody_asked_for_is_a_death() -> None:
    """A core that got SIGTERM gives everything up: told at once, and replayed."""

    async def scene(harness: ReplayHarness) -> None:
        told = asyncio.Event()
        harness.requests.aborts.on_unexpected = told.set
        harness.start()
        call = harness.call("a", gives_up=True)
        await told.wait()
        await harness.until_held(1)
        harness.bury()
        call.cancel()

    run_scene(scene)


def test_an_abort_that_the_last_engine_was_asked_for_is_not_one_of_the_next() -> None:
    """It died instead, or a client would get a part of its answer for all of it."""

    async def scene(harness: ReplayHarness) -> None:
        told = asyncio.Event()
        harness.requests.aborts.on_unexpected = told.set
        harness.start().hold()
        call = harness.call("a", gives_up=True)
        await harness.llm.until_received(1)
        harness.requests.aborts.expect_all()
        harness.bury()
        await harness.until_held(1)
        harness.start()
        await told.wait()
        call.cancel()

    run_scene(scene)


async def stream_of(harness: ReplayHarness, name: str, **options: Any) -> AsyncIterator[Output]:
    """A stream whose client has read one output of two, and then reads no more."""
    harness.llm.answers = 2
    arguments = {"prompt": name, "request_id": name, "gives_up_late": True, **options}
    stream = harness.requests.run("generate", arguments)
    assert await anext(stream) == Output(1)
    return stream


@pytest.mark.parametrize("was_finished", [False, True])
@pytest.mark.parametrize("is_continuable", [False, True])
def test_a_stream_that_the_last_engine_left_is_unfinished_unless_it_cannot_go_on(
    *, was_finished: bool, is_continuable: bool
) -> None:
    """Its client has not read on; the present engine knows nothing of it, and will get it."""

    async def scene(harness: ReplayHarness) -> None:
        presence = harness.requests.presence
        harness.start()
        stream = await stream_of(harness, "a", is_continuable=is_continuable)
        presence.unsent = lambda names, _: frozenset(names if was_finished else ())
        harness.bury()
        harness.requests.forget_engine()
        harness.start()
        presence.unsent = lambda names, _: frozenset(names)
        left = [request.request_id for request in presence.unfinished()]
        assert left == (["a"] if is_continuable and not was_finished else [])
        assert not presence.unfinished(has_left_behind=False)
        await cast("AsyncGenerator[Output, None]", stream).aclose()

    run_scene(scene)


def test_a_stream_that_the_last_engine_left_is_not_aborted_with_the_rest() -> None:
    """The present engine does not have it, and goes on with it afterwards."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start()
        stream = await stream_of(harness, "a", is_continuable=True)
        harness.bury()
        harness.start()
        harness.requests.aborts.expect_all()
        (request,) = harness.requests._requests
        assert not request.is_abort_expected
        await cast("AsyncGenerator[Output, None]", stream).aclose()

    run_scene(scene)


def test_a_client_that_reads_slowly_may_take_the_abort_of_a_pause_after_it() -> None:
    """The engine works again by then, and is not one that ends."""

    async def scene(harness: ReplayHarness) -> None:
        told = asyncio.Event()
        harness.requests.aborts.on_unexpected = told.set
        harness.start()
        stream = await stream_of(harness, "a")
        harness.requests.aborts.is_paused = True
        harness.requests.aborts.came(["a"])
        harness.requests.aborts.is_paused = False
        assert (await anext(stream)).is_abort
        assert not told.is_set()

    run_scene(scene)


def test_a_pause_does_not_hide_the_end_of_the_engine_after_it() -> None:
    """What it left in the engine is aborted by an engine that got SIGTERM."""

    async def scene(harness: ReplayHarness) -> None:
        told = asyncio.Event()
        harness.requests.aborts.on_unexpected = told.set
        harness.start()
        stream = await stream_of(harness, "a", is_continuable=True)
        harness.requests.aborts.is_paused = True
        harness.requests.aborts.is_paused = False
        harness.requests.aborts.came(["a"])
        reading = asyncio.ensure_future(anext(stream))
        await told.wait()
        reading.cancel()

    run_scene(scene)


@pytest.mark.parametrize("is_paused", [False, True])
def test_an_abort_by_the_last_engine_says_nothing_of_the_next(*, is_paused: bool) -> None:
    """A client that reads slowly takes it only then, and its stream goes on in the next engine."""

    async def scene(harness: ReplayHarness) -> None:
        told = asyncio.Event()
        harness.start()
        stream = await stream_of(harness, "a", is_continuable=True)
        harness.requests.aborts.came(["a"])
        aborting = harness.llm
        harness.bury()
        aborting.is_dead = False  # what it had aborted before is not read yet
        harness.start(ScriptedLLM(answers=2))
        harness.requests.aborts.on_unexpected = told.set
        harness.requests.aborts.is_paused = is_paused
        assert await anext(stream) == Output(2, finished=True)
        assert harness.llm.received == ["a"]
        assert not told.is_set()

    run_scene(scene)


def test_an_abort_that_was_asked_for_is_an_answer() -> None:
    """It reaches the caller as it is."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        call = harness.call("a", gives_up=True)
        await harness.llm.until_received(1)
        harness.requests.aborts.expect(frozenset({"a"}))
        harness.llm.release()
        assert [output.is_abort for output in await call] == [True]

    run_scene(scene)


def test_a_client_that_leaves_while_held_is_dropped() -> None:
    """It is not sent to the next generation."""

    async def scene(harness: ReplayHarness) -> None:
        gone, stays = harness.call("gone"), harness.call("stays")
        await harness.until_held(2)
        gone.cancel()
        await asyncio.wait({gone})
        harness.start()
        await stays
        assert harness.llm.received == ["stays"]

    run_scene(scene)


def test_no_engine_will_come() -> None:
    """Who waits and who comes later gets the error, which says that it may be sent elsewhere."""

    async def scene(harness: ReplayHarness) -> None:
        context = RequestContext()
        waiting = harness.call("a", context=context)
        await harness.until_held(1)
        harness.requests.fail(ENDED, "engine_lost")
        with answered(NotReadyError):
            await waiting
        with answered(NotReadyError):
            await harness.call("b")
        assert context.may_be_retried is True
        assert harness.requests.lost["engine_lost"] == 2

    run_scene(scene)


def test_the_engine_is_busy_from_its_first_call_to_its_last() -> None:
    """What the stall rule counts from."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        busy = [_business(harness)]
        requests = [harness.call("a"), harness.call("b")]
        await harness.llm.until_received(2)
        busy.append(_business(harness))
        harness.llm.release()
        await asyncio.gather(*requests)
        busy.append(_business(harness))
        assert busy == [(0, False), (2, True), (0, False)]

    run_scene(scene)


def _business(harness: ReplayHarness) -> tuple[int, bool]:
    return harness.requests.in_engine, harness.requests.busy_since_seconds is not None


def test_a_client_that_reads_slowly_is_no_work_of_the_engine() -> None:
    """The engine has given what it owes; to wait for the client is not a stall."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=2))
        outputs = harness.requests.run("generate", {"prompt": "a", "request_id": "a"})
        await anext(outputs)
        assert _business(harness) == (1, False)
        await anext(outputs)
        assert [output async for output in outputs] == []
        assert _business(harness) == (0, False)

    run_scene(scene)


def test_a_prompt_that_is_still_being_sent_is_no_work_of_the_engine() -> None:
    """Nobody speaks: the engine waits for the caller."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        call = harness.call("a", is_streamed=True)
        await harness.llm.until_received(1)
        assert _business(harness) == (1, False)
        harness.llm.release()
        await call

    run_scene(scene)


def test_a_prompt_that_cannot_be_sent_again_is_work_like_any_other() -> None:
    """The engine has all of it, and hangs if nothing comes."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        call = harness.call("a", is_consumed=True)
        await harness.llm.until_received(1)
        assert _business(harness) == (1, True)
        harness.llm.release()
        await call

    run_scene(scene)


def test_a_paused_engine_may_give_calls_up() -> None:
    """The operator who paused it asked for that."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start()
        harness.requests.aborts.is_paused = True
        assert [output.is_abort for output in await harness.call("a", gives_up=True)] == [True]

    run_scene(scene)


@pytest.mark.parametrize("deadly_turn", [1, 2])
def test_a_tool_is_called_once_whenever_the_engine_dies(deadly_turn: int) -> None:
    """vLLM generates, calls a tool and generates again; only the generation is repeated."""
    tools_called: list[str] = []
    asked: list[int] = []

    async def ask_with_tools(harness: ReplayHarness) -> None:
        for turn in (1, 2):
            if turn == deadly_turn:
                harness.llm.hold()
            asked.append(turn)
            await harness.call(str(turn))
            if turn == 1:
                tools_called.append("weather")

    async def scene(harness: ReplayHarness) -> None:
        harness.start()
        asking = asyncio.create_task(ask_with_tools(harness))
        await harness.llm.until_received(deadly_turn)
        harness.bury()
        harness.start()
        await asking
        assert tools_called == ["weather"]
        assert asked == [1, 2]

    run_scene(scene)


def test_a_request_that_needs_the_engine_again_waits_for_capacity() -> None:
    """The engine was done with it, and others got what it had."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start()
        capacity = ScriptedCapacity()
        context = RequestContext(capacity=capacity)
        await harness.call("language", context=context)
        assert capacity.said == []
        await harness.call("text", context=context)
        assert capacity.said == ["taken"]

    run_scene(scene)


class LostCapacity(ScriptedCapacity):
    """Nothing gets it a second time."""

    async def acquire(self) -> None:
        """There is none."""
        raise ENDED


def test_a_request_that_gets_no_capacity_again_is_refused() -> None:
    """No engine gets it, and it counts as refused, not as lost."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start()
        context = RequestContext(capacity=LostCapacity())
        await harness.call("language", context=context)
        with answered(NotReadyError):
            await harness.call("text", context=context)
        assert harness.llm.received == ["language"]
        assert (context.error, context.may_be_retried) == ("service_unavailable", True)
        assert context.is_broken
        assert not any(harness.requests.lost.values())

    run_scene(scene)


def suspending(deaths: int) -> ReplayHarness:
    """A harness whose key `a` has ended this many engines."""
    suspicions = Suspicions()
    suspicions.charge("a", deaths)
    return ReplayHarness(ReplayManager(PlainOutputs(), suspicions))


def test_no_engine_gets_what_a_suspended_key_has_waiting() -> None:
    """It was admitted before: requests of other keys that waited beside it are served."""

    async def scene(_harness: ReplayHarness) -> None:
        harness = suspending(CHARGES - 1)
        harness.start().hold()
        killer = harness.call("killer", context=RequestContext(key="a"))
        await harness.llm.until_received(1)
        contexts = [RequestContext(key=key) for key in ("a", "b")]
        waiting = [harness.call(f"of {context.key}", context=context) for context in contexts]
        await harness.llm.until_received(3)
        harness.bury(replace(RAISED, suspects=(Suspect("killer", 1, is_prefill=True),)))
        harness.start()
        with answered(SuspectedError):
            await killer
        with answered(KeySuspendedError):
            await waiting[0]
        assert await waiting[1] == [Output(1, finished=True)]
        assert harness.llm.received == ["of b"]
        assert contexts[0].may_be_retried is False
        seconds = harness.requests.suspended_seconds("a")
        assert contexts[0].retry_after_seconds == math.ceil(seconds)
        assert harness.requests.lost["key_suspended"] == 1

    run_scene(scene)


def test_no_engine_gets_a_request_that_comes_after_its_key_was_suspended() -> None:
    """It had passed the gate, and its prompt was still being rendered."""

    async def scene(_harness: ReplayHarness) -> None:
        harness = suspending(CHARGES)
        harness.start()
        with answered(KeySuspendedError):
            await harness.call("late", context=RequestContext(key="a"))
        assert harness.llm.received == []

    run_scene(scene)


def test_no_engine_is_spent_on_trials_for_a_suspended_key() -> None:
    """Not even for who left; suspects get no 429, which routers take to the next server."""

    async def scene(_harness: ReplayHarness) -> None:
        harness = suspending(CHARGES - 2)
        harness.start().hold()
        calls = [harness.call(name, context=RequestContext(key="a")) for name in ("bad", "worse")]
        left = harness.call("worst", context=RequestContext(key="a"))
        await harness.llm.until_received(3)
        left.cancel()
        await asyncio.wait({left})
        harness.bury(RAISED)
        await harness.until_held(2)
        assert not await harness.try_suspects(ScriptedLLM(poison="bad worse worst"))
        assert harness.bury(RAISED).explained == 2
        harness.start(is_open=False)
        await harness.until_held(0)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        for call in calls:
            with pytest.raises(AnsweredError) as told:
                await call
            assert told.value.error.http_status == HTTPStatus.UNPROCESSABLE_ENTITY
        assert harness.llm.received == []

    run_scene(scene)
