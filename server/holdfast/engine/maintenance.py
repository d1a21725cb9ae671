"""What an operator has one generation of the engine do while it serves, and its sleep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.exceptions import ProfilerAlreadyActiveError

from holdfast.engine.checked_llm import UnsentError
from holdfast.engine.rpc import call_workers, rpc_deadline
from holdfast.errors import ConflictError
from holdfast.labels import SLEEP_TAGS, CacheKind, SleepLevel, SleepTag
from holdfast.records import EngineFacts

SLEEP_DEADLINE_SECONDS = 300.0
"""Enough to copy the weights to the host, or to load them from disk again."""
SAVE_DEADLINE_SECONDS = 1800.0


class Maintenance:
    """Implements `interface.Maintenance` for one generation, and its sleep."""

    def __init__(self, llm: Any, facts: EngineFacts) -> None:
        self._llm = llm
        self._facts = facts
        self._asleep: frozenset[SleepTag] = frozenset()
        self._level: SleepLevel = 1
        self._saving = 0

    @property
    def stops_steps(self) -> bool:
        """Whether the engine was asked for something that keeps it from making steps."""
        return bool(self._asleep or self._saving)

    async def sleep(self, level: SleepLevel) -> None:
        # Set before the call: steps stop as soon as the scheduler knows, not when the call returns.
        self._asleep, self._level = SLEEP_TAGS, level
        # The engine would keep what it is sent asleep, and run it before its weights are back.
        if self._llm.sequences is not None:
            self._llm.sequences.stop(UnsentError)
        async with rpc_deadline("fall asleep", SLEEP_DEADLINE_SECONDS):
            await self._llm.sleep(level, mode="abort")

    async def wake(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        """See `Engine.wake`. After level 2 it loads the weights again, as vLLM does not."""
        # vLLM wakes nothing if one of the tags is already awake.
        woken = tags & self._asleep
        if not woken:
            return self._asleep
        async with rpc_deadline("wake up", SLEEP_DEADLINE_SECONDS):
            if self._level == 2 and "weights" in woken:
                # Before the rest: vLLM schedules again as soon as all of its memory is back.
                await self._llm.wake_up(["weights"])
                await call_workers(self._llm, "reload_weights")
                self._asleep -= {"weights"}
            if rest := woken & self._asleep:
                await self._llm.wake_up(sorted(rest))
                self._asleep -= rest
        if not self._asleep and self._llm.sequences is not None:
            self._llm.sequences.go_on()
        return self._asleep

    @property
    def has_discarded_weights(self) -> bool:
        """Whether the last sleep discarded everything on the device."""
        return self._level == 2

    async def start_profile(self, prefix: str | None) -> None:
        self._require_profiler()
        async with rpc_deadline("start the profiler"):
            try:
                await self._llm.start_profile(prefix)
            except ProfilerAlreadyActiveError as error:
                raise ConflictError(
                    "a profile is already being recorded.", remedy="stop it first."
                ) from error

    async def stop_profile(self) -> None:
        self._require_profiler()
        async with rpc_deadline("write the profile", SAVE_DEADLINE_SECONDS):
            with self._steps_stopped():
                await self._llm.stop_profile()

    async def reset_caches(self, kinds: frozenset[CacheKind]) -> None:
        resets = {
            "prefix": self._llm.reset_prefix_cache,
            "mm": self._llm.reset_mm_cache,
            "encoder": self._llm.reset_encoder_cache,
        }
        # That of prefixes first, since only that one may be in use: then nothing has changed.
        for kind in sorted(kinds, key=lambda kind: (kind != "prefix", kind)):
            async with rpc_deadline(f"empty its {kind} cache"):
                if await resets[kind]() is False:
                    raise ConflictError(
                        f"the {kind} cache is in use.",
                        remedy="try again when no request is running.",
                    )

    async def save_sharded_state(
        self, path: str, *, pattern: str | None, max_size_bytes: int | None
    ) -> None:
        async with rpc_deadline("save its state", SAVE_DEADLINE_SECONDS):
            with self._steps_stopped():
                await call_workers(
                    self._llm,
                    "save_sharded_state",
                    path=path,
                    pattern=pattern,
                    max_size=max_size_bytes,
                )

    @contextmanager
    def _steps_stopped(self) -> Iterator[None]:
        """Mark the absence of steps as intended, not as a stall, while entered."""
        self._saving += 1
        try:
            yield
        finally:
            self._saving -= 1

    def _require_profiler(self) -> None:
        if not self._facts.has_profiler:
            raise ConflictError(
                "no profiler is configured.",
                remedy="start with --profiler-config.profiler=torch "
                "--profiler-config.torch_profiler_dir=/an/absolute/path.",
            )
