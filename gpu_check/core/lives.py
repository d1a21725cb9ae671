"""Random lives of a manager: what was there at the seal, and all that came later, stays."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gpu_check.core.bench import Bench, view
from gpu_check.records import CheckFailedError, Measured
from holdfast.workspace.plan import MIB, Slot

_LIVES = 1000
_LIVES_ON_CPU = 5
"""Where a life takes long, and shows that the check itself is right."""
_SECONDS = 10.0
_STEPS = 12
_UBATCHES = _LANES = 2
_MAX_BYTES = MIB


class _Witness:
    """Knows every buffer since the seal by its address alone, so that it keeps none alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, buffers: Sequence[torch.Tensor]) -> None:
        """Write a pattern of its own into each buffer that is new."""
        for buffer in buffers:
            storage = buffer.untyped_storage()
            if buffer.numel() and storage.data_ptr() not in self._known:
                pattern = 1 + len(self._known) % 250
                buffer.view(torch.uint8).fill_(pattern)
                self._known[storage.data_ptr()] = (StorageWeakRef(storage), pattern)

    def freed(self) -> str:
        """Which buffer that should be alive is not; empty if all are."""
        dead = (a for a, (reference, _) in self._known.items() if reference.expired())
        return next((f"the buffer at {address:#x} was freed" for address in dead), "")

    def changed(self) -> str:
        """Which of the living buffers has not its pattern any more; empty if all have."""
        for address, (reference, pattern) in self._known.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # noqa: SLF001 - the way back that torch's own sharing of tensors takes
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if not torch.all(content == pattern):
                return f"the buffer at {address:#x} was written to"
        return ""

    def __len__(self) -> int:
        return len(self._known)


def check(bench: Bench) -> Sequence[Measured]:
    """As many lives as fit into the time, each from its own seed; two ubatches and two lanes."""
    wanted = _LIVES_ON_CPU if bench.device.type == "cpu" else _LIVES
    deadline_seconds = time.monotonic() + _SECONDS
    lives = buffers = 0
    while lives < wanted and (not lives or time.monotonic() < deadline_seconds):
        buffers += _live(bench, random.Random(lives), lives)  # noqa: S311 - no secret
        lives += 1
    return [Measured("lives", lives), Measured("buffers watched", buffers)]


def _live(bench: Bench, chance: random.Random, seed: int) -> int:
    manager = bench.manager("alongside", ubatches=_UBATCHES, lanes=_LANES)
    witness = _Witness()
    for _ in range(chance.randrange(4)):
        _ask(bench, manager, chance)
    manager.seal()
    witness.note(_buffers(manager))
    for step in range(_STEPS):
        if step == _STEPS // 3:
            manager.lock()
        else:
            _step(bench, manager, chance)
        witness.note(_buffers(manager))
        if freed := witness.freed():
            raise CheckFailedError(f"life {seed}, step {step}: {freed}")
    if changed := witness.changed():
        raise CheckFailedError(f"life {seed}: {changed}")
    return len(witness)


def _step(bench: Bench, manager: Any, chance: random.Random) -> None:
    kind = chance.randrange(6)
    if kind == 0:
        manager.unlock()
        manager.lock()
    elif kind == 1:
        manager.seal()
    elif kind == 2:
        slot = _slot(chance)
        _at(bench, slot, lambda: manager.get_persistent(chance.randrange(3), (64,), torch.uint8))
    else:
        _ask(bench, manager, chance)
    # What was freed in the step belongs to other code now.
    torch.full((chance.randrange(1, _MAX_BYTES),), 255, dtype=torch.uint8, device=bench.device)


def _ask(bench: Bench, manager: Any, chance: random.Random) -> None:
    size_bytes = chance.randrange(_MAX_BYTES)
    _at(bench, _slot(chance), lambda: view(manager, size_bytes))


def _slot(chance: random.Random) -> Slot:
    return chance.randrange(_UBATCHES), chance.randrange(_LANES)


def _at(bench: Bench, slot: Slot, ask: Any) -> None:
    """Ask as a layer in this ubatch and lane does."""
    ubatch, lane = slot
    first = bench.vllm.dbo_current_ubatch_id
    bench.vllm.dbo_current_ubatch_id = lambda: ubatch
    try:
        with bench.vllm.use_workspace_lane(lane):
            ask()
    finally:
        bench.vllm.dbo_current_ubatch_id = first


def _buffers(manager: Any) -> list[torch.Tensor]:
    """What the manager hands out views of, and its persistent resources."""
    current = [buffer for buffer in manager._current_workspaces if buffer is not None]  # noqa: SLF001 - vLLM's own list, which has no reader
    of_slots = manager._persistent_resources  # noqa: SLF001 - as above
    return [*current, *(tensor for resources in of_slots for tensor in resources.values())]
