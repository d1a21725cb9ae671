"""Calls outlive their engine: in their old order, and never twice visible."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from call_bench import RAISED, TRIAL_SECONDS, Bench, lifted, on_the_bench
from callers import Output, ScriptedLLM, UnsentError
from holdfast.errors import NotReadyError, RequestLostError
from holdfast.request_context import REQUEST, RequestContext

ENDED = NotReadyError("The server has shut down.", retry_after_seconds=5)


def test_calls_go_to_the_next_generation_in_their_old_order() -> None:
    """Those that the dead engine had, and those that came when there was none."""

    async def scene(bench: Bench) -> None:
        bench.start().hold()
        waiting = [bench.call("a"), bench.call("b")]
        await bench.llm.until_received(2)
        bench.bury()
        waiting += [bench.call("c"), bench.call("d")]
        await bench.until_held(4)
        second = bench.start()
        assert [await call for call in waiting] == [[Output(1, finished=True)]] * 4
        assert second.received == ["a", "b", "c", "d"]
        assert bench.calls.replayed == 2

    on_the_bench(scene)


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

    async def scene(bench: Bench) -> None:
        bench.start(WaitingLLM())
        waiting = [bench.call("a"), bench.call("b")]
        await bench.llm.until_received(2)
        bench.llm.die()
        bench.calls.ended()
        await bench.until_held(2)
        bench.calls.accuse(RAISED)
        second = bench.start(is_open=False)
        assert await bench.calls.try_suspects(TRIAL_SECONDS)
        assert second.received == []
        bench.calls.opened()
        await asyncio.gather(*waiting)

    on_the_bench(scene)


def test_nobody_but_the_probe_gets_in_before_the_engine_is_proven() -> None:
    """`started` lets the probe's calls run, `opened` all others."""

    async def scene(bench: Bench) -> None:
        early = bench.call("early")
        bench.start(is_open=False)
        await bench.call("probe", context=RequestContext(is_probe=True))
        assert bench.llm.received == ["probe"]
        bench.calls.opened()
        await early
        assert bench.llm.received == ["probe", "early"]

    on_the_bench(scene)


def test_the_probe_is_never_sent_again() -> None:
    """Its failure is what it is there to find."""

    async def scene(bench: Bench) -> None:
        bench.start().hold()
        probe = bench.call("probe", context=RequestContext(is_probe=True))
        await bench.llm.until_received(1)
        bench.bury(RAISED)
        with lifted(RequestLostError):
            await probe
        assert set(bench.calls.lost.values()) == {0}

    on_the_bench(scene)


def test_a_call_that_has_yielded_is_lost() -> None:
    """Its caller has shown the beginning; the request is marked as broken and counted."""

    async def scene(bench: Bench) -> None:
        bench.start(ScriptedLLM(answers=2))
        context = RequestContext()
        REQUEST.set(context)
        outputs = bench.calls.run("generate", {"prompt": "a", "request_id": "a"})
        assert await anext(outputs) == Output(1)
        bench.bury()
        with lifted(RequestLostError):
            await anext(outputs)
        assert context.is_broken
        assert context.may_be_retried is False
        assert bench.calls.lost["stream_broken"] == 1

    on_the_bench(scene)


def test_a_consumed_prompt_is_not_replayed() -> None:
    """It came as a stream that has been read."""

    async def scene(bench: Bench) -> None:
        bench.start().hold()
        call = bench.call("a", is_consumed=True)
        await bench.llm.until_received(1)
        bench.bury()
        with lifted(RequestLostError):
            await call
        assert bench.calls.lost["not_replayable"] == 1

    on_the_bench(scene)


def test_an_abort_that_nobody_asked_for_is_a_death() -> None:
    """A core that got SIGTERM gives everything up: told at once, and replayed."""

    async def scene(bench: Bench) -> None:
        told = asyncio.Event()
        bench.calls.gave_up = told.set
        bench.start()
        call = bench.call("a", gives_up=True)
        await told.wait()
        await bench.until_held(1)
        bench.bury()
        call.cancel()

    on_the_bench(scene)


def test_an_abort_that_was_asked_for_is_an_answer() -> None:
    """It reaches the caller as it is."""

    async def scene(bench: Bench) -> None:
        bench.start().hold()
        call = bench.call("a", gives_up=True)
        await bench.llm.until_received(1)
        bench.calls.expect_abort(frozenset({"a"}))
        bench.llm.release()
        assert [output.is_abort for output in await call] == [True]

    on_the_bench(scene)


