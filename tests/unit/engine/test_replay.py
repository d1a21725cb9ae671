"""Requests outlive their engine, in their old order, and no client sees one twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast.errors import NotReadyError, RequestLostError
from holdfast.request_context import REQUEST, RequestContext
from replay_harness import RAISED, TRIAL_SECONDS, ReplayHarness, answered, run_scene
from scripted_llm import Output, ScriptedLLM, UnsentError

ENDED = NotReadyError("The server has shut down.", retry_after_seconds=5)


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


def test_a_consumed_prompt_is_not_replayed() -> None:
    """It came as a stream that has been read."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        call = harness.call("a", is_consumed=True)
        await harness.llm.until_received(1)
        harness.bury()
        with answered(RequestLostError):
            await call
        assert harness.requests.lost["not_replayable"] == 1

    run_scene(scene)


def test_an_abort_that_nobody_asked_for_is_a_death() -> None:
    """A core that got SIGTERM gives everything up: told at once, and replayed."""

    async def scene(harness: ReplayHarness) -> None:
        told = asyncio.Event()
        harness.requests.on_unexpected_abort = told.set
        harness.start()
        call = harness.call("a", gives_up=True)
        await told.wait()
        await harness.until_held(1)
        harness.bury()
        call.cancel()

    run_scene(scene)


def test_an_abort_that_was_asked_for_is_an_answer() -> None:
    """It reaches the caller as it is."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        call = harness.call("a", gives_up=True)
        await harness.llm.until_received(1)
        harness.requests.expect_abort(frozenset({"a"}))
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
    """The engine has given what it owes; to wait for the client is no stall."""

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
    """Whoever paused it asked for that."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start()
        harness.requests.is_paused = True
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
