"""When is the engine started again, and with what? The rule of `--learned-restart`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.engine.interface import Engine
from holdfast.lifecycle.learning import QUICK_START_SECONDS, Learning
from holdfast.records import RankStats, SlotStats
from holdfast.settings import LearnedRestart, WorkspaceSettings
from holdfast.workspace import learned_store
from holdfast.workspace.plan import MIB, GrowthPolicy, WorkspaceSpec
from sample_status import a_rank

FINGERPRINT = "f00d"
SLOW_SECONDS = QUICK_START_SECONDS + 1


def rank_with(need_bytes: int, *, rejections: int = 0, rank: int = 0, ubatch: int = 0) -> RankStats:
    """Return a rank whose one slot needed this much, and got it if nothing was refused."""
    size_bytes = 0 if rejections else need_bytes
    slot = SlotStats(ubatch, 0, size_bytes, 0, need_bytes, "somebody")
    return a_rank(rank=rank, slots=(slot,), rejections={"scratch": rejections})


def opened(directory: Path | None, **settings: Any) -> Learning:
    """Return what a start begins with."""
    learning = Learning(WorkspaceSettings(**settings), directory)
    learning.open(FINGERPRINT)
    return learning


def spec_of(learning: Learning) -> WorkspaceSpec:
    """Return the reservations for the next generation."""
    return learning.spec(1, Path("anywhere"))


def restarts_after(
    learning: Learning, ranks: tuple[RankStats, ...], start_seconds: float = 1.0
) -> bool:
    """Return whether the engine is started again after a pass that these ranks have met."""
    learning.learn(ranks)
    return learning.takes_restart(ranks, start_seconds)


class GrowthRecorder:
    """The part of an engine that learning uses."""

    def __init__(self) -> None:
        self.policies: list[GrowthPolicy] = []

    def process_tracebacks(self) -> str:
        return ""

    async def set_growth(self, policy: GrowthPolicy) -> None:
        self.policies.append(policy)


def settled(learning: Learning) -> list[GrowthPolicy]:
    """Return the policies that the engine got after the proof."""
    engine = GrowthRecorder()
    asyncio.run(learning.settle(cast("Engine", engine)))
    return engine.policies


@pytest.mark.parametrize(
    ("when", "rejections", "start_seconds", "restarts"),
    [
        ("auto", 0, QUICK_START_SECONDS - 1, True),
        ("auto", 0, SLOW_SECONDS, False),
        ("auto", 1, SLOW_SECONDS, True),
        ("always", 0, SLOW_SECONDS, True),
        ("always", 1, 1.0, True),
        ("never", 0, 1.0, False),
        ("never", 1, 1.0, False),
    ],
)
def test_when_the_engine_is_started_again(
    tmp_path: Path,
    when: LearnedRestart,
    rejections: int,
    start_seconds: float,
    restarts: bool,
) -> None:
    """`auto` restarts only after a rejection or a quick start, `always` always, `never` never."""
    ranks = (rank_with(MIB, rejections=rejections),)
    learning = opened(tmp_path, learned_restart=when)
    assert restarts_after(learning, ranks, start_seconds) is restarts


def test_it_is_started_again_only_once(tmp_path: Path) -> None:
    """A need that grows from start to start does not cause an endless loop."""
    learning = opened(tmp_path, learned_restart="always")
    ranks = (rank_with(MIB),)
    assert restarts_after(learning, ranks)
    assert not restarts_after(learning, ranks)


def test_what_cannot_be_reserved_is_not_a_reason_to_start_again(tmp_path: Path) -> None:
    """A resource that is made late grows no slot, and exists in the next pass."""
    slot = SlotStats(0, 0, 2 * MIB, 2 * MIB, MIB, "somebody")
    learning = opened(tmp_path, learned_restart="always")
    assert not restarts_after(learning, (a_rank(slots=(slot,), growths={"locked": 1}),))


def test_what_warm_up_has_made_is_not_a_reason_to_start_again(tmp_path: Path) -> None:
    """A slot was as large at the lock as it ever had to be, though nothing was reserved for it."""
    slot = SlotStats(0, 0, 2 * MIB, 0, 2 * MIB, "somebody", locked_bytes=2 * MIB)
    learning = opened(tmp_path, learned_restart="always")
    assert not restarts_after(learning, (a_rank(slots=(slot,), growths={"locked": 1}),))


def test_what_was_larger_than_at_the_lock_is_a_reason_to_start_again(tmp_path: Path) -> None:
    """A reservation of the learned size makes it large enough before it is locked."""
    slot = SlotStats(0, 0, 4 * MIB, 0, 3 * MIB, "somebody", locked_bytes=2 * MIB)
    learning = opened(tmp_path, learned_restart="always")
    assert restarts_after(learning, (a_rank(slots=(slot,), growths={"locked": 1}),))


def test_without_a_directory_nothing_restarts() -> None:
    """With `--learned-dir none` a restart has nothing to use."""
    learning = opened(None, learned_restart="always")
    assert not restarts_after(learning, (rank_with(MIB, rejections=1),))


def test_the_largest_need_of_all_ranks_is_learned(tmp_path: Path) -> None:
    """Every rank reserves the same, so the largest need of each slot counts, and never falls."""
    learning = opened(tmp_path)
    learning.learn((rank_with(3 * MIB), rank_with(5 * MIB, rank=1), rank_with(MIB, ubatch=1)))
    learning.learn((rank_with(2 * MIB),))
    assert spec_of(learning).learned == ((0, 0, 5 * MIB), (1, 0, MIB))


def test_what_was_learned_is_used_by_the_next_process(tmp_path: Path) -> None:
    """The file belongs to the fingerprint, and no other fingerprint finds it."""
    opened(tmp_path).learn((rank_with(5 * MIB),))
    assert spec_of(opened(tmp_path)).learned == ((0, 0, 5 * MIB),)
    other = Learning(WorkspaceSettings(), tmp_path)
    other.open("another")
    assert spec_of(other).learned == ()


def test_what_is_on_disk_is_not_written_again(tmp_path: Path) -> None:
    """A disk that has become slow holds up no restart; what failed is tried again."""
    directory = tmp_path / "state"
    directory.touch()  # where the directory should be
    learning = opened(directory)
    learning.learn((rank_with(3 * MIB),))
    directory.unlink()
    learning.learn((rank_with(2 * MIB),))
    path = learned_store.learned_path(directory, FINGERPRINT)
    assert path.exists()
    path.unlink()
    learning.learn((rank_with(2 * MIB),))
    assert not path.exists()


def test_without_a_directory_it_is_learned_for_this_process_alone() -> None:
    """The next generation uses it, and the disk does not keep it."""
    learning = opened(None)
    learning.learn((rank_with(5 * MIB),))
    assert spec_of(learning).learned == ((0, 0, 5 * MIB),)


def test_an_absurd_need_is_not_learned(tmp_path: Path) -> None:
    """No engine would start with it, and no file could keep it."""
    learning = opened(tmp_path)
    learning.learn((rank_with(2 << 40, rejections=1),))
    assert spec_of(learning).learned == ()


def test_no_need_is_not_worth_a_file(tmp_path: Path) -> None:
    """A model without workspaces leaves no file."""
    opened(tmp_path).learn((rank_with(0),))
    assert list(tmp_path.iterdir()) == []


def test_a_broken_file_is_as_good_as_none(tmp_path: Path) -> None:
    """The file is set aside, and the start continues."""
    learned_store.learned_path(tmp_path, FINGERPRINT).write_bytes(b"\0{]")
    assert spec_of(opened(tmp_path)).learned == ()
    assert len([*tmp_path.glob("*.broken")]) == 1
    assert not [*tmp_path.glob("*.json")]


def test_a_directory_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If a file is in place of the directory, the start continues and logs a warning."""
    place = tmp_path / "file"
    place.touch()
    learning = opened(place)
    learning.learn((rank_with(MIB),))
    assert "cannot save" in caplog.text
    assert spec_of(learning).learned == ((0, 0, MIB),)


