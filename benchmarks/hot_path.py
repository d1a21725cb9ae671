"""What does one request for workspace cost? vLLM's manager and ours, in pairs in one run.

    python benchmarks/hot_path.py
    python benchmarks/hot_path.py --pairs 21 --json

Three tensors of a known spec, as an attention layer asks for them. Who is first alternates. Beside
it: what counting the high water costs (it is done when a spec is new, and never when it is known),
what a call allocates, and what 100,000 different specs leave in memory.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import timeit
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.v1.worker import workspace

import pairs
from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.plan import MIB, Reservation
from holdfast.workspace.stats import StatsWriter

SPECS = (((4, 128), torch.bfloat16), ((256, 3), torch.int32), ((7,), torch.int32))
CPU = torch.device("cpu")
CALLS = 20_000
ALLOCATION_CALLS = 10_000
DIFFERENT_SPECS = 100_000
_COUNTING = ("holdfast, counted", "holdfast, not counted")


class _UncountedManager(WorkspaceManager):
    """Ours, without entering any need in the accounting."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.accounting.record_request = lambda *_: None  # type: ignore[method-assign]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser, pairs=11)
    arguments = pairs.parsed(parser)
    with tempfile.TemporaryDirectory() as directory:
        pairs.show(_findings(Path(directory), arguments.pairs), arguments)


def _findings(directory: Path, count: int) -> pairs.Findings:
    with StatsWriter(directory, engine=0, rank=0, generation=1) as stats:
        managers = _managers(stats)
        known = _microseconds(managers, count, _known)
        new = _microseconds({side: managers[side] for side in _COUNTING}, count, _new)
        return pairs.Findings(
            "hot_path",
            f"One request for workspace, {count} pairs of {CALLS:,} calls",
            [
                _measure("a known spec, µs", known, ("holdfast", "vllm"), "<= 0.05"),
                _measure("counting in a known spec, µs", known, _COUNTING),
                _measure("counting in a new spec, µs", new, _COUNTING),
            ],
            {
                "allocation": _allocation(managers["holdfast"]),
                "different_specs": _different_specs(stats),
            },
        )


def _measure(
    label: str, times: Mapping[str, list[float]], sides: tuple[str, str], goal: str = ""
) -> pairs.Measure:
    return pairs.Measure(label, {side: times[side] for side in sides}, 2, goal)


def _managers(stats: StatsWriter) -> dict[str, Any]:
    managers = {
        "vllm": workspace.WorkspaceManager(CPU),
        "holdfast": WorkspaceManager(CPU),
        "holdfast, counted": WorkspaceManager(CPU),
        "holdfast, not counted": _UncountedManager(),
    }
    for side, manager in managers.items():
        if side == "vllm":  # it cannot allocate where there is no accelerator, only hand out
            manager._current_workspaces[0] = torch.empty(2 * MIB, dtype=torch.uint8)  # noqa: SLF001
        else:
            manager.bind(stats, "deny")
            manager.reserve([Reservation((0, 0), (), 2 * MIB)])
        manager.get_simultaneous(*SPECS)
        manager.lock()
    return managers


def _microseconds(
    managers: Mapping[str, Any], count: int, measure: Callable[[Any, int], float]
) -> dict[str, list[float]]:
    """One number for each side and pair; the first pair warms up and is not kept."""
    found: dict[str, list[float]] = {side: [] for side in managers}
    for pair in range(count + 1):
        for side in pairs.ordered(pair, list(managers)):
            found[side].append(measure(managers[side], pair))
    return {side: times[1:] for side, times in found.items()}


def _known(manager: Any, _: int) -> float:
    ask = manager.get_simultaneous
    return timeit.timeit(lambda: ask(*SPECS), number=CALLS) / CALLS * 1e6


def _new(manager: Any, pair: int) -> float:
    calls = 500
    specs = iter([((pair * calls + number + 1,), torch.uint8) for number in range(calls)])
    ask = manager.get_simultaneous
    return timeit.timeit(lambda: ask(next(specs)), number=calls) / calls * 1e6


def _allocation(manager: Any) -> dict[str, float]:
    """What a call leaves, and what it holds while its answer lives: the new list alone."""
    ask = manager.get_simultaneous
    ask(*SPECS)
    gc.collect()
    gc.disable()
    answers: list[Any] = [None] * ALLOCATION_CALLS
    before = sys.getallocatedblocks()
    for _ in range(ALLOCATION_CALLS):
        ask(*SPECS)
    left = sys.getallocatedblocks() - before
    before = sys.getallocatedblocks()
    for number in range(ALLOCATION_CALLS):
        answers[number] = ask(*SPECS)
    held = sys.getallocatedblocks() - before
    gc.enable()
    return {
        "blocks_left_per_call": round(left / ALLOCATION_CALLS, 3),
        "blocks_of_one_answer": round(held / ALLOCATION_CALLS, 3),
        "blocks_of_one_list": _list_blocks(),
        "tensors_made": len({id(tensor) for answer in answers for tensor in answer}) - len(SPECS),
    }


def _list_blocks() -> float:
    views = (1, 2, 3)
    lists: list[Any] = [None] * ALLOCATION_CALLS
    gc.collect()
    before = sys.getallocatedblocks()
    for number in range(ALLOCATION_CALLS):
        lists[number] = [*views]
    return round((sys.getallocatedblocks() - before) / ALLOCATION_CALLS, 3)


def _different_specs(stats: StatsWriter) -> dict[str, float]:
    """Host memory after a tenth and after all of the specs; bounded if it is about the same."""
    manager = WorkspaceManager(CPU)
    manager.bind(stats, "deny")
    manager.reserve([Reservation((0, 0), (), 2 * MIB)])
    tracemalloc.start()
    marks = []
    for number in range(1, DIFFERENT_SPECS + 1):
        manager.get_simultaneous(((number,), torch.uint8))
        if number % (DIFFERENT_SPECS // 10) == 0:
            marks.append(tracemalloc.get_traced_memory()[0] / 1024)
    peak = tracemalloc.get_traced_memory()[1] / 1024
    tracemalloc.stop()
    return {
        "count": DIFFERENT_SPECS,
        "kib_after_a_tenth": round(marks[0], 1),
        "kib_after_all": round(marks[-1], 1),
        "kib_at_the_peak": round(peak, 1),
    }


if __name__ == "__main__":
    main()
