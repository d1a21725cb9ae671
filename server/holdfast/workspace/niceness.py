"""Who goes first where cores are few? The front end and the workers, before EngineCore.

A request that waits for a core while EngineCore plans a step is missing in it, and a scrape waits
too; what the front end does for either takes less time than a step. The workers compute the step
that everybody waits for. So EngineCore is nicer than both. Where there are cores for all, niceness
changes nothing (sched(7)). docs/benchmarks.md has the measurements.

All of them are of workers that compute on the CPU. A worker of a GPU waits for what EngineCore
plans, which is then on the critical path, so there it is as nice as the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

NICENESS_VARIABLE = "HOLDFAST_ENGINE_CORE_NICENESS"
"""Of the flag of that name, too."""
CPU_NICENESS = 4
"""Nicer by 10 was like it within the error."""


def engine_core_niceness(given: int | None, *, is_cpu: bool) -> int:
    """What is added to the nice value of an EngineCore, with nothing given for such a device."""
    if given is not None:
        return given
    return CPU_NICENESS if is_cpu else 0


def give_way_to_workers() -> None:
    """Have this EngineCore be nicer than its workers, if they are processes of their own.

    A nice value belongs to a thread and is inherited (setpriority(2)), and no thread gets a lower
    one back without a privilege: so after the workers were started, and before the threads that
    talk to the front end are.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: PLC0415 - large

    added = int(os.environ.get(NICENESS_VARIABLE, "0"))
    MultiprocExecutor._init_executor = _nicer_after(MultiprocExecutor._init_executor, added)  # noqa: SLF001 - what starts the workers has no public name (vLLM 0.32)


def _nicer_after(start_workers: Callable[[Any], None], added: int) -> Callable[[Any], None]:
    def started(executor: Any) -> None:
        start_workers(executor)
        os.nice(added)

    return started
