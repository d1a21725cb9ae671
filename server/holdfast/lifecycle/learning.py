"""Is another start of the engine worth it? What earlier runs needed, and when to restart.

The rule (`--learned-restart`): when the probe made a workspace grow or fall short, and learning is
on, the engine is started again with what was learned. `auto` does so only after a rejection, or if
the start took less than two minutes. Without a restart the suite runs again in the same engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from holdfast.engine.interface import Engine
from holdfast.records import RankStats, SlotStats
from holdfast.settings import WorkspaceSettings
from holdfast.workspace import learned_store
from holdfast.workspace.plan import MIB, GrowthPolicy, Slot, WorkspaceSpec

QUICK_START_SECONDS = 120.0
logger = logging.getLogger(__name__)


def has_rejection(ranks: Iterable[RankStats]) -> bool:
    """Whether any rank refused a request for workspace."""
    return any(any(rank.rejections.values()) for rank in ranks)


def _fell_short(slot: SlotStats) -> bool:
    return slot.high_water_bytes > max(slot.reserved_bytes, slot.locked_bytes)


def _served_bytes(slot: SlotStats) -> int:
    """Return the most of its need that the slot has served, as far as its sizes tell."""
    if slot.high_water_bytes <= slot.size_bytes:
        return slot.high_water_bytes
    # A reservation contains headroom: if that were learned, each one would exceed the last.
    return slot.size_bytes if slot.size_bytes > slot.reserved_bytes else 0


def _key(slot: SlotStats) -> Slot:
    return slot.ubatch, slot.lane


class Learning:
    """The learned reservations of one fingerprint, and the one restart they may cause."""

    def __init__(
        self, settings: WorkspaceSettings, directory: Path | None, kept_host_bytes: int = 0
    ) -> None:
        """Pass `kept_host_bytes` on to the workers of this node."""
        self._settings = settings
        self._kept_host_bytes = kept_host_bytes
        self._directory = directory
        self._fingerprint = ""
        self._slots: dict[Slot, int] = {}
        self._on_disk: dict[Slot, int] = {}
        """What is on disk at least. A slow disk stops the event loop, so only more is written."""
        self._tried: dict[Slot, int] = {}
        """The reservations of the latest generation."""
        self._proven: dict[Slot, int] = {}
        """The reservations of the latest generation that was proven."""
        self._too_large: dict[Slot, int] = {}
        """Needs with which no engine starts: they are refused, and not learned."""
        self._suspected: dict[Slot, int] = {}
        """Reservations of starts that failed, until an engine is proven without them."""
        self._has_restarted = False

    def open(self, fingerprint: str) -> None:
        """Read what an earlier run with this fingerprint needed; a broken file is set aside."""
        self._fingerprint = fingerprint
        if self._directory is not None:
            self._slots = dict(learned_store.read(self._directory, fingerprint))
            self._on_disk = dict(self._slots)
            self._too_large = dict(learned_store.read_too_large(self._directory, fingerprint))
            self._log_too_large(learned_store.learned_path(self._directory, fingerprint))

    def spec(self, generation: int, stats_directory: Path) -> WorkspaceSpec:
        """Return the reservations for the workers of this generation."""
        self._tried = dict(self._slots)
        return WorkspaceSpec(
            stats_directory=str(stats_directory),
            generation=generation,
            floor_bytes=self._settings.reserve_bytes,
            headroom=self._settings.headroom,
            growth=self._growth,
            growth_limit_bytes=self._settings.growth_limit_bytes,
            learned=tuple((u, lane, size) for (u, lane), size in sorted(self._slots.items())),
            kept_host_bytes=self._kept_host_bytes,
        )

    def learn(self, ranks: Iterable[RankStats]) -> None:
        """Keep the largest need of each slot over all ranks of a started engine, here and on disk.

        A need that was refused is kept on disk only when an engine has started with it: there may
        be too little memory for it, and the next process must not fail to start because of it.
        """
        # This engine has started without what is suspected.
        self._too_large.update(self._suspected)
        served = dict(self._tried)
        for rank in ranks:
            for slot in rank.slots:
                self._raise(self._slots, slot, slot.high_water_bytes)
                self._raise(served, slot, _served_bytes(slot))
        self._keep(served)

    def _raise(self, sizes: dict[Slot, int], slot: SlotStats, need_bytes: int) -> None:
        """Raise the size of a slot to its need, unless no engine starts with that."""
        key = _key(slot)
        if need_bytes < self._too_large.get(key, learned_store.MAX_NEEDED_BYTES):
            sizes[key] = max(sizes.get(key, 0), need_bytes)

    def unlearn(self) -> bool:
        """Forget what no engine was proven with, after a failed start; False if there is nothing.

        A request may need more memory than there is, and what it was refused is learned. Without
        this, no engine would start again. If the start without it fails too, it was not the cause.
        """
        if self._tried == self._proven:
            self._suspected.clear()
            return False
        for key, size_bytes in self._tried.items():
            if size_bytes > self._proven.get(key, 0):
                self._suspected[key] = size_bytes
        self._slots = dict(self._proven)
        return True

    def _keep(self, slots: Mapping[Slot, int]) -> None:
        new = {slot: size for slot, size in slots.items() if size > self._on_disk.get(slot, 0)}
        if self._directory is None or not new:
            return
        if learned_store.write(self._directory, self._fingerprint, new):
            self._on_disk.update(new)

    def takes_restart(self, ranks: Iterable[RankStats], start_seconds: float) -> bool:
        """Whether the engine is to be started again now; True at most once.

        A restart needs a larger reservation that would have helped: a resource that was made late
        has none, and exists in the next pass. Nor would it help a slot that warm-up made as large,
        or whose need no engine starts with.
        """
        ranks = tuple(ranks)
        is_short = any(
            _fell_short(slot) and self._slots.get(_key(slot), 0) > self._tried.get(_key(slot), 0)
            for rank in ranks
            for slot in rank.slots
        )
        is_worth_it = (
            self._settings.learned_restart == "always"
            or self._measures
            or has_rejection(ranks)
            or start_seconds < QUICK_START_SECONDS
        )
        if self._has_restarted or not (self._may_restart and is_short and is_worth_it):
            return False
        self._has_restarted = True
        return True

    def holds_for_the_next(self, ranks: Iterable[RankStats]) -> bool:
        """Whether a proof of an engine with these ranks holds for the next one.

        With `deny`, what grew while the probe measured would be refused to the next one.
        """
        return not self._measures or not any(
            rank.growths["locked"] or any(map(_fell_short, rank.slots)) for rank in ranks
        )

    async def settle(self, engine: Engine) -> None:
        """Put the configured growth policy in force, after a proof."""
        self._proven = dict(self._tried)
        self._give_up_suspected()
        if self._measures:
            await engine.set_growth(self._settings.growth)

    def _give_up_suspected(self) -> None:
        """Note what an engine was proven without: the second time, no later process tries it."""
        if self._directory is None or not self._suspected:
            return
        if learned_store.write(self._directory, self._fingerprint, self._proven, self._suspected):
            self._on_disk.update({key: self._proven.get(key, 0) for key in self._suspected})
            self._suspected.clear()

    def _log_too_large(self, path: Path) -> None:
        for slot, size_bytes in self._too_large.items():
            logger.warning(
                "reserving less than %.2f MiB for workspace %s, because two starts failed with "
                "that much; delete %s to try again",
                size_bytes / MIB,
                slot,
                path,
            )

    @property
    def _may_restart(self) -> bool:
        return self._directory is not None and self._settings.learned_restart != "never"

    @property
    def _measures(self) -> bool:
        """Whether growth is allowed until the proof, although it is refused afterwards.

        The first request for more would end the start. What is known may be what an earlier run
        needed until it was stopped, or too large to be reserved.
        """
        return self._settings.growth == "deny" and self._may_restart

    @property
    def _growth(self) -> GrowthPolicy:
        return "alongside" if self._measures else self._settings.growth
