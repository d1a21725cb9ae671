"""A suspect on trial runs until it is past the point of the death, overdue, or its engine ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from holdfast.engine.replay import ReplayManager
from holdfast.engine.suspects import trials
from holdfast.engine.suspects.blame import BlameVerdict
from holdfast.errors import HostMemoryError, NotReadyError, QuarantinedError, SuspectedError
from holdfast.records import Death, Suspect
from holdfast.request_context import RequestContext
from replay_harness import (
    RAISED,
    TRIAL_SECONDS,
    ReplayHarness,
    answered,
    killed,
    named,
    run_scene,
)
from scripted_llm import AnsweredError, Output, PlainOutputs, ScriptedLLM
from stub_engine import FACTS, FakeClock

TERMINATED = Death("terminated", "EngineCore received SIGTERM")
ENDED = NotReadyError("The server has shut down.", retry_after_seconds=5)


class SlowTokenLLM(ScriptedLLM):
    """Takes some time for each token of those whose names begin so, which have long answers."""

    def __init__(self, clock: FakeClock, token_seconds: float, slow: str = "") -> None:
        super().__init__()
        self._clock = clock
        self._token_seconds = token_seconds
        self._slow = slow

    async def generate(self, prompt: str, **options: Any) -> AsyncIterator[Output]:
        """A token, and another, and the time passes."""
        is_slow = prompt.startswith(self._slow)
        self.answers = 1000 if is_slow else 5
        async for output in super().generate(prompt, **options):
            self._clock.now_seconds += self._token_seconds if is_slow else 0.0
            yield output


class SlowStepLLM(ScriptedLLM):
    """Takes some time, in one step, for each prompt whose name begins so."""

    def __init__(self, clock: FakeClock, step_seconds: float, slow: str = "") -> None:
        super().__init__(answers=1000)
        self._clock = clock
        self._step_seconds = step_seconds
        self._slow = slow

    async def generate(self, prompt: str, **options: Any) -> AsyncIterator[Output]:
        """The time passes before the first token."""
        if prompt.startswith(self._slow):
            self._clock.now_seconds += self._step_seconds
        async for output in super().generate(prompt, **options):
            yield output


class SilentLLM(ScriptedLLM):
    """Makes no token for one request, as while it computes a very long prompt."""

    def __init__(self, silent: str) -> None:
        super().__init__()
        self._silent = silent

    async def generate(self, prompt: str, **options: Any) -> AsyncIterator[Output]:
        """The one waits until it is aborted."""
        if prompt == self._silent:
            self.hold()
        try:
            async for output in super().generate(prompt, **options):
                yield output
        finally:
            self.release()


def test_a_suspect_is_acquitted_once_it_is_past_the_point() -> None:
    """It is not run to its end in the trial, however long its answer is."""

    async def scene(harness: ReplayHarness) -> None:
        death = named("a", "b", cause="stall", reached_tokens=3)
        requests, _ = await killed(harness, death, ["a", "b"])
        harness.start(ScriptedLLM(answers=1000), is_open=False)
        await harness.requests.try_suspects(TRIAL_SECONDS)
        assert not harness.llm.running
        harness.requests.fail(ENDED, "drained")
        await asyncio.wait(requests)

    run_scene(scene)


def test_a_trial_is_stopped_when_its_time_is_over() -> None:
    """With its next token: nobody waits for a suspect that had come far before the death."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        began_seconds = clock.now_seconds
        death = named("long", "late", reached_tokens=900)
        suspects, _ = await killed(harness, death, ["long", "late"])
        llm = harness.start(SlowTokenLLM(clock, TRIAL_SECONDS / 5), is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        assert llm.received[:3] == ["long", "late", "long"]
        assert not llm.running
        assert clock.now_seconds - began_seconds < (trials.MOST_OVERTIME + 1) * TRIAL_SECONDS
        for suspect in suspects:
            with answered(SuspectedError):
                await suspect

    run_scene(scene)


def test_a_slow_suspect_leaves_the_others_their_share() -> None:
    """It is tried again after them, in the time that is left."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        suspects = (Suspect("long", 900, is_prefill=False), Suspect("short", 0, is_prefill=False))
        (slow, short), _ = await killed(
            harness, replace(RAISED, suspects=suspects), ["long", "short"]
        )
        llm = harness.start(SlowTokenLLM(clock, TRIAL_SECONDS / 5), is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        assert llm.received == ["long", "short", "long"]
        with answered(SuspectedError):
            await slow
        assert not short.done()
        short.cancel()

    run_scene(scene)


def test_a_suspect_that_makes_no_token_leaves_the_others_their_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its trial ends with its time, and nobody waits for its first token."""
    monkeypatch.setattr(trials, "LEAST_TRIAL_SECONDS", 6.0)
    monkeypatch.setattr(trials, "LEAST_SHARE_SECONDS", 0.0)

    async def scene(harness: ReplayHarness) -> None:
        (silent, good), _ = await killed(harness, RAISED, ["silent", "good"])
        harness.requests.in_step = lambda: tuple(harness.llm.running)
        llm = harness.start(SilentLLM("silent"), is_open=False)
        assert await harness.requests.try_suspects(6.0)
        assert llm.received[:3] == ["silent", "good", "silent"]
        assert not llm.running
        with answered(SuspectedError):
            await silent
        harness.requests.open()
        await good

    run_scene(scene)


def test_a_suspect_that_no_step_runs_is_left_to_the_rule_of_stalls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its engine may hang before the step, and the next trial would be blamed for nothing."""
    monkeypatch.setattr(trials, "LEAST_TRIAL_SECONDS", 0.2)

    async def scene(harness: ReplayHarness) -> None:
        (silent, good), _ = await killed(harness, RAISED, ["silent", "good"])
        llm = harness.start(SilentLLM("silent"), is_open=False)
        trying = asyncio.create_task(harness.requests.try_suspects(0.2))
        await asyncio.sleep(0.5)
        assert llm.running == ["silent"]
        assert harness.bury(named(cause="stall")).explained == 2
        assert not await trying
        with answered(QuarantinedError):
            await silent
        harness.start()
        await good

    run_scene(scene)


@pytest.mark.parametrize("has_keys", [True, False])
def test_many_suspects_pass_though_an_equal_share_is_shorter_than_a_step(*, has_keys: bool) -> None:
    """Each gets the time of a step at least, until there is none left, and trials end then."""
    clock = FakeClock()
    allowed_seconds, count = trials.LEAST_TRIAL_SECONDS, 20
    step_seconds = allowed_seconds / 10

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        harness.start().hold()
        contexts = [RequestContext(key=f"key#{at}" if has_keys else "") for at in range(count)]
        calls = [harness.call(f"good#{at}", context=one) for at, one in enumerate(contexts)]
        await harness.llm.until_received(count)
        harness.bury(RAISED)
        await harness.until_held(count)
        llm = harness.start(SlowStepLLM(clock, step_seconds), is_open=False)
        began_seconds = clock.now_seconds
        assert await harness.requests.try_suspects(allowed_seconds)
        assert clock.now_seconds - began_seconds <= trials.MOST_OVERTIME * allowed_seconds
        tried = list(llm.received)
        harness.requests.open()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = sum(isinstance(answer, AnsweredError) for answer in answers)
        assert len(set(tried)) == len(tried) == count - refused
        assert len(tried) >= allowed_seconds / step_seconds

    run_scene(scene)


def test_several_slow_suspects_leave_the_others_their_time() -> None:
    """Though they are tried first: three of them would need all the time."""
    clock = FakeClock()
    names = [*(f"slow#{at}" for at in range(3)), *(f"good#{at}" for at in range(7))]

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        harness.start().hold()
        slow_and_good = [
            harness.call(name, context=RequestContext(key=name.partition("#")[0])) for name in names
        ]
        await harness.llm.until_received(len(names))
        suspects = tuple(
            Suspect(name, 900 if name.startswith("slow") else 0, is_prefill=False) for name in names
        )
        harness.bury(replace(RAISED, suspects=suspects))
        await harness.until_held(len(names))
        harness.start(SlowTokenLLM(clock, trials.LEAST_TRIAL_SECONDS / 10, "slow"), is_open=False)
        assert await harness.requests.try_suspects(trials.LEAST_TRIAL_SECONDS)
        harness.requests.open()
        answers = await asyncio.gather(*slow_and_good, return_exceptions=True)
        served = [name for name, one in zip(names, answers, strict=True) if isinstance(one, list)]
        assert served == names[3:]

    run_scene(scene)


def test_the_time_that_a_key_overruns_is_taken_from_that_key() -> None:
    """A step cannot be cut short; the other keys' requests are tried all the same."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        harness.start().hold()
        names = ("slow", "good#1", "good#2")
        slow, *good = (harness.call(name, context=RequestContext(key=name)) for name in names)
        await harness.llm.until_received(3)
        reached_tokens = (900, 0, 0)
        suspects = tuple(
            Suspect(name, tokens, is_prefill=False)
            for name, tokens in zip(names, reached_tokens, strict=True)
        )
        harness.bury(replace(RAISED, suspects=suspects))
        await harness.until_held(3)
        llm = harness.start(SlowStepLLM(clock, 2 * TRIAL_SECONDS, "slow"), is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        assert llm.received == [*names]
        with answered(SuspectedError):
            await slow
        harness.requests.open()
        for call in good:
            await call

    run_scene(scene)


def test_an_engine_that_gives_its_requests_up_acquits_nobody() -> None:
    """It got SIGTERM and ends: the suspect is tried again in the next one."""

    async def scene(harness: ReplayHarness) -> None:
        told = asyncio.Event()
        harness.requests.aborts.on_unexpected = told.set
        harness.start().hold()
        calls = [harness.call(name, gives_up=True) for name in ("a", "b")]
        await harness.llm.until_received(2)
        harness.bury(RAISED)
        await harness.until_held(2)
        assert not await harness.try_suspects()
        assert told.is_set()
        assert harness.bury(TERMINATED) == BlameVerdict()
        llm = harness.start(ScriptedLLM(poison="a"), is_open=False)
        assert not await harness.requests.try_suspects(TRIAL_SECONDS)
        assert llm.received == ["a"]
        for call in calls:
            call.cancel()

    run_scene(scene)


def test_a_suspect_that_is_given_up_for_lack_of_memory_is_not_acquitted() -> None:
    """Its client may not send it again: it was not shown that no engine dies of it."""

    async def scene(harness: ReplayHarness) -> None:
        contexts = [RequestContext(), RequestContext()]
        long_prompts = harness.requests.long_prompts
        harness.start().hold()
        calls = [
            harness.call(name, context=context, gives_up=name == "a", tokens=1000)
            for name, context in zip("ab", contexts, strict=True)
        ]
        await harness.llm.until_received(2)
        harness.bury(RAISED)
        await harness.until_held(2)
        llm = harness.start(is_open=False)
        llm.hold()
        long_prompts.engine_started(FACTS, lambda: tuple(llm.running))
        trials = asyncio.create_task(harness.requests.try_suspects(TRIAL_SECONDS))
        await llm.until_received(1)
        await long_prompts.give_up_longest()
        llm.release()
        assert await trials
        assert llm.received == ["a", "b"]
        harness.requests.open()
        with answered(HostMemoryError):
            await calls[0]
        assert not contexts[0].may_be_retried
        await calls[1]

    run_scene(scene)
