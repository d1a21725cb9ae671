"""Runs one half of the probe's steps on a real engine, then the other, and then swaps them.

A script, so that vLLM is not imported into pytest. It prints one JSON list: for each of four runs,
two in each of two engine generations, the steps and which faults of the model were met first.
A fault leaves a persistent resource of its own size in the workspace, so that the sum of all sizes
tells which were met.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.api.auth import Keys
from holdfast.application import Application
from holdfast.cli import parse_serve
from holdfast.demo.switches import DemoFault, DemoSwitches
from holdfast.engine.interface import Engine
from holdfast.labels import StepName
from holdfast.listener.own_socket import own_socket
from holdfast.listener.server import bound_socket
from holdfast.processes import tree
from holdfast.processes.environment import NativeVariables
from holdfast.records import ProbeReport
from holdfast.settings import Suite
from holdfast.telemetry.key_usage import KeyUsage
from untrained import untrained_demo

UNIT_BYTES = 64 * 1024
MAX_MODEL_LEN = 4096
STEP_TOKENS = 704
"""This is not a power of two, so the chunks of a prefill do not end at sizes of the sweep."""
DECODES = 16
FLAGS = (
    "--enforce-eager",
    "--kv-cache-memory-bytes=67108864",
    f"--max-model-len={MAX_MODEL_LEN}",
    f"--max-num-batched-tokens={STEP_TOKENS}",
    f"--max-num-seqs={DECODES}",
    "--learned-restart=always",
    "--port=0",
    "--host=127.0.0.1",
)
_SHAPES: dict[StepName, dict[str, Any]] = {
    "context_sweep": {"when": "context", "threshold": 2048, "until": 2048},
    "full_context": {"when": "context", "threshold": 4 * STEP_TOKENS, "until": 4 * STEP_TOKENS},
    "prefix_continuation": {"when": "continuation", "threshold": 3700},
    "batch_sweep": {"when": "step_tokens", "threshold": 232, "until": 232},
    "full_batch": {"when": "repeated_tokens", "threshold": 300},
    "widest_decode": {"when": "decodes", "threshold": DECODES},
    "mixed": {"when": "mixed_tokens", "threshold": 300},
}
"""For each step of the probe, the shape of an engine step that only it causes."""
_HALVES: tuple[tuple[StepName, ...], ...] = (
    # The continuation finds its prefix cached by the sweep, as it does in the whole suite.
    ("context_sweep", "prefix_continuation", "full_batch", "mixed"),
    ("first_token", "full_context", "batch_sweep", "widest_decode"),
)


def main(directory: Path) -> None:
    """Run both generations, and print the faults that were met."""
    faults = tuple(
        DemoFault(effect="persistent", scratch_bytes=UNIT_BYTES << bit, **shape)
        for bit, shape in enumerate(_SHAPES.values())
    )
    model = untrained_demo(directory, DemoSwitches(faults=faults))
    arguments = [str(model), *FLAGS, f"--learned-dir={directory / 'learned'}"]
    settings = parse_serve(arguments, {})
    with (
        bound_socket(settings.listen) as sock,
        own_socket() as own,
        tempfile.TemporaryDirectory() as runtime,
        asyncio.Runner() as runner,
        tree.owned(Path(runtime), {}),
    ):
        lab = _Lab(
            settings,
            Keys.read((), settings.keys),
            sock,
            Path(runtime),
            own=own,
            usage=KeyUsage(tuple),
            native_variables=NativeVariables(None, ()),
            end_now=partial(sys.exit, 1),
        )
        lab.met = []
        runner.run(lab.run())
    print(json.dumps(lab.met))  # noqa: T201 - read by the test


class _Lab(Application):
    """Holdfast with an experiment in place of its probe."""

    met: list[tuple[tuple[StepName, ...], list[StepName]]]

    def prober(self, engine: Engine) -> Any:
        """Return the experiment of this generation."""
        return _Experiment(self, engine, super().prober(engine))


class _Experiment:
    """Runs both halves in one generation, and swaps them in the second."""

    def __init__(self, lab: _Lab, engine: Engine, prober: Any) -> None:
        self._lab = lab
        self._engine = engine
        self._prober = prober

    async def run(self, *, suite: Suite | None = None) -> ProbeReport:
        """Run the halves, and then request a second generation, or the end."""
        del suite
        is_first = self._engine.generation == 1
        for half in _HALVES if is_first else reversed(_HALVES):
            before = self._held_units()
            report: ProbeReport = await self._prober.run(half)
            if not report.passed:
                return report
            gained = self._held_units() & ~before
            met = [name for bit, name in enumerate(_SHAPES) if gained >> bit & 1]
            self._lab.met.append((half, met))
        supervisor = self._lab._supervisor
        if is_first:
            supervisor.request_restart("the halves in another order")
        else:
            supervisor.request_stop()
        # After a report that fails, the supervisor waits for the death that was requested.
        return ProbeReport("worst-case", not is_first, False, 0, 0.0, ())

    def _held_units(self) -> int:
        return self._engine.ranks()[0].persistent_bytes // UNIT_BYTES


if __name__ == "__main__":
    main(Path(sys.argv[1]))
