"""The page as text costs the same, however many ask for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.status_page import text as texts
from holdfast.status_page.text import SharedText

DEADLINE_SECONDS = 60


class Slow:
    """A document with a member that can be read only once `may_go` is set."""

    def __init__(self) -> None:
        self.builds = 0
        self.may_go = threading.Event()
        self.is_broken = False

    def __str__(self) -> str:
        assert self.may_go.wait(DEADLINE_SECONDS)
        return f"STATE {self.builds}"

    def build(self) -> dict[str, Any]:
        self.builds += 1
        if self.is_broken:
            raise OSError("broken on purpose")
        return {"state": self}


def played(scene: Callable[[SharedText, Slow], Awaitable[None]]) -> None:
    """Play a scene."""
    slow = Slow()

    async def play() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await scene(SharedText(slow.build), slow)

    asyncio.run(play())


def test_the_loop_goes_on_while_one_text_is_rendered_for_all() -> None:
    """A client that leaves meanwhile takes nothing from the others."""

    async def scene(shared: SharedText, slow: Slow) -> None:
        first, *others = (asyncio.create_task(shared.text()) for _ in range(20))
        while not slow.builds:  # noqa: ASYNC110 - the text tells nobody
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        slow.may_go.set()
        assert {text.partition(":")[0] for text in await asyncio.gather(*others)} == {"STATE 1"}
        assert (await shared.text()).startswith("STATE 1")

    played(scene)


def test_a_text_is_reused_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is rendered again."""
    monkeypatch.setattr(texts, "REUSED_SECONDS", 0.0)

    async def scene(shared: SharedText, slow: Slow) -> None:
        slow.may_go.set()
        assert [(await shared.text())[:7] for _ in range(2)] == ["STATE 1", "STATE 2"]

    played(scene)


def test_a_failure_is_not_reused() -> None:
    """The next client gets a text."""

    async def scene(shared: SharedText, slow: Slow) -> None:
        slow.may_go.set()
        slow.is_broken = True
        with pytest.raises(OSError, match="broken on purpose"):
            await shared.text()
        slow.is_broken = False
        assert (await shared.text()).startswith("STATE 2")

    played(scene)
