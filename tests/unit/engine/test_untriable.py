"""A request that no engine can get again is blamed for what all other suspects are acquitted of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from holdfast.engine.suspects.blame import BlameVerdict
from holdfast.errors import QuarantinedError, RequestLostError, SuspectedError
from holdfast.lifecycle.death_handler import RestartBudget
from holdfast.records import Death
from holdfast.request_context import RequestContext
from replay_harness import KILLED, RAISED, ReplayHarness, answered, named, run_scene
from scripted_llm import Output, ScriptedLLM
from stub_engine import FakeClock

ONE_DEATH = BlameVerdict(1, is_charged=True, has_suspects=True)
NOTHING = BlameVerdict()


async def ended(
    harness: ReplayHarness,
    death: Death,
    untriable: Sequence[tuple[str, str]],
    triable: Sequence[tuple[str, str]],
) -> list[asyncio.Task[object]]:
    """Have an engine die of requests, given by name and key; return the calls of the triable."""
    harness.start().hold()
    lost = [
        harness.call(name, context=RequestContext(key=key), is_consumed=True)
        for name, key in untriable
    ]
    kept = [harness.call(name, context=RequestContext(key=key)) for name, key in triable]
    await harness.llm.until_received(len(lost) + len(kept))
    assert harness.bury(death) == BlameVerdict(has_suspects=True)
    await harness.until_held(len(kept))
    for call in lost:
        with answered(RequestLostError):
            await call
    return [*kept]


async def passed(harness: ReplayHarness, calls: Sequence[asyncio.Task[object]]) -> None:
    """Have the next engine try the suspects, and answer them."""
    assert await harness.try_suspects()
    harness.requests.open()
    await asyncio.gather(*calls)


def test_what_cannot_be_tried_is_charged_once_the_others_have_passed() -> None:
    """Time after time, until its key is suspended; its like is quarantined with the second."""

    async def scene(harness: ReplayHarness) -> None:
        for number in range(1, 4):
            assert not harness.requests.suspended_seconds("bad")
            others = [(f"good#{at}", key) for at, key in enumerate(("a", "a", "b"))]
            bad = "bad" if number < 3 else "worse"
            calls = await ended(harness, RAISED, [(f"{bad}#{number}", "bad")], others)
            await passed(harness, calls)
            assert harness.requests.verdict_of_trials() == ONE_DEATH
            assert harness.requests.verdict_of_trials() == NOTHING
            assert harness.suspicions.charged("bad") == number
        assert harness.requests.suspended_seconds("bad")
        assert not harness.requests.suspended_seconds("a")
        with answered(QuarantinedError):
            await harness.call("bad#4", context=RequestContext(key="b"))

    run_scene(scene)


class ShortLLM(ScriptedLLM):
    """Answers every request with one output."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    async def generate(self, prompt: str, **_options: Any) -> AsyncIterator[Output]:
        """The output, or an error if it is a failure without tokens."""
        self.received.append(prompt)
        if not self._output.tokens:
            raise ValueError("the request's own error")
        yield self._output


@pytest.mark.parametrize(
    "output",
    [Output(3, finished=True), Output(900, finished=True, is_failure=True), Output(0)],
    ids=["shorter", "failed", "raised"],
)
def test_a_trial_that_goes_another_way_leaves_a_doubt(output: Output) -> None:
    """An answer that is sampled again may end before the point at which it ended an engine."""

    async def scene(harness: ReplayHarness) -> None:
        death = named("lost", "bad", reached_tokens=900)
        calls = await ended(harness, death, [("lost", "lost")], [("bad", "bad")])
        assert await harness.try_suspects(ShortLLM(output))
        assert harness.requests.verdict_of_trials() == NOTHING
        assert not harness.suspicions.charged("lost")
        calls[0].cancel()

    run_scene(scene)


def test_nobody_is_blamed_without_a_trial_that_was_passed() -> None:
    """Where nothing can be tried, as behind a router that transfers KV caches, nothing is shown."""

    async def scene(harness: ReplayHarness) -> None:
        lost = [("p", "router"), ("q", "router")]
        await passed(harness, await ended(harness, RAISED, lost, []))
        assert harness.requests.verdict_of_trials() == NOTHING
        assert not harness.suspicions.charged("router")

    run_scene(scene)


def test_several_of_one_key_that_cannot_be_tried_cost_it_one_death() -> None:
    """One of them has done it, and it is not known which, so that none is known again."""

    async def scene(harness: ReplayHarness) -> None:
        for number in (1, 2):
            lost = [("p", "bad"), ("q", "bad")]
            await passed(harness, await ended(harness, RAISED, lost, [("good", "good")]))
            assert harness.suspicions.charged("bad") == number
        assert not harness.suspicions.has_quarantined

    run_scene(scene)


