"""Suspects run alone in the next engine: in order, for a time, and at the cost of two engines."""

from __future__ import annotations

import asyncio

from holdfast.engine.replay import ReplayManager
from holdfast.engine.suspects.blame import BlameVerdict
from holdfast.engine.suspects.trial_runner import STEP_LOOK_SECONDS
from holdfast.errors import QuarantinedError, SuspectedError
from holdfast.records import Death
from holdfast.request_context import RequestContext
from replay_harness import (
    KILLED,
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
            assert not await harness.try_suspects(ScriptedLLM(poison="k1 k2 k3 k4"))
            harness.bury(RAISED)
        assert await harness.try_suspects()
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
            assert not await harness.try_suspects(ScriptedLLM(poison=" ".join(killers)))
            explained += harness.bury(RAISED).explained
        assert explained == 3
        assert await harness.try_suspects()
        harness.requests.open()
        await asyncio.gather(*good)
        outcomes = await asyncio.gather(*bad, return_exceptions=True)
        kinds = sorted(type(outcome.error).__name__ for outcome in outcomes)  # type: ignore[union-attr]
        assert kinds == ["QuarantinedError"] + ["SuspectedError"] * 3

    run_scene(scene)


def test_trials_take_the_time_of_two_starts_at_most() -> None:
    """Over all engines that they need, where steps take longer than they may."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        (first, second), _ = await killed(harness, RAISED, ["a", "b"])
        harness.start(is_open=False).hold()
        trials = asyncio.create_task(harness.requests.try_suspects(TRIAL_SECONDS))
        await harness.llm.until_received(1)
        clock.now_seconds += 2 * TRIAL_SECONDS + 1
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
        assert await harness.try_suspects()
        harness.requests.open()
        await asyncio.gather(*good)
        with answered(QuarantinedError):
            await bad

    run_scene(scene)


def test_a_trial_that_decides_nothing_comes_after_the_others() -> None:
    """What dies twice without a word would otherwise have all others refused untried."""

    async def scene(harness: ReplayHarness) -> None:
        (silent, *good), _ = await killed(harness, RAISED, ["silent", "good", "good#2"])
        for cause in ("host_memory", "core_exit"):
            llm = harness.start(ScriptedLLM(poison="silent"), is_open=False)
            assert not await harness.requests.try_suspects(TRIAL_SECONDS)
            harness.bury(Death(cause, "EngineCore was killed by SIGKILL"))
        assert llm.received == ["good", "good#2", "silent"]
        assert await harness.try_suspects()
        harness.requests.open()
        await asyncio.gather(*good)
        with answered(SuspectedError):
            await silent

    run_scene(scene)


def test_a_trial_that_an_operator_ends_stays_the_first() -> None:
    """The order has its reasons, and a SIGTERM has not come from a request."""

    async def scene(harness: ReplayHarness) -> None:
        requests, _ = await killed(harness, RAISED, ["a", "b"])
        harness.start().hold()
        trials = asyncio.create_task(harness.requests.try_suspects(TRIAL_SECONDS))
        await harness.llm.until_received(1)
        harness.bury(Death("terminated", "EngineCore received SIGTERM"))
        assert not await trials
        llm = harness.start(is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        assert llm.received == ["a", "b"]
        harness.requests.open()
        await asyncio.gather(*requests)

    run_scene(scene)


def test_nobody_is_convicted_for_the_step_of_the_one_that_was_tried_before() -> None:
    """That one has passed, but the engine was already at its next token."""

    async def scene(harness: ReplayHarness) -> None:
        requests, _ = await killed(harness, RAISED, ["bad", "good"])
        assert not await harness.try_suspects(ScriptedLLM(poison="good"))
        assert harness.bury(named("bad")) == BlameVerdict(has_suspects=True)
        llm = harness.start(ScriptedLLM(answers=2), is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        assert llm.received == ["good", "bad"]
        harness.requests.open()
        await asyncio.gather(*requests)

    run_scene(scene)


def test_the_next_trial_waits_for_the_last_step_of_the_one_before() -> None:
    """So a request that kills one step later than it did is still convicted, and no other."""

    async def scene(harness: ReplayHarness) -> None:
        (bad, good), _ = await killed(harness, RAISED, ["bad", "good"])
        harness.start(is_open=False)
        harness.requests.in_step = lambda: ["bad"]
        trials = asyncio.create_task(harness.requests.try_suspects(TRIAL_SECONDS))
        await harness.llm.until_received(1)
        done, _ = await asyncio.wait({trials}, timeout=10 * STEP_LOOK_SECONDS)
        assert not done
        assert harness.llm.received == ["bad"]
        assert harness.bury(named("bad")).explained == 2
        trials.cancel()
        with answered(QuarantinedError):
            await bad
        harness.requests.forget_engine()
        assert await harness.try_suspects()
        harness.requests.open()
        await good

    run_scene(scene)


def test_requests_of_one_key_that_end_engines_only_together_are_refused() -> None:
    """Each passes its trial alone; after the next death they are tried as they came."""

    async def scene(harness: ReplayHarness) -> None:
        calls, _ = await killed(harness, RAISED, ["p", "q"], key="bad")
        assert await harness.try_suspects()
        harness.llm.hold()
        harness.requests.open()
        await harness.llm.until_received(4)
        harness.bury(RAISED)
        await harness.until_held(2)
        harness.start(is_open=False).hold()
        trials = asyncio.create_task(harness.requests.try_suspects(TRIAL_SECONDS))
        await harness.llm.until_received(2)
        assert harness.bury(RAISED) == BlameVerdict(2, is_charged=True, has_suspects=True)
        assert not await trials
        for call in calls:
            with answered(SuspectedError):
                await call

    run_scene(scene)


def test_it_takes_two_kills_in_their_trial_to_refuse_those_that_are_harmless_alone() -> None:
    """One may be a neighbour's: each of them has passed a trial before."""

    async def scene(harness: ReplayHarness) -> None:
        names = ["p", "q"]
        calls, _ = await killed(harness, RAISED, names)
        assert await harness.try_suspects()
        harness.llm.hold()
        harness.requests.open()
        await harness.llm.until_received(4)
        harness.bury(KILLED)
        await harness.until_held(2)
        harness.start().hold()
        await harness.llm.until_received(2)
        harness.bury(KILLED)
        await harness.until_held(2)
        verdicts = []
        for _ in range(2):
            harness.start(is_open=False).hold()
            trials = asyncio.create_task(harness.requests.try_suspects(TRIAL_SECONDS))
            await harness.llm.until_received(2)
            verdicts.append(harness.bury(KILLED))
            assert not await trials
        assert [verdict.explained for verdict in verdicts] == [0, 4]
        for call in calls:
            with answered(SuspectedError):
                await call

    run_scene(scene)


def test_a_fresh_request_does_not_save_those_that_end_engines_only_together() -> None:
    """It is tried alone, and they together: each of them was alone already."""

    async def scene(harness: ReplayHarness) -> None:
        calls, _ = await killed(harness, RAISED, ["p", "q"])
        assert await harness.try_suspects()
        fresh = harness.call("fresh")
        harness.llm.hold()
        harness.requests.open()
        await harness.llm.until_received(5)
        harness.bury(RAISED)
        await harness.until_held(3)
        harness.start(is_open=False).hold()
        trials = asyncio.create_task(harness.requests.try_suspects(TRIAL_SECONDS))
        await harness.llm.until_received(2)
        assert harness.llm.received == ["p", "q"]
        assert harness.bury(RAISED) == BlameVerdict(2, has_suspects=True)
        assert not await trials
        for call in calls:
            with answered(SuspectedError):
                await call
        assert await harness.try_suspects()
        assert harness.llm.received == ["fresh"]
        harness.requests.open()
        await fresh

    run_scene(scene)


def test_streams_that_have_got_further_are_tried_alone_once_more() -> None:
    """Their first trials have not shown what they do there; one of them may end engines alone."""

    async def scene(harness: ReplayHarness) -> None:
        names = ["a", "b"]
        calls, _ = await killed(harness, named(*names), names)
        assert await harness.try_suspects()
        harness.llm.hold()
        harness.requests.open()
        await harness.llm.until_received(4)
        harness.bury(named(*names, reached_tokens=50))
        await harness.until_held(2)
        assert not await harness.try_suspects(ScriptedLLM(poison="b"))
        assert harness.llm.received == names
        harness.bury(RAISED)
        with answered(QuarantinedError):
            await calls[1]
        harness.start()
        await calls[0]

    run_scene(scene)


def test_two_that_die_without_a_word_cost_their_key_one_death() -> None:
    """As one would; a neighbour's kill in their trial is not worth more."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        for name, key in (("s1", "bad"), ("s2", "bad"), ("good", "good")):
            harness.call(name, context=RequestContext(key=key))
        await harness.llm.until_received(3)
        harness.bury(RAISED)
        await harness.until_held(3)
        verdicts = []
        for _ in range(2):
            assert not await harness.try_suspects(ScriptedLLM(poison="s1 s2"))
            verdicts.append(harness.bury(KILLED))
        undecided, decided = verdicts
        assert undecided == BlameVerdict(has_suspects=True)
        assert decided == BlameVerdict(3, is_charged=True, has_suspects=True)
        assert harness.suspicions.charged("bad") == 1

    run_scene(scene)


def test_a_workspace_that_is_refused_in_a_trial_is_reserved_first() -> None:
    """The next engine has it, so nobody is to blame for the first refusal."""
    refused = Death("workspace_rejection", "Workspace is locked", blames_requests=True)

    async def scene(harness: ReplayHarness) -> None:
        requests, _ = await killed(harness, RAISED, ["large", "small"])
        assert not await harness.try_suspects(ScriptedLLM(poison="large"))
        harness.bury(refused)
        llm = harness.start(is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        assert llm.received == ["small", "large"]
        harness.requests.open()
        await asyncio.gather(*requests)

    run_scene(scene)


def test_a_suspect_of_a_suspended_key_is_refused_untried() -> None:
    """It is acquitted of nothing, and not told to come again."""

    async def scene(harness: ReplayHarness) -> None:
        (bad,), _ = await killed(harness, named("other", "bad"), ["bad"], key="bad")
        harness.suspicions.charge("bad", 3)
        assert await harness.try_suspects()
        assert not harness.llm.received
        with answered(SuspectedError):
            await bad

    run_scene(scene)


def test_a_request_on_trial_is_known_by_its_id() -> None:
    """So that nobody aborts it, as vLLM does for a client of a transcription that leaves."""

    async def scene(harness: ReplayHarness) -> None:
        requests, _ = await killed(harness, RAISED, ["a", "b"])
        harness.start(is_open=False).hold()
        trials = asyncio.create_task(harness.requests.try_suspects(TRIAL_SECONDS))
        await harness.llm.until_received(1)
        assert [*map(harness.requests.is_suspect, ("a", "b"))] == [True, True]
        harness.llm.release()
        assert await trials
        assert not harness.requests.is_suspect("b")
        harness.requests.open()
        await asyncio.gather(*requests)

    run_scene(scene)


def test_suspects_are_still_tried_if_the_engine_dies_before_their_trial() -> None:
    """Under the probe, say, which every engine meets first."""

    async def scene(harness: ReplayHarness) -> None:
        requests, _ = await killed(harness, RAISED, ["a", "b"])
        harness.start(is_open=False)
        assert harness.bury(KILLED) == BlameVerdict()
        llm = harness.start(is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        assert llm.received == ["a", "b"]
        harness.requests.open()
        await asyncio.gather(*requests)

    run_scene(scene)


def test_requests_that_end_engines_only_together_are_charged_to_their_key() -> None:
    """Each passes its trial alone, and they would come together again, as often as they like."""

    async def scene(harness: ReplayHarness) -> None:
        for _ in range(2):
            harness.start().hold()
            bad = [harness.call(f"bad#{n}", context=RequestContext(key="bad")) for n in range(2)]
            good = harness.call("good", context=RequestContext(key="good"))
            await harness.llm.until_received(3)
            harness.bury(RAISED)
            await harness.until_held(3)
            harness.start(is_open=False).hold()
            trials = asyncio.create_task(harness.requests.try_suspects(TRIAL_SECONDS))
            await harness.llm.until_received(1)
            harness.llm.release()
            await harness.llm.until_received(3)
            harness.llm.hold()
            assert harness.bury(RAISED) == BlameVerdict(2, is_charged=True, has_suspects=True)
            assert not await trials
            assert await harness.try_suspects()
            harness.requests.open()
            await asyncio.gather(good, *bad, return_exceptions=True)
            assert not good.exception()
        assert harness.requests.suspended_seconds("bad") > 0
        assert harness.requests.suspended_seconds("good") == 0

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
