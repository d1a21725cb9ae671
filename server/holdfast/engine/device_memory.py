"""Is the memory of a dead engine back? The driver may give it back after the process has ended.

An engine that starts too early measures the old one's share as taken, and sizes its KV cache for
the rest or fails. Asked through NVML, which takes no share itself, as a CUDA context would. On the
CPU there is nothing to wait for: the kernel frees a process's memory before it shows its end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import psutil
from vllm.platforms import current_platform
from vllm.third_party import pynvml

from holdfast.workspace.plan import MIB

MARGIN_BYTES = 512 * MIB
"""What neighbours on the device, or the host's own processes, may take meanwhile."""
POLL_SECONDS = 0.2
RETURN_DEADLINE_SECONDS = 30.0

logger = logging.getLogger("holdfast.engine")


class DeviceMemory:
    """The memory that is taken, compared with what was before the first engine."""

    def __init__(self, used_bytes: Callable[[], int | None]) -> None:
        self._used_bytes = used_bytes
        self._baseline_bytes: int | None = None

    async def until_returned(self, deadline_seconds: float = RETURN_DEADLINE_SECONDS) -> None:
        """Return when no more is taken than at the first call, or with a warning at the deadline.

        A neighbour that took it is no reason not to try: vLLM says what it lacks.
        """
        used_bytes = await asyncio.to_thread(self._used_bytes)
        if self._baseline_bytes is None or used_bytes is None:
            self._baseline_bytes = used_bytes
            return
        deadline = time.monotonic() + deadline_seconds
        while used_bytes is not None and used_bytes > self._baseline_bytes + MARGIN_BYTES:
            if time.monotonic() > deadline:
                more = (used_bytes - self._baseline_bytes) // MIB
                logger.warning("%d MiB more are taken than before the first engine", more)
                return
            await asyncio.sleep(POLL_SECONDS)
            used_bytes = await asyncio.to_thread(self._used_bytes)


def device_memory(engine_devices: int) -> DeviceMemory:
    """That of the devices that an engine of so many local ranks uses."""
    if not current_platform.is_cuda():
        return DeviceMemory(lambda: None)
    devices = [current_platform.device_id_to_physical_device_id(i) for i in range(engine_devices)]
    return DeviceMemory(lambda: _used_bytes(devices))


def _used_bytes(devices: Iterable[int]) -> int | None:
    """By NVML; the host's where the device has none of its own, as on GB10. None if unknown."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return sum(_used_bytes_of(device) for device in devices)
    except pynvml.NVMLError_NotSupported:
        memory = psutil.virtual_memory()
        return int(memory.total - memory.available)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _used_bytes_of(device: int) -> int:
    handle = pynvml.nvmlDeviceGetHandleByIndex(device)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
