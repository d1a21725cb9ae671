"""Digests are made where they hold up nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.engine.replay import ReplayManager
from holdfast.engine.suspects import digests
from holdfast.engine.suspects.blame import BlameVerdict
from holdfast.errors import QuarantinedError, RequestLostError, SuspectedError
from holdfast.request_context import RequestContext
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


@pytest.mark.parametrize("error", [RecursionError, TypeError, ValueError])
@pytest.mark.parametrize("has_left", [False, True])
def test_a_prompt_without_a_digest_is_blamed_all_the_same(
    error: type[Exception], *, has_left: bool
) -> None:
    """Its key is charged, and it is like no other, so that nothing else is refused for it."""

    class FailingOutputs(PlainOutputs):
        """They cannot digest what is bad."""

        def digest_of(self, arguments: Mapping[str, Any]) -> str:
            if arguments["prompt"].startswith("bad"):
                raise error
            return super().digest_of(arguments)

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(FailingOutputs())
        for name in ("bad#1", "bad#2"):
            harness.start().hold()
            call = harness.call(name, context=RequestContext(key="key"))
            await harness.llm.until_received(1)
            if has_left:
                call.cancel()
                await asyncio.wait({call})
            verdict = harness.bury(named(name))
            assert verdict == BlameVerdict(1, is_charged=True, has_suspects=True)
            if not has_left:
                with answered(SuspectedError):
                    await call
        assert harness.suspicions.charged("key") == 2

    run_scene(scene)


def test_a_prompt_that_is_a_stream_is_like_no_other() -> None:
    """Nobody can read it twice; the next one may even be the object at the same address."""

    async def scene(harness: ReplayHarness) -> None:
        for name in ("bad#1", "bad#2"):
            harness.start().hold()
            call = harness.call(name, context=RequestContext(key="key"), is_streamed=True)
            await harness.llm.until_received(1)
            assert harness.bury(named(name)).is_charged
            with answered(RequestLostError):
                await call
        harness.start()
        await harness.call("bad#3", context=RequestContext(key="other"), is_streamed=True)
        assert harness.suspicions.charged("key") == 2

    run_scene(scene)


def start_nothing(_: threading.Thread) -> None:
    """What the start of a thread is in a process that has all that it may have."""
    raise RuntimeError("can't start new thread")


def test_a_client_that_leaves_is_remembered_though_no_thread_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its caller hears nothing of that, and its like is refused."""

    async def scene(harness: ReplayHarness) -> None:
        for number in (1, 2):
            harness.start().hold()
            call = harness.call(f"bad#{number}", context=RequestContext(key="key"))
            await harness.llm.until_received(1)
            with monkeypatch.context() as patching:
                patching.setattr(threading.Thread, "start", start_nothing)
                call.cancel()
                await asyncio.wait({call})
            assert call.cancelled()
            verdict = harness.bury(named(f"bad#{number}"))
            assert verdict == BlameVerdict(1, is_charged=True, has_suspects=True)
        harness.start()
        with answered(QuarantinedError):
            await harness.call("bad#3")

    run_scene(scene)


def test_a_large_prompt_is_known_though_no_thread_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop digests it then: one is served, and another refused."""

    async def scene(harness: ReplayHarness) -> None:
        harness.suspicions.quarantine(PlainOutputs().digest_of({"prompt": "large bad"}), "key")
        harness.start()
        monkeypatch.setattr(digests, "LARGE_BYTES", 5)
        monkeypatch.setattr(threading.Thread, "start", start_nothing)
        await harness.call("large good")
        with answered(QuarantinedError):
            await harness.call("large bad")

    run_scene(scene)


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
