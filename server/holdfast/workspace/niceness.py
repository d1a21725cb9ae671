"""Who goes first where the engine and the front end share cores? The front end.

What it does for a request takes less than an engine step: it hands the prompt over, and sends the
tokens on. A request that waits for that while the engine runs is missing in the next step, and a
scrape waits with it. Where there are cores for both, niceness changes nothing (sched(7)).
docs/benchmarks.md has the measurements.
"""

from __future__ import annotations

import os

NICENESS_VARIABLE = "HOLDFAST_ENGINE_NICE_VALUE"
"""The nice value of the engine's processes, not what is added to the front end's."""
_THIS_THREAD = 0
"""setpriority(2): a nice value belongs to a thread, and what it starts has the same."""


def variables(added_niceness: int) -> dict[str, str]:
    """What the processes of the engine find in their environment.

    An absolute value: an EngineCore and the workers it may have spawned or had forked all take it.
    """
    return {NICENESS_VARIABLE: str(os.getpriority(os.PRIO_PROCESS, _THIS_THREAD) + added_niceness)}


def give_way() -> None:
    """Take the nice value of the variable, with all threads that start from here on.

    Who is nicer already stays so: to become less nice takes a privilege.
    """
    if value := os.environ.get(NICENESS_VARIABLE):
        now = os.getpriority(os.PRIO_PROCESS, _THIS_THREAD)
        os.setpriority(os.PRIO_PROCESS, _THIS_THREAD, max(now, int(value)))
