"""Is it worth to start the engine once more? What earlier runs needed, and the rule for a restart.

The rule (`--learned-restart`): when the probe made a workspace grow or fall short, and learning is
on, the engine is started once more with what was learned; `auto` does so only after a rejection, or
when the start took under two minutes. Without a restart the suite runs again in the same engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from holdfast.engine.interface import Engine
from holdfast.records import RankStats
from holdfast.settings import WorkspaceSettings
from holdfast.workspace import learned_store
from holdfast.workspace.plan import GrowthPolicy, Slot, WorkspaceSpec

QUICK_START_SECONDS = 120.0


def has_rejection(ranks: Iterable[RankStats]) -> bool:
    """Whether any rank refused a request for workspace."""
    return any(any(rank.rejections.values()) for rank in ranks)


class Learning:
    """The learned reservations of one fingerprint, and the one restart they may cause."""

    def __init__(self, settings: WorkspaceSettings, directory: Path | None) -> None:
        self._settings = settings
        self._directory = directory
        self._fingerprint = ""
        self._slots: dict[Slot, int] = {}
        self._tried: dict[Slot, int] = {}
        """What the generation that was started last was told."""
        self._proven: dict[Slot, int] = {}
        """What the last generation that was proven was told."""
        self._too_large: dict[Slot, int] = {}
        """Needs with which no engine starts: who has one is refused, not learned from."""
        self._has_restarted = False
        self._is_measuring = False

    def open(self, fingerprint: str) -> None:
        """Read what an earlier run with this fingerprint needed; a broken file is set aside."""
        self._fingerprint = fingerprint
        if self._directory is not None:
            self._slots = dict(learned_store.read(self._directory, fingerprint))
        # With `deny` and nothing learned, the first request for more would end the start. Growth is
        # let through while the probe measures, and refused from `settle` on.
        self._is_measuring = (
            self._settings.growth == "deny" and self._may_restart and not self._slots
        )

    def spec(self, generation: int, stats_directory: Path) -> WorkspaceSpec:
        """What the workers of this generation are told."""
        self._tried = dict(self._slots)
        return WorkspaceSpec(
            stats_directory=str(stats_directory),
            generation=generation,
            floor_bytes=self._settings.reserve_bytes,
            headroom=self._settings.headroom,
            growth=self._growth,
            growth_limit_bytes=self._settings.growth_limit_bytes,
            learned=tuple((u, lane, size) for (u, lane), size in sorted(self._slots.items())),
        )

    def learn(self, ranks: Iterable[RankStats]) -> None:
        """Keep the largest need of each slot over all ranks, here and on disk.

        A need that was refused is kept on disk once an engine was proven with it: there may be less
        memory than it takes, and the next process must not fail to start over it.
        """
        served: dict[Slot, int] = {}
        for rank in ranks:
            for slot in rank.slots:
                place, need_bytes = (slot.ubatch, slot.lane), slot.high_water_bytes
                if need_bytes < self._too_large.get(place, need_bytes + 1):
                    self._slots[place] = max(self._slots.get(place, 0), need_bytes)
                if need_bytes <= slot.size_bytes:
                    served[place] = max(served.get(place, 0), need_bytes)
        self._keep(served)

    def unlearn(self) -> bool:
        """An engine did not start: forget what none was ever proven with; False if that is nothing.

        A request may need more than there is, and what it was refused is learned. Without this no
        engine would start again.
        """
        if self._tried == self._proven:
            return False
        for place, size_bytes in self._tried.items():
            if size_bytes > self._proven.get(place, 0):
                self._too_large[place] = size_bytes
        self._slots = dict(self._proven)
        return True

    def _keep(self, slots: Mapping[Slot, int]) -> None:
        if self._directory is not None and any(slots.values()):
            learned_store.write(self._directory, self._fingerprint, slots)

    def takes_restart(self, ranks: Iterable[RankStats], start_seconds: float) -> bool:
        """Whether the engine is to be started once more now; True at most once.

        Only where a larger reservation would have helped: of a resource that was made late there is
        nothing to learn, and it is there for the next pass.
        """
        ranks = tuple(ranks)
        is_short = any(s.high_water_bytes > s.reserved_bytes for rank in ranks for s in rank.slots)
        is_worth_it = (
            self._settings.learned_restart == "always"
            or self._is_measuring
            or has_rejection(ranks)
            or start_seconds < QUICK_START_SECONDS
        )
        if self._has_restarted or not (self._may_restart and is_short and is_worth_it):
            return False
        self._has_restarted = True
        self._is_measuring = False
        return True

    async def settle(self, engine: Engine) -> None:
        """The proof stands: from now on the policy that was asked for holds."""
        self._proven = dict(self._tried)
        self._keep(self._proven)
        if self._is_measuring:
            self._is_measuring = False
            await engine.set_growth(self._settings.growth)

    @property
    def _may_restart(self) -> bool:
        return self._directory is not None and self._settings.learned_restart != "never"

    @property
    def _growth(self) -> GrowthPolicy:
        return "alongside" if self._is_measuring else self._settings.growth
