"""Waits for a dead engine's memory: the driver may free it only after the process has ended.

An engine that starts too early counts the old one's share as taken, and sizes its KV cache for the
rest or fails. NVML tells how much is taken, and unlike a CUDA context it takes no memory itself. On
the CPU there is nothing to wait for: the kernel frees a process's memory before it reports its end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from vllm.platforms import current_platform
from vllm.third_party import pynvml

from holdfast.atomic_files import read_record, write_atomically
from holdfast.workspace.plan import MIB

MARGIN_BYTES = 512 * MIB
"""How much other processes on the device may take meanwhile."""
HOST_MARGIN_SHARE = 0.03
"""The share of the host's memory that its other processes may take, if the device uses it."""
POLL_SECONDS = 0.2
RETURN_DEADLINE_SECONDS = 30.0
READ_DEADLINE_SECONDS = 10.0
"""How long the driver may take to answer; it takes milliseconds unless it hangs."""

logger = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class TakenMemory:
    """How much of the devices is taken, and how much more other processes may take."""

    used_bytes: int
    margin_bytes: int = MARGIN_BYTES


class DeviceMemory:
    """Compares the memory taken now with that before the first engine."""

    def __init__(
        self, read: Callable[[], TakenMemory | None], baseline_bytes: int | None = None
    ) -> None:
        """`baseline_bytes` was taken before the first engine, if that has started already."""
        self._read = read
        self.baseline_bytes = baseline_bytes
        """What was taken before the first engine; None before it, or if that is unknown."""

    async def until_returned(self, deadline_seconds: float = RETURN_DEADLINE_SECONDS) -> None:
        """Return when no more is taken than at the first call, or with a warning at the deadline.

        The start goes on even if another process has taken it: vLLM reports what it lacks.
        """
        taken = await self._reading()
        if self.baseline_bytes is None:
            self.baseline_bytes = None if taken is None else taken.used_bytes
            return
        deadline = time.monotonic() + deadline_seconds
        while taken is not None:
            more_bytes = taken.used_bytes - self.baseline_bytes
            if more_bytes <= taken.margin_bytes:
                return
            if time.monotonic() > deadline:
                logger.warning(
                    "the device has %d MiB more in use than before the first engine",
                    more_bytes // MIB,
                )
                return
            await asyncio.sleep(POLL_SECONDS)
            taken = await self._reading()

    async def _reading(self) -> TakenMemory | None:
        """Return what is taken now; None if that is unknown, or the driver hangs."""
        answer: Future[TakenMemory | None] = Future()
        # What hangs in the driver cannot be cancelled. A daemon does not keep the process.
        threading.Thread(
            target=_answer, args=(self._read, answer), name="device memory", daemon=True
        ).start()
        try:
            async with asyncio.timeout(READ_DEADLINE_SECONDS):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            logger.warning(
                "the driver did not say within %.0f s how much memory is in use",
                READ_DEADLINE_SECONDS,
            )
            return None


def _answer(read: Callable[[], TakenMemory | None], answer: Future[TakenMemory | None]) -> None:
    answer.set_running_or_notify_cancel()  # from here on, it cannot be cancelled
    taken = None
    try:
        taken = read()
    finally:
        answer.set_result(taken)


def device_memory(parallel_config: Any) -> DeviceMemory:
    """Return the memory of the devices that this host's engines use."""
    if not current_platform.is_cuda():
        return DeviceMemory(lambda: None)
    names = _names(parallel_config)
    return DeviceMemory(lambda: _taken(names))


def wait_for_last_engine(
    parallel_config: Any, baseline: Path, deadline_seconds: float = RETURN_DEADLINE_SECONDS
) -> None:
    """Wait like `DeviceMemory.until_returned`, in a process that starts one engine only.

    The file passes the baseline on to the process of the next engine; one of other devices is not
    used. On the CPU, it returns at once.
    """
    if not current_platform.is_cuda():
        return
    names = _names(parallel_config)
    memory = DeviceMemory(lambda: _taken(names), _kept_bytes(baseline, names))
    # With a factory, it leaves alone what vLLM gets as the event loop of this thread.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(memory.until_returned(deadline_seconds))
    record = {"devices": names, "used_bytes": memory.baseline_bytes}
    with suppress(OSError):  # without it, the next engine does not wait
        write_atomically(baseline, json.dumps(record))


def _kept_bytes(baseline: Path, names: tuple[str, ...]) -> int | None:
    try:
        record = read_record(baseline)
    except (OSError, ValueError):
        return None
    used_bytes: int | None = record["used_bytes"] if record["devices"] == [*names] else None
    return used_bytes


def _names(parallel_config: Any) -> tuple[str, ...]:
    """Return the NVML index or the UUID of each device that a rank on this host gets.

    vLLM's workers choose from `--device-ids` if given, else from `CUDA_VISIBLE_DEVICES`, else from
    all; local rank r of local engine e gets entry e x (ranks of an engine) + r. If fewer devices
    are listed than there are ranks, as under Ray, the other ranks run on other hosts.
    """
    engines = max(1, int(parallel_config.data_parallel_size_local))
    count = int(parallel_config.local_world_size) * engines
    assigned = parallel_config.assigned_physical_gpu_ids
    if assigned:
        return tuple(str(index) for index in assigned[:count])
    listed = os.environ.get(current_platform.device_control_env_var, "")
    if listed:
        return tuple(name.strip() for name in listed.split(","))[:count]
    return tuple(str(index) for index in range(count))


def _taken(names: Iterable[str]) -> TakenMemory | None:
    """Ask NVML, or the host if the device uses its memory, as on GB10. None if unknown."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return TakenMemory(sum(_used_bytes(name) for name in names))
    except pynvml.NVMLError_NotSupported:
        memory = psutil.virtual_memory()
        return TakenMemory(
            int(memory.total - memory.available), int(memory.total * HOST_MARGIN_SHARE)
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _used_bytes(name: str) -> int:
    by_name = pynvml.nvmlDeviceGetHandleByUUID
    handle = pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else by_name(name)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
