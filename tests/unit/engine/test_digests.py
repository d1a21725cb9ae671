"""Digests are made where they hold up nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.engine.replay import ReplayManager
from holdfast.engine.suspects import digests
from holdfast.errors import QuarantinedError, SuspectedError
from replay_harness import RAISED, ReplayHarness, answered, killed, named, run_scene
from scripted_llm import PlainOutputs


def test_the_prompt_of_a_client_that_left_is_digested_by_another_thread() -> None:
    """With images it takes long, and nobody has to wait for that."""
    threads: list[int] = []

    class EngineOutputs(PlainOutputs):
        """It notes who asks."""

        def digest_of(self, arguments: Mapping[str, Any]) -> str:
            threads.append(threading.get_ident())
            return super().digest_of(arguments)

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(EngineOutputs())
        harness.start().hold()
        call = harness.call("a")
        await harness.llm.until_received(1)
        call.cancel()
        await asyncio.wait({call})
        while not threads:  # noqa: ASYNC110 - another thread fills it
            await asyncio.sleep(0.01)
        harness.bury(named("a"))

    run_scene(scene)
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_a_large_prompt_is_digested_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """While something is quarantined; its like is refused then, and any other one is served."""
    threads: dict[str, int] = {}

    class NotingOutputs(PlainOutputs):
        """It notes who asks."""

        def digest_of(self, arguments: Mapping[str, Any]) -> str:
            threads[arguments["prompt"]] = threading.get_ident()
            return super().digest_of(arguments)

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(NotingOutputs())
        for name, error in (("large bad#1", SuspectedError), ("large bad#2", QuarantinedError)):
            (call,), _ = await killed(harness, RAISED, [name], held=0)
            with answered(error):
                await call
        harness.start()
        monkeypatch.setattr(digests, "LARGE_BYTES", 5)
        with answered(QuarantinedError):
            await harness.call("large bad#3")
        await harness.call("large good")
        await harness.call("small")
        assert harness.llm.received == ["large good", "small"]
        assert harness.requests.lost["quarantined"] == 2

    run_scene(scene)
    assert threads["small"] == threading.get_ident()
    assert threads["large good"] == threads["large bad#3"] != threading.get_ident()
