"""Ends the ranks of a follower before its host runs out of memory, as the head does on its own.

No prompt can be given up here: the head alone knows the requests. So the ranks of a follower are
ended at the last of the marks of `host_memory.guard`, and the first only says when the node joins
again after that. The head is told the reason of the death, like any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from holdfast.host_memory.guard import MemoryGuard, Reading
from holdfast.records import Death
from holdfast.settings import MemorySettings

logger = logging.getLogger(__name__)


class NodeMemory:
    """Guards the memory of a follower's host. Belongs to one event loop."""

    def __init__(self, settings: MemorySettings, guard: MemoryGuard | None = None) -> None:
        self._settings = settings
        self._guard = guard or MemoryGuard(settings.marks)
        self._death: asyncio.Future[Death] | None = None
        """The death of the generation that runs; None without one."""
        self._protection = ExitStack()
        self._pids: frozenset[int] = frozenset()

    def kept_bytes(self) -> int:
        """Return what an engine on unified memory must leave to the host; 0 without a guard."""
        if not self._settings.guards_engine(is_unified_memory=True):
            return 0
        return self._guard.ample_bytes()

    def running(self) -> AbstractContextManager[None]:
        """Watch the host's memory while entered, unless that is off."""
        if self._settings.guard == "off":
            return nullcontext()
        return self._guard.running_beside_loop(self._tell)

    def is_ample(self) -> bool:
        """Whether nothing has to give way on this host, as far as is known."""
        return self._guard.is_ample()

    @contextmanager
    def guarding(self) -> Iterator[asyncio.Future[Death]]:
        """Guard one generation while entered; the future is its death at the last mark.

        It ends before the processes that `protect_from` has named can be seen to end.
        """
        self._death = death = asyncio.get_running_loop().create_future()
        try:
            yield death
        finally:
            self._aim(())
            self._death = None
            death.cancel()

    def protect_from(self, pids: Collection[int], *, is_unified_memory: bool) -> None:
        """Kill these processes at the last mark, instead of those that were named before.

        None is killed on a device with memory of its own, unless the guard is on there too.
        """
        is_guarded = self._settings.guards_engine(is_unified_memory=is_unified_memory)
        self._aim(pids if is_guarded else ())

    def _aim(self, pids: Collection[int]) -> None:
        if self._pids == frozenset(pids):
            return
        self._pids = frozenset(pids)
        self._protection.close()
        if pids:
            self._protection.enter_context(self._guard.protecting_from(pids))

    def _tell(self, reading: Reading) -> None:
        """Take a reading of the guard's thread."""
        if reading.has_ended_engine and self._death is not None and not self._death.done():
            logger.error("the host is out of memory, so its ranks are ended: %s", reading)
            self._death.set_result(Death("host_memory", str(reading)))