def test_a_client_that_leaves_while_held_is_dropped() -> None:
    """It is not sent to the next generation."""

    async def scene(bench: Bench) -> None:
        gone, stays = bench.call("gone"), bench.call("stays")
        await bench.until_held(2)
        gone.cancel()
        await asyncio.wait({gone})
        bench.start()
        await stays
        assert bench.llm.received == ["stays"]

    on_the_bench(scene)


def test_no_engine_will_come() -> None:
    """Who waits and who comes later gets the error, which says that it may be sent elsewhere."""

    async def scene(bench: Bench) -> None:
        context = RequestContext()
        waiting = bench.call("a", context=context)
        await bench.until_held(1)
        bench.calls.fail(ENDED, "engine_lost")
        with lifted(NotReadyError):
            await waiting
        with lifted(NotReadyError):
            await bench.call("b")
        assert context.may_be_retried is True
        assert bench.calls.lost["engine_lost"] == 2

    on_the_bench(scene)


def test_the_engine_is_busy_from_its_first_call_to_its_last() -> None:
    """What the stall rule counts from."""

    async def scene(bench: Bench) -> None:
        bench.start().hold()
        busy = [_business(bench)]
        calls = [bench.call("a"), bench.call("b")]
        await bench.llm.until_received(2)
        busy.append(_business(bench))
        bench.llm.release()
        await asyncio.gather(*calls)
        busy.append(_business(bench))
        assert busy == [(0, False), (2, True), (0, False)]

    on_the_bench(scene)


def _business(bench: Bench) -> tuple[int, bool]:
    return bench.calls.in_engine, bench.calls.busy_since_seconds is not None


def test_a_client_that_reads_slowly_is_no_work_of_the_engine() -> None:
    """The engine has given what it owes; to wait for the client is no stall."""

    async def scene(bench: Bench) -> None:
        bench.start(ScriptedLLM(answers=2))
        outputs = bench.calls.run("generate", {"prompt": "a", "request_id": "a"})
        await anext(outputs)
        assert _business(bench) == (1, False)
        await anext(outputs)
        assert [output async for output in outputs] == []
        assert _business(bench) == (0, False)

    on_the_bench(scene)


def test_a_prompt_that_is_still_being_sent_is_no_work_of_the_engine() -> None:
    """Nobody speaks: the engine waits for the caller."""

    async def scene(bench: Bench) -> None:
        bench.start().hold()
        call = bench.call("a", is_streamed=True)
        await bench.llm.until_received(1)
        assert _business(bench) == (1, False)
        bench.llm.release()
        await call

    on_the_bench(scene)


def test_a_prompt_that_cannot_be_sent_again_is_work_like_any_other() -> None:
    """The engine has all of it, and hangs if nothing comes."""

    async def scene(bench: Bench) -> None:
        bench.start().hold()
        call = bench.call("a", is_consumed=True)
        await bench.llm.until_received(1)
        assert _business(bench) == (1, True)
        bench.llm.release()
        await call

    on_the_bench(scene)


def test_a_paused_engine_may_give_calls_up() -> None:
    """Whoever paused it asked for that."""

    async def scene(bench: Bench) -> None:
        bench.start()
        bench.calls.is_paused = True
        assert [output.is_abort for output in await bench.call("a", gives_up=True)] == [True]

    on_the_bench(scene)


@pytest.mark.parametrize("deadly_turn", [1, 2])
def test_a_tool_is_called_once_whenever_the_engine_dies(deadly_turn: int) -> None:
    """vLLM generates, calls a tool and generates again; only the generation is repeated."""
    tools_called: list[str] = []
    asked: list[int] = []

    async def ask_with_tools(bench: Bench) -> None:
        for turn in (1, 2):
            if turn == deadly_turn:
                bench.llm.hold()
            asked.append(turn)
            await bench.call(str(turn))
            if turn == 1:
                tools_called.append("weather")

    async def scene(bench: Bench) -> None:
        bench.start()
        asking = asyncio.create_task(ask_with_tools(bench))
        await bench.llm.until_received(deadly_turn)
        bench.bury()
        bench.start()
        await asking
        assert tools_called == ["weather"]
        assert asked == [1, 2]

    on_the_bench(scene)
