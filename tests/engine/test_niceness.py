"""Where cores are few, the front end goes before the engine."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from holdfast.settings import OverloadSettings
from holdfast.workspace import niceness
from servers import Server, descendants

GIVES_WAY = """
import os
from holdfast.workspace import niceness

os.nice({own})
niceness.give_way()
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def nice_values(process: psutil.Process) -> set[int]:
    """Of every thread."""
    return {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()}


def is_of_engine(process: psutil.Process) -> bool:
    """Whether it is an EngineCore or a worker, and not what they are forked from."""
    return any(name in " ".join(process.cmdline()) for name in ("EngineCore", "Worker"))


@pytest.mark.engine
def test_every_thread_of_the_engine_is_nicer_than_the_front_end(demo: Server) -> None:
    """The workers too, by as much and not by twice that; the front end stays as it was."""
    engine = [process for process in descendants(demo.process.pid) if is_of_engine(process)]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert len(engine) >= 2
    assert nice_values(psutil.Process(demo.process.pid)) == {own}
    for process in engine:
        assert nice_values(process) == {own + OverloadSettings().engine_niceness}, process


@pytest.mark.parametrize(("own", "added", "comes_to"), [(0, 4, 4), (2, 0, 2), (9, 4, 9)])
def test_a_process_never_asks_for_more_than_it_has(own: int, added: int, comes_to: int) -> None:
    """Who is nicer already stays so: less takes a privilege that a container does not have."""
    base = os.getpriority(os.PRIO_PROCESS, 0)
    done = subprocess.run(
        [sys.executable, "-c", GIVES_WAY.format(own=own)],
        env=os.environ | niceness.variables(added),
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) == min(base + comes_to, 19)
