"""Each key has its turn in the engine, however much the others ask for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.engine.requests.sequence_queue import (
    STEPS_ALONE,
    Capacity,
    PresentCapacity,
    SequenceQueue,
)
from holdfast.records import EngineFacts
from holdfast.request_context import RequestContext
from stub_engine import FACTS

DEADLINE_SECONDS = 60.0


class Engine:
    """What sends sequences to an engine of few places, in turn."""

    def __init__(self, *, running: int = 4, keys: int = 2, step_tokens: float = math.inf) -> None:
        self.sequences = SequenceQueue(Capacity(running, running + 2, step_tokens), lambda: keys)
        self.sent: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._names = 0

    def ask(
        self,
        key: str,
        sequences: int = 1,
        context: RequestContext | None = None,
        *,
        prompt_tokens: int = 0,
    ) -> list[str]:
        """Send a request of this many sequences, and return their names."""
        context = context or RequestContext(key=key)
        names = []
        for _ in range(sequences):
            self._names += 1
            names.append(f"{key}{self._names}")
            self.sequences.register(names[-1], context, prompt_tokens)
        self.tasks += [asyncio.create_task(self._send(name)) for name in names]
        return names

    async def _send(self, name: str) -> None:
        if await self.sequences.enter(name):
            self.sent.append(name)

    def reads(self, *names: str) -> None:
        """Work through these prompts."""
        self.sequences.step_ended(lambda name: name in names)

    def sent_of(self, key: str) -> int:
        """How many of a key were sent."""
        return sum(name.startswith(key) for name in self.sent)


async def settle() -> None:
    """Let all that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def play(scene: Callable[[], Awaitable[Any]]) -> Any:
    """Run a scene within a deadline."""

    async def within_time() -> Any:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await scene()

    return asyncio.run(within_time())


def test_the_present_capacity_is_that_of_the_engine_that_started_last() -> None:
    """Before the first it is unlimited."""
    known: list[EngineFacts | None] = [None]
    present = PresentCapacity(lambda: known[-1])
    assert present() == Capacity()
    for running in (4, 8):
        known.append(replace(FACTS, max_num_seqs=running))
        assert present().running == running
        assert present() is present()


def test_one_request_of_many_sequences_leaves_a_place_to_another_key() -> None:
    """Whose sequence is sent at once, and not behind all that the first one asked for."""

    async def scene() -> tuple[int, int]:
        engine = Engine()
        engine.ask("a", 1000)
        await settle()
        before = engine.sent_of("a")
        engine.ask("b")
        await settle()
        return before, engine.sent_of("b")

    assert play(scene) == (3, 1)


def test_a_single_key_has_the_whole_engine() -> None:
    """With nobody to share with there are no turns: vLLM's own queue is as good."""

    async def scene() -> int:
        engine = Engine(keys=1)
        engine.ask("a", 100)
        await settle()
        return len(engine.sent)

    assert play(scene) == 100


def test_with_all_keys_there_nothing_is_kept() -> None:
    """The places of the engine are all in use, those that are spare too."""

    async def scene() -> int:
        engine = Engine()
        engine.ask("b", 1)
        engine.ask("a", 100)
        await settle()
        return len(engine.sent)

    assert play(scene) == 6


def test_what_waits_and_what_was_sent_is_counted() -> None:
    """Until it leaves; nothing is left of it when the engine is gone."""

    async def scene() -> list[tuple[int, int]]:
        engine = Engine()
        sequences = engine.sequences
        names = engine.ask("a", 10)
        await settle()
        found = [(sequences.waiting, sequences.sent)]
        sequences.leave(names[0])
        sequences.leave(names[-1])
        found.append((sequences.waiting, sequences.sent))
        sequences.end(RuntimeError)
        await asyncio.gather(*engine.tasks, return_exceptions=True)
        return [*found, (sequences.waiting, sequences.sent)]

    assert play(scene) == [(7, 3), (5, 3), (0, 0)]


def test_places_are_shared_evenly() -> None:
    """A key that has fewer in the engine is the next, until all have as many."""

    async def scene() -> tuple[int, int]:
        engine = Engine(running=8)
        first = engine.ask("a", 100)
        await settle()
        engine.ask("b", 100)
        await settle()
        for name in first[:4]:
            engine.sequences.leave(name)
        await settle()
        return engine.sent_of("a") - 4, engine.sent_of("b")

    assert play(scene) == (5, 5)


