"""The demo model with random weights, for tests in which what it says does not matter.

Those in the package make the model larger, and a step of it three times as long on a CPU.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.demo.files import ensure_demo_model
from holdfast.demo.switches import DEFAULT_SWITCHES, DemoSwitches

_NO_WEIGHTS = Path(__file__).with_name("no_trained_weights")


def untrained_demo(directory: Path, switches: DemoSwitches = DEFAULT_SWITCHES) -> Path:
    """The model in a directory of its own below `directory`."""
    return ensure_demo_model(directory, switches, _NO_WEIGHTS)
