"""Suspects run alone in the next engine: in order, for a time, and at the cost of two engines."""

from __future__ import annotations

import asyncio

from holdfast.engine.blame import BlameVerdict
from holdfast.engine.replay import ReplayManager
from holdfast.errors import QuarantinedError, SuspectedError
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
from scripted_llm import PlainOutputs, ScriptedLLM
from stub_engine import FakeClock


def test_suspects_are_tried_one_at_a_time() -> None:
    """In an engine that nobody else uses, and nobody but the suspects."""

    async def scene(harness: ReplayHarness) -> None:
        requests, verdict = await killed(harness, named("a", "b", "c"), ["a", "b", "c", "d"])
        assert verdict == BlameVerdict(has_suspects=True)
        llm = harness.start(ScriptedLLM(answers=3), is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        assert llm.received == ["a", "b", "c"]
        assert llm.most_running == 1
        harness.requests.open()
        await asyncio.gather(*requests)

    run_scene(scene)


def test_those_least_likely_to_have_done_it_are_tried_first() -> None:
    """A key with few requests among the suspects, and with few deaths, before the others."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        for name, key in (("x", "many"), ("y", "many"), ("z", "few")):
            harness.call(name, context=RequestContext(key=key))
        await harness.llm.until_received(3)
        harness.bury(RAISED)
        await harness.until_held(3)
        llm = harness.start(is_open=False)
        await harness.requests.try_suspects(TRIAL_SECONDS)
        assert llm.received[0] == "z"

    run_scene(scene)


def test_trials_end_two_engines_at_most() -> None:
    """What is left then is refused untried, and everybody else goes on."""

    async def scene(harness: ReplayHarness) -> None:
        names = ["k1", "k2", "k3", "k4"]
        requests, _ = await killed(harness, named(*names), ["good", *names])
        for _ in range(2):
            harness.start(ScriptedLLM(poison="k1 k2 k3 k4"), is_open=False)
            assert not await harness.requests.try_suspects(TRIAL_SECONDS)
            harness.bury(RAISED)
        harness.start(is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        assert not harness.llm.received
        harness.requests.open()
        await requests[0]
        outcomes = await asyncio.gather(*requests[1:], return_exceptions=True)
        kinds = sorted(type(outcome.error).__name__ for outcome in outcomes)  # type: ignore[union-attr]
        assert kinds == ["QuarantinedError"] * 2 + ["SuspectedError"] * 2

    run_scene(scene)


def test_a_key_with_many_killers_takes_no_request_of_another_with_it() -> None:
    """A key's are tried together first, and one by one only where the engine dies of them."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        killers = ["k1", "k2", "k3", "k4"]
        bad = [harness.call(name, context=RequestContext(key="bad")) for name in killers]
        good = [harness.call(f"good{at}", context=RequestContext(key="good")) for at in range(8)]
        await harness.llm.until_received(12)
        harness.bury(RAISED)
        await harness.until_held(12)
        explained = 0
        for _ in range(2):
            harness.start(ScriptedLLM(poison=" ".join(killers)), is_open=False)
            assert not await harness.requests.try_suspects(TRIAL_SECONDS)
            explained += harness.bury(RAISED).explained
        assert explained == 3
        harness.start(is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        harness.requests.open()
        await asyncio.gather(*good)
        outcomes = await asyncio.gather(*bad, return_exceptions=True)
        kinds = sorted(type(outcome.error).__name__ for outcome in outcomes)  # type: ignore[union-attr]
        assert kinds == ["QuarantinedError"] + ["SuspectedError"] * 3

    run_scene(scene)


def test_trials_take_the_time_of_one_start_at_most() -> None:
    """Over all engines that they need."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        (first, second), _ = await killed(harness, RAISED, ["a", "b"])
        harness.start(is_open=False).hold()
        trials = asyncio.create_task(harness.requests.try_suspects(TRIAL_SECONDS))
        await harness.llm.until_received(1)
        clock.now_seconds += TRIAL_SECONDS
        harness.llm.release()
        assert await trials
        with answered(SuspectedError):
            await second
        harness.requests.open()
        await first

    run_scene(scene)


def test_a_request_that_hangs_leaves_the_others_their_time() -> None:
    """It takes longer than all trials may to notice that, but it costs an engine."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        harness.start().hold()
        bad = harness.call("bad", context=RequestContext(key="bad"))
        good = [harness.call(f"good{at}", context=RequestContext(key="good")) for at in range(2)]
        await harness.llm.until_received(3)
        harness.bury(RAISED)
        await harness.until_held(3)
        harness.start(ScriptedLLM(poison="bad"), is_open=False).hold()
        trials = asyncio.create_task(harness.requests.try_suspects(TRIAL_SECONDS))
        await harness.llm.until_received(1)
        clock.now_seconds += 2 * TRIAL_SECONDS
        harness.llm.release()
        assert not await trials
        harness.bury(RAISED)
        harness.start(is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        harness.requests.open()
        await asyncio.gather(*good)
        with answered(QuarantinedError):
            await bad

    run_scene(scene)


def test_leaving_during_a_trial_acquits_nobody() -> None:
    """The trial goes on without its client, and its like is refused."""

    async def scene(harness: ReplayHarness) -> None:
        (bad, good), _ = await killed(harness, RAISED, ["bad", "good"])
        harness.start(ScriptedLLM(poison="bad"), is_open=False).hold()
        trials = asyncio.create_task(harness.requests.try_suspects(TRIAL_SECONDS))
        await harness.llm.until_received(1)
        bad.cancel()
        await asyncio.wait({bad})
        harness.llm.release()
        assert not await trials
        harness.bury(RAISED)
        with answered(QuarantinedError):
            await harness.call("bad#2")
        good.cancel()

    run_scene(scene)