def test_long_prompts_of_one_key_leave_the_next_step_to_another() -> None:
    """Beside another key it has as many unread as one step takes; the order stays."""

    async def scene() -> list[list[str]]:
        engine = Engine(running=16, step_tokens=100)
        engine.ask("b", prompt_tokens=1)
        names = engine.ask("a", 4, prompt_tokens=50)
        seen = []
        for read in ((), names[:1], names[1:3]):
            engine.reads(*read)
            await settle()
            seen.append([name for name in engine.sent if name.startswith("a")])
        assert seen[-1] == names
        return [one[len(before) :] for before, one in pairwise([[], *seen])]

    assert play(scene) == [["a2", "a3"], ["a4"], ["a5"]]


def test_a_prompt_that_takes_many_steps_is_read_alone() -> None:
    """The next one of its key comes when it is read, the short ones of another meanwhile."""

    async def scene() -> tuple[list[str], list[str]]:
        engine = Engine(running=16, step_tokens=100)
        long, _ = engine.ask("a", 2, prompt_tokens=1000)
        await settle()
        engine.ask("b", 3, prompt_tokens=10)
        await settle()
        before = list(engine.sent)
        engine.reads(long)
        await settle()
        return before, engine.sent[len(before) :]

    assert play(scene) == (["a1", "b3", "b4", "b5"], ["a2"])


def test_what_leaves_has_no_prompt_to_read_any_more() -> None:
    """Its client is gone, so that the next of its key is not kept waiting for it."""

    async def scene() -> list[str]:
        engine = Engine(running=16, step_tokens=100)
        engine.ask("b", prompt_tokens=1)
        long, _ = engine.ask("a", 2, prompt_tokens=1000)
        await settle()
        engine.sequences.leave(long)
        await settle()
        return engine.sent

    assert play(scene) == ["b1", "a2", "a3"]


def test_a_key_that_asks_alone_has_prompts_for_a_few_steps_in_the_engine() -> None:
    """So that no step lacks one, and another key that comes waits for these steps at most."""

    async def scene() -> int:
        engine = Engine(running=64, step_tokens=100)
        engine.ask("a", 50, prompt_tokens=50)
        await settle()
        return len(engine.sent)

    assert play(scene) == STEPS_ALONE * 2


def test_what_is_given_up_is_not_sent() -> None:
    """Neither where it was aborted, nor where its caller has gone."""

    async def scene() -> list[str]:
        engine = Engine(running=1)
        names = engine.ask("a", 4)
        await settle()
        engine.sequences.leave(names[1])
        engine.tasks[2].cancel()
        await settle()
        engine.sequences.leave(names[2])
        engine.sequences.leave(names[0])
        await settle()
        return [*engine.sent, "of", *names]

    sent = play(scene)
    assert sent == [sent[3], sent[6], "of", *sent[3:]]


def test_what_is_aborted_just_after_it_was_admitted_is_not_sent() -> None:
    """Its task has not gone on yet, and the engine would run it for nobody."""

    async def scene() -> list[str]:
        engine = Engine(running=1)
        names = engine.ask("a", 4)
        await settle()
        sent = list(engine.sent)
        for name in names:
            engine.sequences.leave(name)
        await settle()
        assert engine.sequences.sent == 0
        return engine.sent[len(sent) :]

    assert play(scene) == []


def test_a_request_is_done_when_the_engine_is_done_with_all_of_it() -> None:
    """Once, and not before."""

    async def scene() -> list[int]:
        engine, done = Engine(), []
        context = RequestContext(key="a", engine_is_done=lambda: done.append(context.sequences))
        names = engine.ask("a", 3, context)
        await settle()
        for name in names:
            assert done == []
            engine.sequences.leave(name)
        return done

    assert play(scene) == [0]


def test_a_beam_search_is_done_when_its_last_token_is_there() -> None:
    """Between two tokens the engine has nothing of it."""

    async def scene() -> list[int]:
        engine, done = Engine(), []
        context = RequestContext(key="a", engine_is_done=lambda: done.append(len(engine.sent)))
        with context.searching():
            for _ in range(3):
                names = engine.ask("a", 2, context)
                await settle()
                for name in names:
                    engine.sequences.leave(name)
        return done

    assert play(scene) == [6]