def test_the_settings_reach_the_workers(tmp_path: Path) -> None:
    """Floor, headroom, policy and limit arrive as they were set, and what the host keeps."""
    spec = opened(
        tmp_path, reserve_bytes=MIB, headroom=0.5, growth="alongside", growth_limit_bytes=7
    ).spec(3, tmp_path / "stats")
    assert spec == WorkspaceSpec(str(tmp_path / "stats"), 3, MIB, 0.5, "alongside", 7)
    kept = Learning(WorkspaceSettings(), None, kept_host_bytes=8).spec(1, tmp_path)
    assert kept.kept_host_bytes == 8


def test_deny_measures_every_engine(tmp_path: Path) -> None:
    """Growth is allowed until the proof, also in the engine that replaces another."""
    learning = opened(tmp_path, growth="deny")
    for _ in range(2):
        assert spec_of(learning).growth == "alongside"
        assert settled(learning) == ["deny"]


def test_deny_restarts_however_slow_the_start(tmp_path: Path) -> None:
    """A restart reserves what grew while measuring."""
    learning = opened(tmp_path, growth="deny")
    assert restarts_after(learning, (rank_with(MIB),), SLOW_SECONDS)


def test_deny_measures_whatever_an_earlier_run_needed(tmp_path: Path) -> None:
    """It may have been stopped in the middle of its probe, or have had none."""
    opened(tmp_path, growth="deny").learn((rank_with(4 * MIB),))
    learning = opened(tmp_path, growth="deny")
    assert spec_of(learning).learned == ((0, 0, 4 * MIB),)
    assert spec_of(learning).growth == "alongside"
    assert settled(learning) == ["deny"]


