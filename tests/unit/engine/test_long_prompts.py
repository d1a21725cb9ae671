"""While the host is short of memory long prompts wait, or are given up; all others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from holdfast.engine.replay import ReplayManager
from holdfast.engine.requests.long_prompts import RECENT_SECONDS, long_prompt_tokens
from holdfast.errors import HostMemoryError, OverloadedError, suspended_error
from holdfast.request_context import RequestContext
from replay_harness import KILLED, ReplayHarness, answered, run_scene
from scripted_llm import EngineGoneError, Output, PlainOutputs, ScriptedLLM
from stub_engine import FACTS, FakeClock

LONG = long_prompt_tokens(FACTS) + 1
DONE = [Output(1, finished=True)]


class AbortableLLM(ScriptedLLM):
    """Makes no token until `release`, but ends a call that is aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.hold()
        self._aborts: dict[str, asyncio.Event] = {}

    async def abort(self, request_id: str) -> None:
        """Have the call of this name end."""
        self._aborts[request_id].set()

    async def generate(self, prompt: str, **_: Any) -> AsyncIterator[Output]:
        """One output, which says whether the call was aborted."""
        aborted = self._aborts.setdefault(prompt, asyncio.Event())
        waits = [asyncio.ensure_future(one.wait()) for one in (self._go, aborted)]
        self.received.append(prompt)
        self.running.append(prompt)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self.is_dead:
                raise EngineGoneError
            yield Output(1, finished=True, is_abort=aborted.is_set())
        finally:
            self.running.remove(prompt)
            for wait in waits:
                wait.cancel()


def start(harness: ReplayHarness) -> AbortableLLM:
    """Start an engine that has read no prompt to its end yet."""
    llm = AbortableLLM()
    harness.start(llm)
    harness.requests.long_prompts.engine_started(FACTS, lambda: tuple(llm.running))
    return llm


