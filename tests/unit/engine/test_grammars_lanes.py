"""Keys share the lanes of grammar trials fairly."""

from __future__ import annotations

import asyncio

from holdfast.engine.grammars.lanes import Lane


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Line:
    """Grammars that wait in a lane, and the order in which they got a place."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.got: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def ask(self, *names: str) -> None:
        """`key` and a number, as `a1`."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._take(name))

    async def _take(self, name: str) -> None:
        await self.lane.take(name[0])
        self.got.append(name)


def test_keys_take_turns() -> None:
    """However many grammars one of them has sent before."""

    async def scene() -> None:
        line = Line(Lane(1, slots_per_key=1))
        line.ask("a1", "a2", "a3", "b1", "c1")
        await _settle()
        for key in "aabca":
            line.lane.give(key)
            await _settle()
        assert line.got == ["a1", "a2", "b1", "c1", "a3"]

    asyncio.run(scene())


def test_a_place_is_not_given_to_a_request_that_is_being_cancelled() -> None:
    """Its time was over in the same moment; the place would be lost."""

    async def scene() -> None:
        line = Line(Lane(1, slots_per_key=1))
        line.ask("a1", "b1", "c1")
        await _settle()
        line.tasks["b1"].cancel()
        line.lane.give("a")
        await _settle()
        assert line.got == ["a1", "c1"]
        line.lane.give("c")
        line.ask("b2")
        await _settle()
        assert line.got == ["a1", "c1", "b2"]

    asyncio.run(scene())


def test_a_key_leaves_places_to_others() -> None:
    """Where it may not have all of them; a place that nobody else may have stays free."""

    async def scene() -> None:
        line = Line(Lane(2, slots_per_key=1))
        line.ask("a1", "a2", "b1")
        await _settle()
        assert line.got == ["a1", "b1"]
        line.lane.give("b")
        await _settle()
        assert line.got == ["a1", "b1"]
        line.lane.give("a")
        await _settle()
        assert line.got == ["a1", "b1", "a2"]

    asyncio.run(scene())


def test_a_request_that_leaves_the_line_takes_no_place() -> None:
    """Nor who leaves in the moment in which the place is there."""

    async def scene() -> None:
        line = Line(Lane(1, slots_per_key=1))
        line.ask("a1", "b1", "c1")
        await _settle()
        line.tasks["b1"].cancel()
        await _settle()
        line.ask("d1")
        await _settle()
        line.lane.give("a")
        line.tasks["c1"].cancel()
        await _settle()
        assert line.got == ["a1", "d1"]

    asyncio.run(scene())