@pytest.mark.parametrize("keys", [("a", "b"), ("", "")])
def test_of_those_that_several_clients_sent_nobody_is_blamed(keys: tuple[str, str]) -> None:
    """One of them is innocent."""

    async def scene(harness: ReplayHarness) -> None:
        lost = [(f"lost#{key}", key) for key in keys]
        await passed(harness, await ended(harness, RAISED, lost, [("good", "good")]))
        assert harness.requests.verdict_of_trials() == NOTHING
        assert not any(map(harness.suspicions.charged, keys))
        assert not any(map(harness.suspicions.has_suspected, keys))

    run_scene(scene)


def test_what_cannot_be_tried_is_not_blamed_for_another() -> None:
    """One that could be tried did it."""

    async def scene(harness: ReplayHarness) -> None:
        suspects = [("bad", "bad"), ("good", "good")]
        calls = await ended(harness, RAISED, [("lost", "lost")], suspects)
        assert not await harness.try_suspects(ScriptedLLM(poison="bad"))
        assert harness.bury(RAISED).explained == 2
        assert await harness.try_suspects()
        assert harness.requests.verdict_of_trials() == NOTHING
        assert not harness.suspicions.charged("lost")
        with answered(QuarantinedError):
            await calls[0]
        calls[1].cancel()

    run_scene(scene)


def test_a_trial_that_fails_leaves_a_doubt() -> None:
    """Those on trial ended an engine, though only together: they may have ended the first one."""

    async def scene(harness: ReplayHarness) -> None:
        suspects = [("p", ""), ("q", ""), ("good", "good")]
        calls = await ended(harness, RAISED, [("lost", "lost")], suspects)
        assert not await harness.try_suspects(ScriptedLLM(poison="p q"))
        assert harness.bury(RAISED) == BlameVerdict(has_suspects=True)
        await passed(harness, calls)
        assert harness.requests.verdict_of_trials() == NOTHING
        assert not harness.suspicions.charged("lost")

    run_scene(scene)


def test_a_suspect_that_was_not_tried_leaves_a_doubt() -> None:
    """Its key was suspended meanwhile, say."""

    async def scene(harness: ReplayHarness) -> None:
        suspects = [("suspended", "suspended"), ("good", "good")]
        calls = await ended(harness, RAISED, [("lost", "lost")], suspects)
        harness.suspicions.charge("suspended", 3)
        assert await harness.try_suspects()
        assert not harness.suspicions.charged("lost")
        with answered(SuspectedError):
            await calls[0]
        calls[1].cancel()

    run_scene(scene)


def test_a_request_that_nobody_knows_leaves_a_doubt() -> None:
    """It was in the step, too."""

    async def scene(harness: ReplayHarness) -> None:
        death = named("lost", "good", "unknown")
        calls = await ended(harness, death, [("lost", "lost")], [("good", "good")])
        await passed(harness, calls)
        assert not harness.suspicions.charged("lost")

    run_scene(scene)


def test_an_engine_that_dies_under_the_probe_leaves_a_doubt() -> None:
    """It had no request of a client, so the first death may have been the machine's, too."""

    async def scene(harness: ReplayHarness) -> None:
        calls = await ended(harness, RAISED, [("lost", "lost")], [("good", "good")])
        harness.start(is_open=False)
        harness.bury(KILLED)
        await passed(harness, calls)
        assert not harness.suspicions.charged("lost")

    run_scene(scene)


def test_a_death_that_accuses_nobody_is_not_blamed_on_what_cannot_be_tried() -> None:
    """What passed the trial was there at two deaths; the other may have been the machine's."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        kept = harness.call("kept")
        await harness.llm.until_received(1)
        harness.bury(KILLED)
        await harness.until_held(1)
        harness.start().hold()
        lost = harness.call("lost", context=RequestContext(key="lost"), is_consumed=True)
        await harness.llm.until_received(2)
        harness.bury(KILLED)
        with answered(RequestLostError):
            await lost
        await passed(harness, [kept])
        assert not harness.suspicions.charged("lost")

    run_scene(scene)


def test_a_death_that_trials_explain_is_given_back() -> None:
    """Its key waits for it, and nobody else."""
    budget = RestartBudget(2, 100, FakeClock())
    for _ in range(6):
        budget.count(RAISED, BlameVerdict(has_suspects=True))
        assert budget.wait_seconds(RAISED) == 0
        budget.explain(ONE_DEATH)