def test_the_end_of_the_engine_ends_all_waits() -> None:
    """With the error that says so."""

    async def scene() -> list[BaseException | None]:
        engine = Engine(running=1)
        engine.ask("a", 3)
        await settle()
        engine.sequences.end(lambda: RuntimeError("gone"))
        return await asyncio.gather(*engine.tasks, return_exceptions=True)

    first, *others = play(scene)
    assert first is None
    assert [str(error) for error in others] == ["gone", "gone"]


def test_nothing_waits_for_an_engine_that_is_gone() -> None:
    """What comes after its end gets the error too, however much has come before."""

    async def scene() -> list[BaseException | None]:
        engine = Engine(running=1)
        engine.sequences.end(lambda: RuntimeError("gone"))
        engine.ask("a", 5)
        return await asyncio.gather(*engine.tasks, return_exceptions=True)

    assert [str(error) for error in play(scene)] == ["gone"] * 5


def test_the_probe_waits_for_nobody() -> None:
    """Its requests are to fill the engine."""

    async def scene() -> int:
        engine = Engine(running=1)
        engine.ask("", 20, RequestContext(is_probe=True))
        await settle()
        return len(engine.sent)

    assert play(scene) == 20


class Lives(RuleBasedStateMachine):
    """Random lives of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.engine = Engine(running=3, keys=3)
        self.alive: list[str] = []

    @rule(key=st.sampled_from("abc"), sequences=st.integers(1, 8))
    def ask(self, key: str, sequences: int) -> None:
        async def ask() -> None:
            self.alive += self.engine.ask(key, sequences)
            await settle()

        self.loop.run_until_complete(ask())

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        name = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))

        async def leave() -> None:
            self.engine.sequences.leave(name)
            await settle()

        self.loop.run_until_complete(leave())

    @invariant()
    def a_key_with_nothing_there_waits_only_for_a_full_engine(self) -> None:
        there = [name for name in self.alive if name in self.engine.sent]
        assert len(there) <= 5
        waiting = {name[0] for name in self.alive} - {name[0] for name in there}
        assert not waiting or len(there) == 5

    @invariant()
    def each_waits_or_was_sent(self) -> None:
        there = sum(name in self.engine.sent for name in self.alive)
        sequences = self.engine.sequences
        assert (sequences.waiting, sequences.sent) == (len(self.alive) - there, there)

    def teardown(self) -> None:
        async def end() -> None:
            self.engine.sequences.end(lambda: RuntimeError("gone"))
            await asyncio.gather(*self.engine.tasks, return_exceptions=True)

        self.loop.run_until_complete(end())
        self.loop.close()


TestLives = Lives.TestCase


@pytest.mark.parametrize("running", [1, 2, 16, 256])
def test_one_key_never_has_all_that_runs_at_once(running: int) -> None:
    """One place is left for another key, except in an engine that runs one at a time."""
    capacity = Capacity(running, running + 2)
    taken = 0
    while capacity.has_room("a", {"a": taken} if taken else {}, taken=taken, keys=2):
        taken += 1
    assert taken == max(1, running - 1)


@pytest.mark.parametrize(("light", "left"), [(1, 1), (3, 3), (4, 4), (8, 4)])
def test_a_key_beyond_its_share_leaves_room_for_the_others(light: int, left: int) -> None:
    """They may double what they have there, up to an eighth of what runs at once."""
    capacity = Capacity(32, 36)
    heavy = 1
    while capacity.has_room("heavy", {"heavy": heavy, "light": light}, taken=heavy + light, keys=2):
        heavy += 1
    assert heavy + light == 32 - left
    inside = {"heavy": heavy, "light": light}
    assert capacity.has_room("light", inside, taken=heavy + light, keys=2)


def test_keys_with_equal_shares_have_all_of_the_engine() -> None:
    """Nothing is kept free when nobody has less than another."""
    inside = {"a": 17, "b": 17}
    assert Capacity(32, 36).has_room("a", inside, taken=34, keys=2)
    assert not Capacity(32, 36).has_room("a", inside, taken=36, keys=2)
