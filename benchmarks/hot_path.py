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
import json
import sys
import tempfile
import timeit
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from vllm.v1.worker import workspace

from holdfast.versions import vllm_version
from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.plan import MIB, Reservation
from holdfast.workspace.stats import StatsWriter

SPECS = (((4, 128), torch.bfloat16), ((256, 3), torch.int32), ((7,), torch.int32))
CPU = torch.device("cpu")
CALLS = 20_000
ALLOCATION_CALLS = 10_000
DIFFERENT_SPECS = 100_000


class _UncountedManager(WorkspaceManager):
    """Ours, without entering any need in the books."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.books.asked = lambda *_: None  # type: ignore[method-assign]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=11, help="at least 5 (default: 11)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if arguments.pairs < 5:
        parser.error("fewer than 5 pairs say nothing")
    with tempfile.TemporaryDirectory() as directory:
        report = _report(Path(directory), arguments.pairs)
    print(json.dumps(report, indent=2) if arguments.json else _table(report))


def _report(directory: Path, pairs: int) -> dict[str, Any]:
    with StatsWriter(directory, engine=0, rank=0, generation=1) as stats:
        managers = _managers(stats)
        known = _microseconds(managers, pairs, _known)
        new = _microseconds(
            {side: managers[side] for side in ("holdfast, counted", "holdfast, not counted")},
            pairs,
            _new,
        )
        return {
            "vllm": vllm_version(),
            "python": sys.version.split()[0],
            "pairs": pairs,
            "known_spec": {side: _spread(times) for side, times in known.items()},
            "times_faster": _spread(_ratios(known, "vllm", "holdfast")),
            "counting_costs_times": _spread(
                _ratios(known, "holdfast, counted", "holdfast, not counted")
            ),
            "new_spec": {side: _spread(times) for side, times in new.items()},
            "allocation": _allocation(managers["holdfast"]),
            "different_specs": _different_specs(stats),
        }


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
    managers: Mapping[str, Any], pairs: int, measure: Callable[[Any, int], float]
) -> dict[str, list[float]]:
    """One number for each side and pair; the first pair warms up and is not kept."""
    found: dict[str, list[float]] = {side: [] for side in managers}
    for pair in range(pairs + 1):
        order = list(managers) if pair % 2 else list(managers)[::-1]
        for side in order:
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


def _ratios(times: Mapping[str, list[float]], above: str, below: str) -> list[float]:
    return [first / second for first, second in zip(times[above], times[below], strict=True)]


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(median(values), 3),
        "least": round(min(values), 3),
        "most": round(max(values), 3),
    }


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


def _table(report: Mapping[str, Any]) -> str:
    lines = [f"vLLM {report['vllm']}, Python {report['python']}, {report['pairs']} pairs", ""]
    lines.append(f"{'microseconds a call':36}{'median':>9}{'least':>9}{'most':>9}")
    for kind in ("known_spec", "new_spec"):
        for side, values in report[kind].items():
            lines.append(_row(f"{kind.replace('_', ' ')}: {side}", values))
    lines += ["", f"{'ratio in a pair':36}{'median':>9}{'least':>9}{'most':>9}"]
    lines.append(_row("vllm / holdfast", report["times_faster"]))
    lines.append(_row("counted / not counted, known", report["counting_costs_times"]))
    for kind in ("allocation", "different_specs"):
        lines += ["", kind.replace("_", " ")]
        lines += [
            f"  {name.replace('_', ' '):34}{value:>9}" for name, value in report[kind].items()
        ]
    return "\n".join(lines)


def _row(name: str, values: Mapping[str, float]) -> str:
    return f"{name:36}{values['median']:>9}{values['least']:>9}{values['most']:>9}"


if __name__ == "__main__":
    main()
