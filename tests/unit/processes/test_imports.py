"""The garbage collector rests while something large is imported."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.processes.imports import uncollected


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    """What the tests import stays frozen, what a test made does not, and the collector is on."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.enable()


def test_the_collector_rests_and_goes_on() -> None:
    """What was made meanwhile is frozen: no later collection looks at it."""
    before = gc.get_freeze_count()
    with uncollected():
        assert not gc.isenabled()
        made = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    """The next attempt, or the error, is handled as ever."""
    with pytest.raises(ModuleNotFoundError), uncollected():
        importlib.import_module("no_such_module_at_all")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    """Other code has a reason for it."""
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


EXITING = """
from holdfast.processes.imports import uncollected

class Kept:
    def __del__(self):
        print("collected")

with uncollected():
    kept = Kept()
    kept.itself = kept
    del kept
"""


def test_what_is_frozen_is_collected_at_the_exit() -> None:
    """Libraries that count their objects complain of what is left, after our last line."""
    command = [sys.executable, "-c", EXITING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("collected\n", "")
