"""Hooks around one worker: reserve before the KV cache is sized, lock after warm-up, count steps.

The order of vLLM's start (0.32, 0.33): init_device -> load_model -> determine_available_memory ->
initialize_from_config -> compile_or_warm_up_model. The reservation stands at the start of
`determine_available_memory`, resident during the whole profile, so that the KV budget counts it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker import workspace

from holdfast.labels import StartPhase
from holdfast.worker.agreement import (
    Subject,
    fitted_kv_bytes,
    fitted_tokens,
    is_length_fitted,
    largest,
    smallest,
    with_length,
)
from holdfast.worker.step_requests import StepRequests
from holdfast.worker.steps import StepTracker
from holdfast.workspace.manager import WorkspaceManager, bound_class
from holdfast.workspace.memory_ledger import (
    MemoryLedger,
    as_table,
    is_unified_memory,
    kept_bytes,
)
from holdfast.workspace.plan import (
    GrowthPolicy,
    Reservation,
    WorkspaceSpec,
    growth_limit_bytes,
    plan_reservations,
)
from holdfast.workspace.reservers import ReserverContext, declared_terms
from holdfast.workspace.reservers.lamport import lamport_bytes
from holdfast.workspace.stats import StatsWriter

_ORDERLY_EXITS = (SystemExit, KeyboardInterrupt)
"""How vLLM's worker obeys a signal in the middle of its work: these are not failures."""

logger = logging.getLogger("vllm.holdfast")