class Lent:
    """A capacity, and what was done with it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done: list[str] = []
        self._error = error

    def release(self) -> None:
        """Take it back."""
        self.done.append("lent")

    async def acquire(self) -> None:
        """Give it again, or fail."""
        self.done.append("back")
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "max_model_len", "tokens"), [(512, 1001, 125), (100, 8000, 100)]
)
def test_a_prompt_is_long_if_it_needs_more_than_a_step_or_much_of_the_context(
    max_num_batched_tokens: int, max_model_len: int, tokens: int
) -> None:
    """Whichever is less: without chunks a step takes the longest prompt there is."""
    facts = replace(
        FACTS, max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len
    )
    assert long_prompt_tokens(facts) == tokens


def test_long_prompts_wait_and_short_ones_pass_them() -> None:
    """Until there is enough memory again; then the long ones go on in their order."""

    async def scene(harness: ReplayHarness) -> None:
        llm, prompts, held = start(harness), harness.requests.long_prompts, list[int]()
        prompts.on_held = lambda: held.append(harness.requests.held)
        prompts.hold(are_held=True)
        waiting = [harness.call(name, tokens=LONG) for name in "ab"]
        await harness.until_held(2)
        passing = harness.call("c", tokens=LONG - 1)
        await llm.until_received(1)
        assert llm.received == ["c"]
        assert len(held) == 2
        prompts.hold(are_held=False)
        llm.release()
        assert await asyncio.gather(*waiting, passing) == [DONE, DONE, DONE]
        assert llm.received == ["c", "a", "b"]

    run_scene(scene)


def test_the_probe_never_waits_and_is_never_given_up() -> None:
    """A proof is worth nothing without its longest prompts, and a guard must not prevent READY."""

    async def scene(harness: ReplayHarness) -> None:
        llm, prompts = start(harness), harness.requests.long_prompts
        prompts.hold(are_held=True)
        probe = harness.call("probe", context=RequestContext(is_probe=True), tokens=LONG)
        await llm.until_received(1)
        await prompts.give_up_longest()
        assert prompts.suspect_tokens() == LONG
        llm.release()
        assert await probe == DONE

    run_scene(scene)


def test_a_prompt_that_waits_lends_its_capacity() -> None:
    """Or long prompts would keep short ones from an engine that has nothing to do."""

    async def scene(harness: ReplayHarness) -> None:
        llm, lent = start(harness), Lent()
        llm.release()
        harness.requests.long_prompts.hold(are_held=True)
        call = harness.call("a", context=RequestContext(capacity=lent), tokens=LONG)
        await harness.until_held(1)
        assert lent.done == ["lent"]
        harness.requests.long_prompts.hold(are_held=False)
        assert await call == DONE
        assert lent.done == ["lent", "back"]

    run_scene(scene)


def test_a_prompt_that_is_refused_while_it_waits_for_its_capacity_is_told() -> None:
    """Nothing would wake it again."""

    class Late(Lent):
        """Comes back when it is told to."""

        def __init__(self) -> None:
            super().__init__()
            self.comes = asyncio.Event()

        async def acquire(self) -> None:
            """Give it again, in time."""
            await super().acquire()
            await self.comes.wait()

    async def scene(harness: ReplayHarness) -> None:
        start(harness)
        harness.requests.long_prompts.hold(are_held=True)
        lent = Late()
        call = harness.call("a", context=RequestContext(capacity=lent), tokens=LONG)
        await harness.until_held(1)
        harness.requests.long_prompts.hold(are_held=False)
        while lent.done != ["lent", "back"]:  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0)
        harness.requests.refuse(lambda _: True, HostMemoryError("It is short again."))
        lent.comes.set()
        with answered(HostMemoryError):
            await call

    run_scene(scene)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OverloadedError("full", retry_after_seconds=7), (True, 7)),
        (suspended_error(900), (False, 900)),
    ],
    ids=["full", "suspended"],
)
def test_without_capacity_to_go_on_with_it_is_told_when_to_come_again(
    error: OverloadedError, advice: tuple[bool, int]
) -> None:
    """The queue may be full by then, or its key suspended."""

    async def scene(harness: ReplayHarness) -> None:
        start(harness)
        context = RequestContext(capacity=Lent(error))
        harness.requests.long_prompts.hold(are_held=True)
        call = harness.call("a", context=context, tokens=LONG)
        await harness.until_held(1)
        harness.requests.long_prompts.hold(are_held=False)
        with answered(OverloadedError):
            await call
        assert (context.may_be_retried, context.retry_after_seconds) == advice

    run_scene(scene)


@pytest.mark.parametrize("is_lent", [True, False], ids=["without capacity", "given up"])
def test_what_an_engine_died_with_may_not_be_retried(*, is_lent: bool) -> None:
    """Another replica would get what may have ended this engine."""

    async def scene(harness: ReplayHarness) -> None:
        lent = Lent(OverloadedError("full", retry_after_seconds=5))
        context = RequestContext(capacity=lent)
        llm, prompts = start(harness), harness.requests.long_prompts
        call = harness.call("a", context=context, tokens=LONG)
        await llm.until_received(1)
        harness.bury(KILLED)
        prompts.hold(are_held=True)
        start(harness)
        await asyncio.sleep(0)
        await harness.until_held(1)
        if is_lent:
            prompts.hold(are_held=False)
        else:
            await prompts.give_up_longest()
        with answered(OverloadedError if is_lent else HostMemoryError):
            await call
        assert (context.may_be_retried, context.retry_after_seconds) == (False, None)

    run_scene(scene)


def test_the_longest_prompt_that_is_processed_is_given_up() -> None:
    """With a reason, an advice to come again, and no harm to the others; it is not a loss."""

    async def scene(harness: ReplayHarness) -> None:
        llm, context = start(harness), RequestContext()
        given_up = list[str]()
        harness.requests.long_prompts.on_given_up = lambda: given_up.append("once")
        calls = [harness.call(name, tokens=LONG + more) for name, more in (("a", 1), ("c", 2))]
        longest = harness.call("b", context=context, tokens=LONG + 3)
        await llm.until_received(3)
        await harness.requests.long_prompts.give_up_longest()
        with answered(HostMemoryError):
            await longest
        assert (context.may_be_retried, context.error) == (True, "host_memory")
        assert given_up == ["once"]
        assert set(harness.requests.lost.values()) == {0}
        llm.release()
        assert await asyncio.gather(*calls) == [DONE, DONE]

    run_scene(scene)


def test_one_that_waits_is_given_up_only_if_none_is_processed() -> None:
    """It takes no memory yet, however long it is."""

    async def scene(harness: ReplayHarness) -> None:
        llm, prompts = start(harness), harness.requests.long_prompts
        running = harness.call("running", tokens=LONG)
        await llm.until_received(1)
        prompts.hold(are_held=True)
        waiting = harness.call("waiting", tokens=10 * LONG)
        await harness.until_held(1)
        await prompts.give_up_longest()
        with answered(HostMemoryError):
            await running
        assert not waiting.done()
        await prompts.give_up_longest()
        with answered(HostMemoryError):
            await waiting
        assert llm.received == ["running"]

    run_scene(scene)


def test_what_was_read_to_its_end_is_not_given_up() -> None:
    """Nor is a short prompt: neither will take more memory than it has."""

    async def scene(harness: ReplayHarness) -> None:
        llm, prompts = start(harness), harness.requests.long_prompts
        calls = [harness.call("long", tokens=LONG), harness.call("short", tokens=LONG - 1)]
        await llm.until_received(2)
        prompts.engine_started(FACTS, lambda: ("short",))
        await prompts.give_up_longest()
        assert prompts.suspect_tokens() == 0
        llm.release()
        assert await asyncio.gather(*calls) == [DONE, DONE]

    run_scene(scene)


def test_no_prompt_waits_longer_than_the_limit() -> None:
    """One that has waited for less waits on."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        start(harness)
        prompts = harness.requests.long_prompts
        prompts.hold(are_held=True)
        early = harness.call("early", tokens=LONG)
        await harness.until_held(1)
        clock.now_seconds += 40
        late = harness.call("late", tokens=LONG)
        await harness.until_held(2)
        clock.now_seconds += 20
        await prompts.give_up_overdue(60)
        with answered(HostMemoryError):
            await early
        assert not late.done()
        late.cancel()

    run_scene(scene)


