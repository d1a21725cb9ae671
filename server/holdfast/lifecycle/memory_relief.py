"""What is done when the host runs out of memory: the loop's part of `host_memory.guard`.

Below the first mark new long prompts wait. Below the second, long prompts are given up one after
another, as long as it takes. Below the last the guard has killed the engine by itself, and this
says why, so that the next generation leaves out the size that has taken the memory.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext

from holdfast.engine.interface import Engine
from holdfast.engine.replay import ReplayManager
from holdfast.engine.requests.long_prompts import LongPrompts
from holdfast.host_memory.guard import INTERVAL_SECONDS, Level, MemoryGuard, Reading
from holdfast.labels import MemoryAction
from holdfast.probe.journal import ProbeJournals
from holdfast.records import Death, HostMemory, RankStats
from holdfast.settings import MemorySettings

logger = logging.getLogger(__name__)

_SAID = {
    Level.AMPLE: "the host has enough memory again",
    Level.HOLD: "the host is short of memory, so long prompts wait",
    Level.GIVE_UP: "the host is short of memory, so long prompts are aborted",
    Level.END: "the host is out of memory, so the engine is replaced if that lasts",
}
SETTLE_SECONDS = 1.0
"""The least time between two prompts that are given up: what the first one frees shows in it."""


class MemoryRelief:
    """Runs the guard, and does what it calls for. Belongs to one event loop."""

    def __init__(
        self,
        settings: MemorySettings,
        *,
        hold_timeout_seconds: float,
        on_action: Callable[[MemoryAction], None],
        journals: ProbeJournals,
        guard: MemoryGuard | None = None,
    ) -> None:
        """Keep in `journals` the sizes that no later probe may try.

        A long prompt waits for `hold_timeout_seconds` at most.
        """
        self._settings = settings
        self._hold_timeout_seconds = hold_timeout_seconds
        self._on_action = on_action
        self._journals = journals
        self._guard = guard or MemoryGuard(settings.marks)
        self._level = Level.AMPLE
        self._told = asyncio.Event()
        self._prompts: LongPrompts | None = None
        """The requests of the guarded engine; None while there is none."""
        self._end: asyncio.Future[Death] | None = None
        self._suspect_tokens = self._probe_tokens = 0
        self._ended_before_tokens = math.inf
        """The smallest size of a client with which the memory has run out."""
        self._quiet_until_seconds = 0.0

    def last(self) -> HostMemory | None:
        """Return what the guard read last, for the metrics; any thread may ask."""
        reading = self._guard.last
        if reading is None:
            return None
        return HostMemory(reading.available_bytes, reading.total_bytes, reading.pressure_ratio)

    def kept_bytes(self) -> int:
        """Return what an engine on unified memory must leave to the host; 0 without a guard."""
        if not self._settings.guards_engine(is_unified_memory=True):
            return 0
        return self._guard.ample_bytes()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch the host's memory while entered, unless that is off."""
        if self._settings.guard == "off":
            yield
            return
        relieving = asyncio.create_task(self._relieve(), name="memory relief")
        try:
            with self._guard.running_beside_loop(self._tell):
                yield
        finally:
            relieving.cancel()
            await asyncio.wait({relieving})

    @contextmanager
    def guarding(self, engine: Engine, requests: ReplayManager) -> Iterator[asyncio.Future[Death]]:
        """While entered, relieve the host of this engine; the future is its death at the last mark.

        Without a guard, or on a device with memory of its own, the future never ends.
        """
        end: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        is_guarded = self._settings.guards_engine(is_unified_memory=engine.facts.is_unified_memory)
        prompts = requests.long_prompts
        prompts.on_held = lambda: self._on_action("hold")
        prompts.on_given_up = lambda: self._on_action("give_up")
        prompts.hold(are_held=is_guarded and self._level >= Level.HOLD)
        if is_guarded:
            self._prompts, self._end = prompts, end
        pids = engine.process_ids()
        try:
            with self._guard.protecting_from(pids) if is_guarded else nullcontext():
                yield end
        finally:
            self._prompts = self._end = None
            end.cancel()

    async def until_out_of_memory(self, ranks: Callable[[], tuple[RankStats, ...]]) -> str:
        """Return what was left when an engine that starts was killed at the last mark.

        The guard kills the ranks that have reported by then, unless their device has memory of its
        own. `ranks` reads their reports, in a thread.
        """
        end: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        self._end = end
        guarded: frozenset[int] = frozenset()
        try:
            with ExitStack() as protection:
                while not end.done():
                    pids = self._guarded_pids(await asyncio.to_thread(ranks))
                    if pids - guarded:
                        guarded |= pids
                        protection.close()
                        protection.enter_context(self._guard.protecting_from(guarded))
                    await asyncio.wait({end}, timeout=INTERVAL_SECONDS)
            return end.result().reason
        finally:
            self._end = None
            end.cancel()

    def _guarded_pids(self, ranks: tuple[RankStats, ...]) -> frozenset[int]:
        is_unified = any(rank.is_unified_memory for rank in ranks)
        is_guarded = self._settings.guards_engine(is_unified_memory=is_unified)
        return frozenset(rank.pid for rank in ranks) if is_guarded else frozenset()

    async def until_ample(self, on_wait: Callable[[str], None]) -> None:
        """Return once the host has enough memory; `on_wait` gets what is left if it has not.

        It may take forever: a neighbour may stay. Without a guard there is nothing to wait for.
        """
        if self._guard.is_ample():
            return
        on_wait(str(self._guard.last))
        while not self._guard.is_ample():  # noqa: ASYNC110 - a thread looks at the memory
            await asyncio.sleep(INTERVAL_SECONDS)

    def note_death(self) -> None:
        """Take a death for lack of memory, while the requests of its engine are still known.

        The guard of another node may have ended the engine.
        """
        self.note_end()
        self._note_suspect_size()

    def note_end(self) -> None:
        """Count an engine that was ended for lack of memory."""
        self._on_action("end")

    def keep_suspect_size(self) -> int:
        """Forbid the size that has taken the memory, on disk.

        A size of the probe is forbidden at once, since the engine runs nothing else. A client's
        prompt may have been there by chance, so a size of clients is forbidden the second time.

        Return the tokens of a context that is forbidden now, or 0. If the probe was trying an
        image, that is forbidden and says nothing about contexts.
        """
        tokens, self._suspect_tokens = self._suspect_tokens, 0
        probe_tokens, self._probe_tokens = self._probe_tokens, 0
        if pixels := self._journals.forbid_unproven_image():
            logger.warning(
                "images of %d pixels and more are left out from now on: one was being processed "
                "when the host ran out of memory",
                pixels,
            )
            return 0
        if not tokens:
            return 0
        if not probe_tokens and tokens < self._ended_before_tokens:
            self._ended_before_tokens = tokens
            logger.warning(
                "a context of %d tokens was being processed when the host ran out of memory; "
                "if that happens again, such contexts are left out",
                tokens,
            )
            return 0
        logger.warning(
            "contexts of %d tokens and more are left out from now on: one was being processed "
            "when the host ran out of memory",
            tokens,
        )
        self._journals.forbid(tokens)
        return tokens

    def _note_suspect_size(self) -> None:
        """Note the size that may have taken the memory."""
        if self._prompts is not None:
            self._suspect_tokens = max(self._suspect_tokens, self._prompts.suspect_tokens())
            self._probe_tokens = max(self._probe_tokens, self._prompts.probe_tokens())

    def _tell(self, reading: Reading) -> None:
        """Take a reading of the guard's thread."""
        before, self._level = self._level, reading.level
        self._told.set()
        if before is not reading.level and self._prompts is not None:
            logger.warning("%s: %s", _SAID[reading.level], reading)
        if reading.has_ended_engine and self._end is not None and not self._end.done():
            if self._prompts is None:  # the death of an engine that starts is not noted
                self.note_end()
            self._note_suspect_size()
            self._end.set_result(Death("host_memory", str(reading)))

    async def _relieve(self) -> None:
        while True:
            await self._told.wait()
            self._told.clear()
            if self._prompts is not None:
                await self._act(self._prompts, self._level)

    async def _act(self, prompts: LongPrompts, level: Level) -> None:
        prompts.hold(are_held=level >= Level.HOLD)
        await prompts.give_up_overdue(self._hold_timeout_seconds)
        if level >= Level.GIVE_UP and time.monotonic() >= self._quiet_until_seconds:
            self._quiet_until_seconds = time.monotonic() + SETTLE_SECONDS
            await prompts.give_up_longest()
