"""A world of forked ranks, as vLLM makes it with gloo: some ours, and one that may go astray.

A rank is a worker without a model under our hooks. It goes through the start, and says what it
agreed on with the others, or why it could not.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker import workspace

from holdfast.errors import HoldfastError
from holdfast.worker import agreement
from holdfast.worker.hooks import WorkerHooks
from holdfast.workspace import reservers
from holdfast.workspace.plan import MIB, Term, WorkspaceSpec

Moment = Literal["sizing", "length", "warmup", "lock"]
"""Before which of the agreements of a start a rank goes astray."""
Fault = Literal[
    "none", "raises", "comes late", "takes no part", "reduces something else", "fits no length"
]

MAX_TOKENS = 1 << 16
"""That the model knows, where vLLM fits the length."""
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
END_SECONDS = 120.0
"""More than any rank takes to end, whatever the others do."""
ABORTED = "aborted"
"""What a rank says that was sent more than it can take: gloo calls `std::terminate` then."""
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens in one world, where one rank goes astray."""

    directory: Path
    ranks: int
    moment: Moment = "sizing"
    fault: Fault = "none"
    timeout_seconds: float = END_SECONDS
    astray_rank: int = -1
    """Counted from the last one if it is negative."""
    given_seconds: float | None = None
    """Of vLLM's own flag, if it is given."""
    available_bytes: tuple[int, ...] = ()
    """The memory of each rank, if vLLM is to fit the longest context to it: half for the KV cache,
    half for what is reserved."""

    def is_astray(self, rank: int) -> bool:
        """Whether it is the rank that goes astray."""
        return rank == self.astray_rank % self.ranks

    def fits_length(self, rank: int) -> bool:
        """Whether vLLM chooses the longest context, as this rank was told."""
        is_given = self.fault == "fits no length" and self.is_astray(rank)
        return bool(self.available_bytes) and not is_given

    def mark(self, rank: int) -> Path:
        """A file that is there when the rank has come to the moment."""
        return self.directory / f"{rank}.came"

    def end(self, rank: int) -> Path:
        """A file that is there when the rank is done."""
        return self.directory / f"{rank}.ended"


