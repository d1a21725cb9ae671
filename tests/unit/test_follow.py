"""What a follower hands to its processes, and what it remembers of their ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.follow import LocalRanks, ranks_command
from holdfast.nodes import strict_json
from holdfast.nodes.messages import Start
from holdfast.records import Death, RankStats
from node_pairs import SPEC
from sample_status import a_rank

ORDER = Start(3, 1, 2, "10.0.0.1", 20003, ("model", "--tensor-parallel-size", "2"), "f", SPEC)


class Processes:
    """Only remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def start(self, order: Start) -> None:
        self.told.append(order)

    def stop(self, generation: int, reason: str) -> None:
        self.told.append((generation, reason))


class Dialer:
    """Only remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def ranks_changed(
        self, generation: int, ranks: Sequence[RankStats], *, is_compiling: bool
    ) -> None:
        self.told.append((generation, tuple(ranks), is_compiling))

    def engine_lost(self, generation: int, death: Death) -> None:
        self.told.append((generation, death))

    def engine_refused(self, generation: int, line: str, *, is_final: bool) -> None:
        self.told.append((generation, line, is_final))

    def engine_ended(self, generation: int) -> None:
        self.told.append(generation)


def local_ranks() -> tuple[Any, Any, Any]:
    """The ranks of a node, between processes and a dialer that only remember."""
    processes: Any = Processes()
    dialer: Any = Dialer()
    ranks = LocalRanks(processes)
    ranks.dialer = dialer
    return ranks, processes, dialer


def test_the_process_of_the_ranks_gets_the_whole_order(tmp_path: Path) -> None:
    """In a file beside its own, whose content its arguments need not repeat."""
    place = tmp_path / "3"
    place.mkdir()
    program, *_, module, order, directory, lasting = ranks_command(ORDER, place)
    assert (program, module) == (sys.executable, "holdfast.engine.launch.node_ranks")
    assert (Path(order).parent, Path(directory)) == (place, place)
    assert Path(lasting).parent == tmp_path
    written = strict_json.parsed(Path(order).read_bytes())
    assert strict_json.as_record(Start, written) == ORDER


def test_the_ranks_do_not_import_from_where_the_follower_was_started(tmp_path: Path) -> None:
    """As `python -m` would: a checkout of vLLM would hide the package that is installed."""
    (tmp_path / "vllm.py").write_text("raise SystemExit('the wrong one')")
    program, *flags, _, _, _, _ = ranks_command(ORDER, tmp_path)
    find = "import importlib.util as u; print(u.find_spec('vllm').origin)"
    command = [program, *flags[: flags.index("-m")], "-c", find]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert str(tmp_path) not in done.stdout


def test_everything_is_passed_on() -> None:
    """In both directions."""
    ranks, processes, dialer = local_ranks()
    death = Death("worker_exit", "it was killed")
    ranks.start(ORDER)
    ranks.ranks_changed(3, [a_rank()], is_compiling=True)
    ranks.engine_lost(3, death)
    ranks.engine_refused(3, "a line", is_final=True)
    ranks.stop(3, "a reason")
    ranks.engine_ended(3)
    assert processes.told == [ORDER, (3, "a reason")]
    assert dialer.told == [(3, (a_rank(),), True), (3, death), (3, "a line", True), 3]


def test_the_newest_ranks_are_those_that_have_processes() -> None:
    """None before the start and after the end."""
    ranks, _, _ = local_ranks()
    ranks.start(ORDER)
    ranks.ranks_changed(3, [a_rank(steps=1)])
    ranks.ranks_changed(3, [a_rank(steps=2)])
    assert [rank.steps for rank in ranks.newest] == [2]
    ranks.engine_ended(3)
    assert ranks.newest == ()


def test_counters_go_on_when_the_head_is_replaced() -> None:
    """The next head begins again with generation 1."""
    ranks, _, _ = local_ranks()
    for generation in (3, 1):
        ranks.start(replace(ORDER, generation=generation))
        for steps in (1, 5):
            ranks.ranks_changed(generation, [a_rank(generation=generation, steps=steps)])
        ranks.engine_ended(generation)
    assert ranks.totals.ranks()[0, 0]["engine_steps_total"] == {(): 10}
