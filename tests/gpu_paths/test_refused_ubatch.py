"""A workspace that is refused to a microbatch, whose thread vLLM hears little or nothing of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.worker import workspace

from gpu_paths.async_worker import Rank, followed_rank, scheduled
from holdfast.processes.deaths import Evidence, classify
from holdfast.workspace.plan import MIB
from workspace_managers import view

WAIT_SECONDS = 60.0


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    """One that grants no growth any more."""
    with followed_rank(tmp_path) as one:
        manager: Any = workspace.current_workspace_manager()
        view(manager, MIB)
        one.hooks.set_growth("deny")
        manager.lock()
        yield one


def _in_thread(work: Callable[[], Any]) -> BaseException:
    """What `work` raised in a thread of its own, as a ubatch has it."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except AssertionError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT_SECONDS)
    (error,) = raised
    return error


def _ask_for_too_much() -> None:
    manager: Any = workspace.current_workspace_manager()
    view(manager, 8 * MIB)


def _wrapped() -> None:
    """The runner of GPUs (`UBatchRunner`, 0.32)."""
    raise RuntimeError("Microbatch 1 of 2 failed") from _in_thread(_ask_for_too_much)


def _forgotten() -> None:
    """The older one (`_run_ubatches`, 0.32), which has one result too few."""
    _in_thread(_ask_for_too_much)
    raise IndexError("list index out of range")


@pytest.mark.parametrize("execute_model", [_wrapped, _forgotten])
def test_the_refusal_is_why_the_engine_died(rank: Rank, execute_model: Callable[[], Any]) -> None:
    """Whatever vLLM makes of it; the proof is doubted then, and the suite runs again."""
    with pytest.raises((RuntimeError, IndexError)):
        rank.hooks.step(scheduled("long"), execute_model)
    death = classify(Evidence({}, ranks=(rank.stats,)))
    assert death.cause == "workspace_rejection"
    assert "Workspace is locked" in death.reason


def test_the_refusal_is_seen_while_the_other_microbatch_waits(rank: Rank) -> None:
    """Nothing is raised where the worker could see it: they hand control to each other."""

    def hang() -> None:
        _in_thread(_ask_for_too_much)
        assert classify(Evidence({}, ranks=(rank.stats,))).cause == "workspace_rejection"

    rank.hooks.step(scheduled("long"), hang)


def test_a_refusal_in_the_thread_of_the_steps_is_told_by_what_it_raises(rank: Rank) -> None:
    """Who asks there may go on without the memory."""

    def go_on() -> str:
        with pytest.raises(AssertionError, match="Workspace is locked"):
            _ask_for_too_much()
        return "tokens"

    assert rank.hooks.step(scheduled("short"), go_on) == "tokens"
    assert not rank.stats.fatal_error
    assert sum(rank.stats.rejections.values()) == 1
