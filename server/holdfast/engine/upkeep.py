"""What an operator may have a running engine do: sleep, wake, be profiled, forget, save itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.exceptions import ProfilerAlreadyActiveError

from holdfast.engine.workers import asked_to, call_workers
from holdfast.errors import ConflictError
from holdfast.records import (
    SLEEP_TAGS,
    CacheKind,
    EngineFacts,
    SleepLevel,
    SleepTag,
)

SLEEP_DEADLINE_SECONDS = 300.0
"""For weights to be copied to the host, or read again from disk."""
SAVE_DEADLINE_SECONDS = 1800.0


class Upkeep:
    """Of one generation; see `interface.Upkeep`."""

    def __init__(self, llm: Any, facts: EngineFacts) -> None:
        self._llm = llm
        self._facts = facts
        self._asleep: frozenset[SleepTag] = frozenset()
        self._level: SleepLevel = 1
        self._saving = 0

    @property
    def is_resting(self) -> bool:
        """Whether it was told something for which its steps stop."""
        return bool(self._asleep or self._saving)

    async def sleep(self, level: SleepLevel) -> None:
        # Set before the call: its steps stop when the scheduler hears of it, not when it returns.
        self._asleep, self._level = SLEEP_TAGS, level
        async with asked_to("fall asleep", SLEEP_DEADLINE_SECONDS):
            await self._llm.sleep(level, mode="abort")

    async def wake(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        """As promised there. Of level 2 the weights are read again, which vLLM leaves to others."""
        # vLLM wakes nothing if one of the tags is awake already.
        woken = tags & self._asleep
        if not woken:
            return self._asleep
        async with asked_to("wake up", SLEEP_DEADLINE_SECONDS):
            await self._llm.wake_up(sorted(woken))
            if self._level == 2 and "weights" in woken:
                await call_workers(self._llm, "reload_weights")
        self._asleep -= woken
        return self._asleep

    @property
    def has_forgotten_weights(self) -> bool:
        """Whether the last sleep was one after which nothing on the device is what it was."""
        return self._level == 2

    async def start_profile(self, prefix: str | None) -> None:
        self._require_profiler()
        async with asked_to("start the profiler"):
            try:
                await self._llm.start_profile(prefix)
            except ProfilerAlreadyActiveError as error:
                raise ConflictError(
                    "a profile is already being recorded.", remedy="stop it first."
                ) from error

    async def stop_profile(self) -> None:
        self._require_profiler()
        async with asked_to("write the profile", SAVE_DEADLINE_SECONDS):
            with self._resting():
                await self._llm.stop_profile()

    async def reset_caches(self, kinds: frozenset[CacheKind]) -> None:
        resets = {
            "prefix": self._llm.reset_prefix_cache,
            "mm": self._llm.reset_mm_cache,
            "encoder": self._llm.reset_encoder_cache,
        }
        for kind in sorted(kinds):
            async with asked_to(f"empty its {kind} cache"):
                if await resets[kind]() is False:
                    raise ConflictError(
                        f"the {kind} cache is in use.",
                        remedy="try again when no request is running.",
                    )

    async def save_sharded_state(
        self, path: str, *, pattern: str | None, max_size_bytes: int | None
    ) -> None:
        async with asked_to("save its state", SAVE_DEADLINE_SECONDS):
            with self._resting():
                await call_workers(
                    self._llm,
                    "save_sharded_state",
                    path=path,
                    pattern=pattern,
                    max_size=max_size_bytes,
                )

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """While entered, that no step ends is no stall."""
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