def test_a_prompt_stays_suspect_for_a_while_after_it_was_given_up() -> None:
    """Allocators keep what they took for it, so the host may run out of memory a moment later."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        llm, prompts = start(harness), harness.requests.long_prompts
        call = harness.call("a", tokens=LONG)
        await llm.until_received(1)
        await prompts.give_up_longest()
        with answered(HostMemoryError):
            await call
        assert prompts.suspect_tokens() == LONG
        clock.now_seconds += RECENT_SECONDS + 1
        assert prompts.suspect_tokens() == 0

    run_scene(scene)


def test_the_longest_prompt_of_those_that_were_given_up_stays_suspect() -> None:
    """The longest goes first, and a shorter one after it did not take the memory."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        llm, prompts = start(harness), harness.requests.long_prompts
        calls = [harness.call(name, tokens=LONG + more) for name, more in (("a", 9), ("b", 0))]
        await llm.until_received(2)
        await prompts.give_up_longest()
        clock.now_seconds += RECENT_SECONDS - 1
        await prompts.give_up_longest()
        for call in calls:
            with answered(HostMemoryError):
                await call
        assert prompts.suspect_tokens() == LONG + 9
        clock.now_seconds += 2
        assert prompts.suspect_tokens() == LONG

    run_scene(scene)


def test_a_stream_that_goes_on_is_no_suspect_size() -> None:
    """It is read again after each death, whatever took the memory, and its size was served."""

    async def scene(harness: ReplayHarness) -> None:
        llm, prompts = start(harness), harness.requests.long_prompts
        harness.call("a", tokens=LONG)
        await llm.until_received(1)
        [request] = harness.requests._requests
        request.has_yielded = True
        assert prompts.suspect_tokens() == 0
        await prompts.give_up_longest()
        assert prompts.suspect_tokens() == 0

    run_scene(scene)


def test_a_prompt_that_was_given_up_is_not_replayed() -> None:
    """Its engine dies before it could say that it has aborted it."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        llm = harness.llm
        harness.requests.long_prompts.engine_started(FACTS, lambda: tuple(llm.running))
        call = harness.call("a", tokens=LONG)
        await llm.until_received(1)
        await harness.requests.long_prompts.give_up_longest()
        harness.bury()
        second = harness.start()
        with answered(HostMemoryError):
            await call
        assert second.received == []

    run_scene(scene)


def test_no_prompt_waits_for_memory_while_there_is_no_engine() -> None:
    """What it took is free: the time of a recovery is not that of a shortage, nor is it counted."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        start(harness)
        prompts, held = harness.requests.long_prompts, list[str]()
        prompts.on_held = lambda: held.append("once")
        prompts.hold(are_held=True)
        first = harness.call("first", tokens=LONG)
        await harness.until_held(1)
        harness.bury()
        second = harness.call("second", tokens=LONG)
        await harness.until_held(2)
        clock.now_seconds += 1000
        await prompts.give_up_overdue(600)
        harness.start()
        assert [await call for call in (first, second)] == [DONE, DONE]
        assert held == ["once"]

    run_scene(scene)