class WorkerHooks:
    """Hooks around one worker of vLLM, with its workspace manager and its stats file."""

    def __init__(
        self, worker: Any, vllm_config: Any, spec: WorkspaceSpec, *, shared: Path | None = None
    ) -> None:
        """Start writing its files; `shared` says where in memory, see `stats.mapped_files`.

        Raises:
            OSError: there is not enough room for them.
        """
        self._worker = worker
        self._vllm_config = vllm_config
        self._spec = spec
        self._growth: GrowthPolicy = spec.growth
        self._agreed_limit_bytes: int | None = None
        """The growth limit of the newest lock; None before that."""
        self._directory = Path(spec.stats_directory)
        self._stats = StatsWriter(
            self._directory,
            engine=vllm_config.parallel_config.data_parallel_index,
            rank=worker.rank,
            generation=spec.generation,
            shared=shared,
        )
        self._ledger = MemoryLedger(worker, self._stats)
        self._is_started = False
        requests = StepRequests(
            self._directory,
            engine=vllm_config.parallel_config.data_parallel_index,
            rank=worker.rank,
            max_requests=vllm_config.scheduler_config.max_num_seqs,
            max_steps=vllm_config.max_concurrent_batches,
            shared=shared,
        )
        self._steps = StepTracker(
            vllm_config, worker.rank, self._stats, requests, self._record_fatal_error
        )

    @contextmanager
    def device_initialised(self) -> Iterator[None]:
        """Wrap `init_device`; on leaving, hook the rest of the start."""
        try:
            # vLLM looks the class up at each call, so a manager that replaces this one is ours too.
            workspace.WorkspaceManager = bound_class(self._bind)
            if current_platform.is_cpu() and not workspace.is_workspace_manager_initialized():
                # vLLM creates no manager on the CPU, so the mechanism would go untested there.
                workspace.init_workspace_manager(torch.device("cpu"), 1, 1)
            yield
        except BaseException as error:
            self._record_fatal_error(error)
            raise
        self._bind(self._manager)  # one that existed before
        is_unified = is_unified_memory(self._worker.device)
        self._stats.update(lambda report: replace(report, is_unified_memory=is_unified))
        self._wrap("load_model", self._load)
        self._wrap("determine_available_memory", self._size_kv_cache)
        self._wrap("initialize_from_config", self._allocate_kv_cache)
        self._wrap("compile_or_warm_up_model", self._warm_up)
        self._wrap("sample_tokens", self._steps.sample, is_start=False)
        self._wrap("execute_dummy_batch", lambda call: call(), is_start=False)
        self._seal_before_capture()

    def step(self, scheduler_output: Any, execute_model: Callable[[], Any]) -> Any:
        """Return what `execute_model` returns; record a failure before raising it.

        vLLM also calls it with nothing scheduled, to report finished requests: that is not a step.
        """
        if not scheduler_output.total_num_scheduled_tokens:
            return execute_model()
        try:
            return self._steps.execute(scheduler_output, execute_model)
        except BaseException as error:
            self._record_fatal_error(error)
            raise

    def set_growth(self, policy: GrowthPolicy) -> None:
        """Change how requests for more workspace are treated after the lock."""
        self._growth = policy
        self._manager.set_policy(policy)
        self._report_growth_limit()

    def _report_growth_limit(self) -> None:
        limit_bytes = self._agreed_limit_bytes if self._growth == "alongside" else None
        self._stats.update(lambda report: replace(report, growth_limit_bytes=limit_bytes))

    def _bind(self, manager: WorkspaceManager) -> None:
        manager.bind(
            self._stats, policy=self._growth, growth_limit_bytes=self._spec.growth_limit_bytes
        )

    @property
    def _manager(self) -> WorkspaceManager:
        # Looked up each time: vLLM replaces the manager when it rebuilds an elastic engine.
        manager = workspace.current_workspace_manager()
        if not isinstance(manager, WorkspaceManager):
            raise TypeError(
                "vLLM's own workspace manager is in use; another plugin replaced Holdfast's"
            )
        return manager

    def _wrap(
        self, name: str, around: Callable[[Callable[[], Any]], Any], *, is_start: bool = True
    ) -> None:
        """Wrap a method of the worker, if it has it: record a failure before raising it."""
        method = getattr(self._worker, name, None)
        if method is None:
            return

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # vLLM starts a worker again when it rebuilds an elastic engine.
            is_fatal = not (is_start and self._is_started)
            try:
                return around(lambda: method(*args, **kwargs))
            except BaseException as error:
                if is_fatal:
                    self._record_fatal_error(error)
                raise

        setattr(self._worker, name, wrapped)

    def _seal_before_capture(self) -> None:
        """Seal the manager just before the first lasting graph is captured, if any is."""
        runner = self._worker.model_runner
        capture = getattr(runner, "capture_model", None)
        if capture is None:
            return

        @functools.wraps(capture)
        def sealed(*args: Any, **kwargs: Any) -> Any:
            # vLLM discards the graphs of `profile_only` before it allocates the KV cache.
            if kwargs.get("profile_only", args[:1] == (True,)):
                return capture(*args, **kwargs)
            if _captures_graphs(runner):
                self._manager.seal()
            size_bytes = capture(*args, **kwargs)
            self._ledger.record_graphs(size_bytes)
            return size_bytes

        runner.capture_model = sealed

    def _record_fatal_error(self, error: BaseException) -> None:
        if not isinstance(error, _ORDERLY_EXITS):
            self._stats.fatal_error(f"{type(error).__name__}: {error}")

    def _phase(self, name: StartPhase) -> None:
        phase = {name: time.monotonic()}
        self._stats.update(lambda report: replace(report, phases={**report.phases, **phase}))

    def _load(self, call: Callable[[], Any]) -> Any:
        self._phase("load")
        before_bytes = self._manager.accounting.held_bytes
        answer = call()
        made_bytes = self._manager.accounting.held_bytes - before_bytes
        self._ledger.record_weights(made_workspace_bytes=made_bytes)
        if held_bytes := lamport_bytes():
            self._stats.update(lambda report: replace(report, lamport_bytes=held_bytes))
        return answer

    def _size_kv_cache(self, call: Callable[[], int]) -> int:
        self._phase("kv_sizing")
        is_fitted = is_length_fitted(self._vllm_config)
        # A model's longest context may not fit, and neither may the reservation for it.
        self._reserve(with_length(self._vllm_config, 1) if is_fitted else self._vllm_config)
        self._ledger.begin_sizing()
        available_bytes = call()
        self._ledger.record_sizing(workspace_bytes=self._manager.accounting.held_bytes)
        if self._vllm_config.cache_config.kv_cache_memory_bytes is not None:
            available_bytes = self._deduct(available_bytes)
        return self._reserve_longest_context(available_bytes) if is_fitted else available_bytes

    def _deduct(self, given_bytes: int) -> int:
        """Deduct the reservation from a given KV cache size, which bypasses vLLM's own sizing.

        Without Holdfast, workspaces would have grown as needed beside the given size.
        """
        reserved_bytes = self._manager.unused_bytes()
        if reserved_bytes >= given_bytes:
            raise ValueError(
                f"the workspaces reserve {reserved_bytes} bytes, but the KV cache was given only "
                f"{given_bytes} bytes: raise --kv-cache-memory-bytes (VLLM_CPU_KVCACHE_SPACE)"
            )
        return given_bytes - reserved_bytes

    def _reserve_longest_context(self, available_bytes: int) -> int:
        """Reserve for the longest context that fits beside it; return what the KV cache may get.

        The context must fit in every rank's memory: vLLM takes the shortest, while ranks that each
        reserved for their own would all reserve what the longest takes.
        """
        config, accounting = self._vllm_config, self._manager.accounting
        specs, before_bytes = self._worker.get_kv_cache_spec(), accounting.held_bytes
        tokens = fitted_tokens(config, specs, available_bytes, self._missing_bytes)
        agreed_tokens = self._smallest(max(1, tokens), Subject.CONTEXT_LENGTH)
        self._reserve(with_length(config, agreed_tokens))
        left_bytes = available_bytes - (accounting.held_bytes - before_bytes)
        return fitted_kv_bytes(config, specs, left_bytes, agreed_tokens, self._missing_bytes)

    def _missing_bytes(self, tokens: int) -> int:
        """Return how much a reservation for contexts of this length would add."""
        config = with_length(self._vllm_config, tokens)
        sizes = self._manager.slot_sizes()
        planned = self._planned(config, is_logged=False)
        return sum(max(0, each.size_bytes - sizes[each.slot]) for each in planned)

    def _allocate_kv_cache(self, call: Callable[[], Any]) -> Any:
        self._phase("kv_cache")
        return call()

    def _warm_up(self, call: Callable[[], Any]) -> Any:
        self._phase("warmup")
        # Repeated: a model without KV cache or a worker that joins an elastic engine skips sizing.
        self._reserve(self._vllm_config)
        answer = call()
        self._lock()
        self._is_started = True
        self._phase("locked")
        self._close_ledger()
        return answer

    def _close_ledger(self) -> None:
        ledger = self._ledger
        ledger.finish(workspace_bytes=self._manager.accounting.held_bytes)
        engine = self._vllm_config.parallel_config.data_parallel_index
        title = f"Memory of rank {self._worker.rank} of engine {engine}:"
        logger.info("%s", as_table(title, ledger.sizes, ledger.used_bytes()))

    def _reserve(self, config: Any) -> None:
        manager = self._manager
        manager.reserve(self._agreed(self._planned(config)))
        manager.equalize_ubatches()

    def _planned(self, config: Any, *, is_logged: bool = True) -> tuple[Reservation, ...]:
        slots = self._manager.slots
        scheduler, model = config.scheduler_config, config.model_config
        # Not every runner of vLLM has it.
        ask_for_draft = getattr(self._worker.model_runner, "get_draft_model", None)
        context = ReserverContext(
            vllm_config=config,
            max_model_len=model.max_model_len,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            hf_config=model.hf_config,
            model=self._worker.get_model(),
            draft_model=ask_for_draft() if ask_for_draft is not None else None,
            draft_lane=max(lane for _, lane in slots),
        )
        return plan_reservations(self._spec, slots, declared_terms(context, is_logged=is_logged))

    def _lock(self) -> None:
        """Lock the manager with a growth limit that every rank can hold.

        A rank that runs out of memory alone hangs the others.
        """
        manager = self._manager
        sizes = manager.slot_sizes()
        wanted_bytes = growth_limit_bytes(self._spec.growth_limit_bytes, sizes)
        kept = kept_bytes(self._worker.device, self._spec.kept_host_bytes)
        free_bytes = self._ledger.growable_bytes(kept)
        limit_bytes = self._smallest(min(wanted_bytes, free_bytes), Subject.GROWTH_LIMIT)
        manager.lock(limit_bytes=limit_bytes)
        self._agreed_limit_bytes = limit_bytes
        self._report_growth_limit()

    def _agreed(self, reservations: tuple[Reservation, ...]) -> tuple[Reservation, ...]:
        """Take the largest size of each slot over all ranks, so all size the KV cache alike."""
        sizes = [reservation.size_bytes for reservation in reservations]
        agreed = largest(sizes, Subject.RESERVATION, self._vllm_config.parallel_config)
        return tuple(
            Reservation(reservation.slot, reservation.terms, size_bytes)
            for reservation, size_bytes in zip(reservations, agreed, strict=True)
        )

    def _smallest(self, value: int, subject: Subject) -> int:
        return smallest([value], subject, self._vllm_config.parallel_config)[0]


def _captures_graphs(runner: Any) -> bool:
    """Whether `capture_model` captures any graph, by what it asks itself (0.32, 0.33)."""
    if not hasattr(runner, "needs_cudagraph_capture"):  # V1
        return bool(runner.compilation_config.cudagraph_mode != CUDAGraphMode.NONE)
    # That of vLLM's runner for encoders alone always says no.
    state = runner.model_state
    has_encoder_graphs = state.supports_mm_inputs and state.encoder_runner.has_cudagraph()
    return bool(has_encoder_graphs or runner.needs_cudagraph_capture())