GROWN = SlotStats(0, 0, 4 * MIB, 2 * MIB, 3 * MIB, "somebody")
LARGE_ENOUGH = SlotStats(0, 0, 4 * MIB, 4 * MIB, 3 * MIB, "somebody")


@pytest.mark.parametrize(
    ("growth", "slot", "locked_growths", "is_sealed", "holds"),
    [
        ("alongside", GROWN, 1, True, True),
        ("deny", LARGE_ENOUGH, 0, True, True),
        ("deny", GROWN, 1, True, False),
        ("deny", GROWN, 1, False, False),
        ("deny", LARGE_ENOUGH, 1, True, False),
        ("deny", LARGE_ENOUGH, 1, False, False),
    ],
)
def test_with_deny_a_proof_holds_for_the_next_engine_unless_it_took_growth(
    growth: GrowthPolicy,
    slot: SlotStats,
    locked_growths: int,
    tmp_path: Path,
    *,
    is_sealed: bool,
    holds: bool,
) -> None:
    """The next one would be refused what grew, be it a slot or a resource that no slot contains."""
    rank = a_rank(slots=(slot,), growths={"locked": locked_growths}, is_sealed=is_sealed)
    assert opened(tmp_path, growth=growth).holds_for_the_next((rank,)) == holds


@pytest.mark.parametrize("learning_is_off", [True, False])
def test_deny_holds_at_once_where_nothing_may_restart(
    tmp_path: Path, learning_is_off: bool
) -> None:
    """Without a directory, and with `never`, the first request for more is refused."""
    directory = None if learning_is_off else tmp_path
    when = "auto" if learning_is_off else "never"
    learning = opened(directory, growth="deny", learned_restart=when)
    assert spec_of(learning).growth == "deny"
    assert settled(learning) == []


def test_alongside_has_nothing_to_settle(tmp_path: Path) -> None:
    """The policy was in force from the beginning."""
    assert settled(opened(tmp_path, growth="alongside")) == []


def test_what_no_engine_starts_with_is_forgotten(tmp_path: Path) -> None:
    """It is forgotten here and on disk, and not learned again; a smaller need is."""
    learning = opened(tmp_path)
    learning.learn((rank_with(5 * MIB),))
    spec_of(learning)
    settled(learning)
    learning.learn((rank_with(512 * MIB, rejections=1),))
    assert spec_of(learning).learned == ((0, 0, 512 * MIB),)
    assert learning.unlearn()
    spec_of(learning)
    learning.learn((rank_with(512 * MIB, rejections=1),))
    assert spec_of(learning).learned == ((0, 0, 5 * MIB),)
    assert spec_of(opened(tmp_path)).learned == ((0, 0, 5 * MIB),)
    learning.learn((rank_with(6 * MIB),))
    assert spec_of(learning).learned == ((0, 0, 6 * MIB),)


def given_up(directory: Path) -> Learning:
    """Return what knows 300 MiB from disk, and had to start without them."""
    opened(directory).learn((rank_with(300 * MIB),))
    learning = opened(directory)
    spec_of(learning)
    assert learning.unlearn()
    assert spec_of(learning).learned == ()
    return learning


