"""Growth and captured graphs: what was captured keeps its addresses, and a capture allows none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpu_check.core.bench import Bench, Graph, view
from gpu_check.records import CheckFailedError, CheckSkippedError, Measured
from holdfast.workspace.plan import MIB

_NUMBERS = MIB // 4
"""Of four bytes each, so 1 MiB of scratch."""
_ROUNDS = 8
_GROWN_BYTES = 5 * MIB
_POISON = 0xA5


class _Layer:
    """Reads its input, passes it through scratch and writes its output: at fixed addresses."""

    def __init__(self, manager: Any, device: torch.device) -> None:
        self.manager = manager
        self.input = torch.zeros(_NUMBERS, device=device)
        self.output = torch.zeros(_NUMBERS, device=device)

    def run(self) -> None:
        (scratch,) = self.manager.get_simultaneous(((_NUMBERS,), torch.float32))
        scratch.copy_(self.input)
        scratch.mul_(3)
        scratch.add_(1)
        self.output.copy_(scratch)


def growth(bench: Bench) -> Sequence[Measured]:
    """The outputs of a graph, round for round, without growth and with one in the middle."""
    plain, _ = _outputs(bench, grows=False)
    grown, manager = _outputs(bench, grows=True)
    if not torch.equal(plain, grown):
        first = next(i for i in range(_ROUNDS) if not torch.equal(plain[i], grown[i]))
        raise CheckFailedError(f"the graph's output differs in round {first} of {_ROUNDS}")
    accounting = manager.accounting
    if accounting.growths["locked"] != 1 or not accounting.retired_bytes:
        raise CheckFailedError(
            f"growths {accounting.growths}, retired bytes {accounting.retired_bytes}"
        )
    return [
        Measured("rounds with the same output", _ROUNDS),
        Measured("retired", accounting.retired_bytes, "bytes"),
        Measured("grown to", sum(manager.slot_sizes().values()), "bytes"),
    ]


def _outputs(bench: Bench, *, grows: bool) -> tuple[torch.Tensor, Any]:
    manager = bench.manager("alongside")
    layer = _Layer(manager, bench.device)
    view(manager, layer.input.nbytes)
    manager.seal()
    graph = _graph(bench, layer)
    manager.lock()
    others: list[torch.Tensor] = []
    outputs = []
    for number in range(_ROUNDS):
        if grows and number == _ROUNDS // 2:
            view(manager, _GROWN_BYTES).fill_(_POISON)
            # Of its size, so that they are where the old buffer was, if that was freed.
            others = [torch.full_like(layer.input, number) for _ in range(8)]
        layer.input.copy_(torch.arange(_NUMBERS, device=bench.device) + number)
        graph()
        outputs.append(layer.output.clone())
    _synchronize(bench)
    if any(not torch.all(other == _ROUNDS // 2) for other in others):
        raise CheckFailedError("the graph wrote to memory that another tensor had got meanwhile")
    if grows and not torch.all(view(manager, _GROWN_BYTES) == _POISON):
        raise CheckFailedError("the graph wrote to the new buffer, which it knows nothing of")
    return torch.stack(outputs), manager


def no_growth_in_capture(bench: Bench) -> Sequence[Measured]:
    """A request for more inside of a capture is refused, and what was captured is right."""
    manager = bench.manager("alongside")
    layer = _Layer(manager, bench.device)
    view(manager, layer.input.nbytes)
    manager.seal()
    refusals: list[str] = []
    runs: list[None] = []

    def run() -> None:
        layer.run()
        runs.append(None)
        if len(runs) == 1:  # the run before the capture
            return
        try:
            view(manager, _GROWN_BYTES)
        except AssertionError as error:
            refusals.append(str(error))

    before_bytes = sum(manager.slot_sizes().values())
    graph = _captured(bench, run)
    if not refusals:
        raise CheckFailedError("a workspace grew while the stream was captured")
    if sum(manager.slot_sizes().values()) != before_bytes:
        raise CheckFailedError("a refused growth changed the size of the workspace")
    layer.input.fill_(2)
    graph()
    if not torch.all(layer.output == 7):
        raise CheckFailedError("the graph that was captured around a refusal computes wrongly")
    return [Measured("refusal", refusals[0])]


def _graph(bench: Bench, layer: _Layer) -> Graph:
    return _captured(bench, layer.run)


def _captured(bench: Bench, function: Any) -> Graph:
    if bench.capture is None:
        raise CheckSkippedError("the device captures no graphs")
    return bench.capture(function)


def _synchronize(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.synchronize(bench.device)
