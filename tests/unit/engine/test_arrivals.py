"""Clients choose the IDs of their requests: alike, too long, or not printable."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.engine.requests.arrivals import MAX_REQUEST_ID_CHARACTERS
from holdfast.engine.suspects.blame import BlameVerdict
from holdfast.request_context import RequestContext
from replay_harness import ReplayHarness, named, run_scene
from scripted_llm import ScriptedLLM


def test_a_name_that_fits_nowhere_is_replaced() -> None:
    """By another for each; a usual one stays as it is."""

    async def scene(harness: ReplayHarness) -> None:
        seen: list[str] = []

        class Named(ScriptedLLM):
            async def generate(self, prompt: str, **arguments: Any) -> Any:
                seen.append(arguments["request_id"])
                async for output in super().generate(prompt):
                    yield output

        harness.start(Named())
        for name in ("cmpl-1", "x" * 5000, "x" * 5001, "a\nb", "\ud800"):
            arguments = {"prompt": "p", "request_id": name}
            assert [output async for output in harness.requests.run("generate", arguments)]
        assert seen[0] == "cmpl-1"
        assert len(set(seen)) == 5
        assert all(len(name) <= MAX_REQUEST_ID_CHARACTERS and name.isprintable() for name in seen)

    run_scene(scene)


def test_requests_of_the_same_id_are_told_apart() -> None:
    """Clients may choose alike; the first has the ID, also in vLLM's own log."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        contexts = RequestContext(), RequestContext()
        calls = [harness.call("a", context=context) for context in contexts]
        await harness.llm.until_received(2)
        first, second = (context.engine_request_id for context in contexts)
        assert (first, second.partition("~")[0]) == ("a", "a")
        assert first != second
        harness.llm.release()
        await asyncio.gather(*calls)

    run_scene(scene)


def test_no_request_gets_the_id_of_one_that_has_left() -> None:
    """A death may still name that one, and the blame would fall on the other."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        bad = harness.call("bad", request_id="a", context=RequestContext(key="bad"))
        await harness.llm.until_received(1)
        bad.cancel()
        await asyncio.wait({bad})
        good = harness.call("good", request_id="a", context=RequestContext(key="good"))
        await harness.llm.until_received(2)
        assert harness.bury(named("a")) == BlameVerdict(1, is_charged=True, has_suspects=True)
        harness.start()
        assert await good
        assert harness.requests.suspended_seconds("good") == 0

    run_scene(scene)
