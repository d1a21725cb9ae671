"""Where cores are few, EngineCore comes last."""

from __future__ import annotations

import os

import pytest

from holdfast.workspace.niceness import CPU_NICENESS
from servers import Server, descendants

pytestmark = pytest.mark.engine


def nice_values(server: Server, title: str) -> set[int]:
    """Of the main threads of the processes of the engine with such a title."""
    return {
        os.getpriority(os.PRIO_PROCESS, process.pid)
        for process in descendants(server.process.pid)
        if title in " ".join(process.cmdline())
    }


def test_engine_core_is_nicer_than_its_workers_and_the_front_end(demo: Server) -> None:
    """By the flag's number, however the workers were started: forked, or spawned by EngineCore."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice_values(demo, "EngineCore") == {own + CPU_NICENESS}
    assert nice_values(demo, "Worker") == {own}
    assert os.getpriority(os.PRIO_PROCESS, demo.process.pid) == own