def answers(scenario: Scenario) -> list[str]:
    """What each rank said in the end.

    Raises:
        TimeoutError: one did not end.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(scenario.ranks)]
    processes = [
        context.Process(target=_live, args=(scenario, rank, sender))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    deadline = time.monotonic() + END_SECONDS
    said = []
    try:
        # The last is the last to be asked: it may wait for the others to end.
        for process, (receiver, _) in zip(processes, pipes, strict=True):
            if not receiver.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"a rank of {scenario} said nothing")
            said.append(_word(receiver))
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                raise TimeoutError(f"a rank of {scenario} did not end")
    finally:
        for process, (receiver, _) in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            receiver.close()
    return said


def _word(receiver: Any) -> str:
    """What a rank has said, unless gloo has ended it."""
    with suppress(EOFError):
        return str(receiver.recv())
    return ABORTED


def _live(scenario: Scenario, rank: int, sender: Any) -> None:
    """One process: the start of one rank."""
    agreement.AGREEMENT_SECONDS = scenario.timeout_seconds
    faulthandler.disable()  # gloo aborts a rank that is sent what it does not expect
    torch.set_num_threads(1)  # a fork has none of the threads of OpenMP's pool, and waits for them
    try:
        said = _start(scenario, rank)
    except HoldfastError as error:
        said = f"{type(error).__name__}: {error.line}"
    except (RuntimeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    scenario.end(rank).touch()
    sender.send(said)
    sender.close()


class _AsTheKvCache(EntryPoint):
    """A reserver: a token of the longest context takes what it takes of the KV cache."""

    def load(self) -> Any:
        bytes_per_token = SPEC.page_size_bytes // SPEC.block_size
        return lambda context: [Term("declared", "test", bytes_per_token * context.max_model_len)]


def _start(scenario: Scenario, rank: int) -> str:
    meeting = f"file://{scenario.directory}/meeting"
    parallel_state.init_distributed_environment(scenario.ranks, rank, meeting, rank, "gloo")
    worker = _Worker(scenario, rank)
    # In place of those that are installed, which import much of vLLM in every rank.
    declared: Any = reservers
    declared.entry_points = lambda **_: EntryPoints(
        [_AsTheKvCache("", "", reservers.GROUP)] if scenario.available_bytes else []
    )
    spec = WorkspaceSpec(
        stats_directory=str(scenario.directory),
        generation=1,
        floor_bytes=0 if scenario.available_bytes else (rank + 1) * MIB,
        headroom=0.0,
        growth="alongside",
        growth_limit_bytes=(rank + 1) * MIB,
    )
    config = _followed_config(scenario, is_fitted=scenario.fits_length(rank))
    with WorkerHooks(worker, config, spec).device_initialised():
        pass
    worker.determine_available_memory()
    # EngineCore tells the length then, which is none that is not reserved for.
    config.model_config.max_model_len = 64
    worker.compile_or_warm_up_model()
    manager: Any = workspace.current_workspace_manager()
    limit_bytes = manager._gate.rule.limit_bytes
    return f"{manager.accounting.held_bytes // MIB} MiB, {limit_bytes // MIB} MiB more"


def _followed_config(scenario: Scenario, *, is_fitted: bool) -> Any:
    """What the hooks look at, of a model that vLLM need not know."""
    given_seconds = scenario.given_seconds
    timeout = None if given_seconds is None else timedelta(seconds=given_seconds)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            cpu_distributed_timeout=timeout,
            decode_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
        model_config=SimpleNamespace(
            max_model_len=MAX_TOKENS if is_fitted else 64,
            original_max_model_len=-1 if is_fitted else 64,
            hf_config=None,
        ),
        max_concurrent_batches=1,
    )


class _Worker:
    """What the hooks wrap of a worker of vLLM; the rank that goes astray does so in it."""

    device = torch.device("cpu")

    def __init__(self, scenario: Scenario, rank: int) -> None:
        self.rank = rank
        self.model_runner = SimpleNamespace(model_memory_usage=0)
        self._scenario = scenario
        self._models = iter(("sizing", "warmup"))

    def get_model(self) -> torch.nn.Module:
        """Asked for just before the sizes of a reservation are agreed on."""
        self._come_to(next(self._models, "done"))
        return torch.nn.Module()

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """Asked for just before the longest context is agreed on: one layer, whatever the stage."""
        self._come_to("length")
        return {"layer": SPEC}

    def determine_available_memory(self) -> int:
        available_bytes = self._scenario.available_bytes
        return available_bytes[self.rank] if available_bytes else 64 * MIB

    def compile_or_warm_up_model(self) -> None:
        """Returns just before the growth limit is agreed on."""
        self._come_to("lock")

    def _come_to(self, moment: str) -> None:
        if moment != self._scenario.moment:
            return
        self._scenario.mark(self.rank).touch()
        if self._scenario.is_astray(self.rank):
            _FAULTS[self._scenario.fault](self._scenario)


def _raise(_: Scenario) -> None:
    raise ValueError("a kernel of this rank cannot be compiled")


def _come_last(scenario: Scenario) -> None:
    """All the others are there, or about to be."""
    _wait_for(lambda: all(scenario.mark(rank).exists() for rank in range(scenario.ranks)))


def _take_no_part(scenario: Scenario) -> None:
    """As the rank of another vLLM, which goes on into a collective of the model."""
    others = [rank for rank in range(scenario.ranks) if not scenario.is_astray(rank)]
    _wait_for(lambda: all(scenario.end(rank).exists() for rank in others))
    raise RuntimeError("nobody came to the collective of the model")


def _reduce_something_else(_: Scenario) -> None:
    group = parallel_state.get_world_group().cpu_group
    torch.distributed.all_reduce(torch.ones(1), group=group)
    raise RuntimeError("the other ranks are not those of this model")


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")
        time.sleep(_POLL_SECONDS)


_FAULTS: dict[Fault, Callable[[Scenario], None]] = {
    "none": lambda _: None,
    "raises": _raise,
    "comes late": _come_last,
    "takes no part": _take_no_part,
    "reduces something else": _reduce_something_else,
    "fits no length": lambda _: None,
}
