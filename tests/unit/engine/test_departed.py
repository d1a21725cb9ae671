"""What is remembered of requests whose clients left: enough to find one that ends the engine."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.engine.replay import ReplayManager
from holdfast.engine.requests.request import EngineRequest
from holdfast.engine.suspects import departed
from holdfast.engine.suspects.blame import BlameVerdict
from holdfast.engine.suspects.departed import KEPT, TRIABLE_SECONDS
from holdfast.errors import QuarantinedError, SuspectedError
from replay_harness import (
    RAISED,
    TRIAL_SECONDS,
    ReplayHarness,
    answered,
    named,
    run_scene,
)
from scripted_llm import PlainOutputs, ScriptedLLM
from stub_engine import FakeClock


def test_a_crowd_that_leaves_makes_no_death_the_servers_own() -> None:
    """Who did it is not known any more, but that a client did: it must not spend the budget."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        for number, prompt in enumerate(["bad", *["other"] * KEPT], start=1):
            call = harness.call(f"{prompt}#{number}")
            await harness.llm.until_received(number)
            call.cancel()
            await asyncio.wait({call})
        assert harness.bury(named("bad#1", cause="stall")) == BlameVerdict(has_suspects=True)

    run_scene(scene)


def test_a_crowd_that_leaves_hides_nothing_that_the_engine_hangs_in() -> None:
    """What is in the running step is kept, whichever requests come and go after it."""

    async def scene(harness: ReplayHarness) -> None:
        harness.requests.in_step = lambda: ("bad#1",)
        harness.start().hold()
        for number, prompt in enumerate(["bad", *["other"] * KEPT], start=1):
            call = harness.call(f"{prompt}#{number}")
            await harness.llm.until_received(number)
            call.cancel()
            await asyncio.wait({call})
        assert harness.bury(named("bad#1", cause="stall")).explained == 1

    run_scene(scene)


def test_what_hangs_can_be_tried_however_long_ago_its_client_left() -> None:
    """A hang is noticed minutes later; the prompt of another is dropped in the meantime."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        harness.requests.in_step = lambda: ("bad", "good")
        harness.start().hold()
        bad, good = harness.call("bad"), harness.call("good")
        other = harness.call("other")
        await harness.llm.until_received(3)
        for one in (bad, other):
            one.cancel()
            await asyncio.wait({one})
        clock.now_seconds += 2 * TRIABLE_SECONDS
        later = harness.call("later")
        await harness.llm.until_received(4)
        assert harness.bury(named("bad", "good", cause="stall")).has_suspects
        llm = harness.start(ScriptedLLM(poison="bad"), is_open=False)
        assert not await harness.requests.try_suspects(TRIAL_SECONDS)
        assert "bad" in llm.received
        assert "other" not in llm.received
        for one in (good, later):
            one.cancel()

    run_scene(scene)


def test_what_left_long_before_a_death_without_names_is_no_suspect_of_it() -> None:
    """The engine was done with it."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        harness.start().hold()
        innocent = harness.call("innocent")
        await harness.llm.until_received(1)
        innocent.cancel()
        await asyncio.wait({innocent})
        clock.now_seconds += TRIABLE_SECONDS + 1
        bad = harness.call("bad")
        await harness.llm.until_received(2)
        assert harness.bury(RAISED).explained == 1
        with answered(SuspectedError):
            await bad

    run_scene(scene)


def test_the_prompts_of_clients_that_left_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first are forgotten for the last, and their digests are not."""
    monkeypatch.setattr(departed, "TRIABLE_BYTES", 10)

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        for prompt in ("first-", "second", "third-"):
            call = harness.call(prompt)
            await harness.llm.until_received(1)
            harness.llm.received.clear()
            call.cancel()
            await asyncio.wait({call})
        harness.bury(named("first-"))
        harness.start().hold()
        call = harness.call("first-")
        await harness.llm.until_received(1)
        harness.bury(named("first-"))
        with answered(QuarantinedError):
            await call

    forgotten: list[str] = []
    forget = EngineRequest.forget_prompt

    def note(call: EngineRequest) -> None:
        forgotten.append(call.request_id)
        forget(call)

    monkeypatch.setattr(EngineRequest, "forget_prompt", note)
    run_scene(scene)
    assert forgotten == ["first-", "second"]