def test_the_same_reservation_is_not_a_reason_to_start_again(tmp_path: Path) -> None:
    """The need that no engine starts with is met again, and would not be reserved."""
    assert not restarts_after(given_up(tmp_path), (rank_with(300 * MIB),))


def test_the_next_process_does_not_try_what_no_engine_starts_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two were proven without it. The log says what is not reserved, and what undoes that."""
    for _ in range(2):
        learning = given_up(tmp_path)
        learning.learn((rank_with(300 * MIB),))
        settled(learning)
    following = opened(tmp_path)
    assert spec_of(following).learned == ()
    assert "300.00 MiB" in caplog.text
    assert str(learned_store.learned_path(tmp_path, FINGERPRINT)) in caplog.text
    assert not restarts_after(following, (rank_with(300 * MIB),))
    settled(following)
    assert restarts_after(following, (rank_with(299 * MIB),))
    assert spec_of(opened(tmp_path)).learned == ((0, 0, 299 * MIB),)


def test_one_failed_start_does_not_cost_the_next_process_its_reservation(tmp_path: Path) -> None:
    """It may have failed for a reason that has passed, with what had served for long."""
    learning = given_up(tmp_path)
    learning.learn((rank_with(300 * MIB),))
    settled(learning)
    assert spec_of(opened(tmp_path)).learned == ((0, 0, 300 * MIB),)


def test_without_a_proof_the_next_process_tries_it_again(tmp_path: Path) -> None:
    """It may be what an engine needs to be proven."""
    learning = given_up(tmp_path)
    learning.learn((rank_with(300 * MIB),))
    assert spec_of(opened(tmp_path)).learned == ((0, 0, 300 * MIB),)


def test_what_was_not_the_cause_of_a_failed_start_is_learned_again(tmp_path: Path) -> None:
    """The start without it fails, too."""
    learning = given_up(tmp_path)
    assert not learning.unlearn()
    spec_of(learning)
    learning.learn((rank_with(300 * MIB),))
    settled(learning)
    assert spec_of(learning).learned == ((0, 0, 300 * MIB),)
    assert spec_of(opened(tmp_path)).learned == ((0, 0, 300 * MIB),)


def test_a_refused_need_is_kept_once_an_engine_has_started_with_it(tmp_path: Path) -> None:
    """There may be too little memory for it. A start that fails later loses nothing of it."""
    learning = opened(tmp_path)
    learning.learn((rank_with(5 * MIB, rejections=1),))
    assert spec_of(opened(tmp_path)).learned == ()
    assert spec_of(learning).learned == ((0, 0, 5 * MIB),)
    learning.learn((rank_with(7 * MIB, rejections=1),))
    assert spec_of(opened(tmp_path)).learned == ((0, 0, 5 * MIB),)


def test_what_a_slot_had_grown_to_is_kept_whatever_it_was_refused(tmp_path: Path) -> None:
    """The next process begins where this one ended, and gets further."""
    learning = opened(tmp_path)
    learning.learn((rank_with(256 * MIB),))
    spec_of(learning)
    slot = SlotStats(0, 0, 512 * MIB, 282 * MIB, 1024 * MIB, "somebody")
    learning.learn((a_rank(slots=(slot,), rejections={"scratch": 1}),))
    assert spec_of(opened(tmp_path)).learned == ((0, 0, 512 * MIB),)


def test_the_headroom_of_a_reservation_is_not_learned(tmp_path: Path) -> None:
    """A need that is refused again and again would make each reservation exceed the last."""
    learning = opened(tmp_path)
    learning.learn((rank_with(256 * MIB),))
    spec_of(learning)
    slot = SlotStats(0, 0, 282 * MIB, 282 * MIB, 1024 * MIB, "somebody")
    learning.learn((a_rank(slots=(slot,), rejections={"scratch": 1}),))
    assert spec_of(opened(tmp_path)).learned == ((0, 0, 256 * MIB),)


def test_a_start_that_fails_with_what_was_proven_teaches_nothing(tmp_path: Path) -> None:
    """The start failed for another reason."""
    learning = opened(tmp_path)
    learning.learn((rank_with(5 * MIB),))
    spec_of(learning)
    settled(learning)
    spec_of(learning)
    assert not learning.unlearn()
    assert spec_of(learning).learned == ((0, 0, 5 * MIB),)
