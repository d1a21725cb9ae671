"""The next engine waits until the memory of the last is back, for a limited time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

import pytest

from holdfast.engine.launch import device_memory as device_memory_module
from holdfast.engine.launch.device_memory import (
    MARGIN_BYTES,
    DeviceMemory,
    TakenMemory,
    device_memory,
)
from holdfast.workspace.plan import MIB

BEFORE_BYTES = 1000 * MIB
ENGINE_BYTES = 50000 * MIB


class Readings:
    """What the driver says, one reading after the other; the last is repeated."""

    def __init__(self, readings: Iterable[int | None]) -> None:
        self._readings = list(readings)
        self.taken = 0

    def __call__(self) -> TakenMemory | None:
        self.taken += 1
        more = len(self._readings) > 1
        used_bytes = self._readings.pop(0) if more else self._readings[0]
        return None if used_bytes is None else TakenMemory(used_bytes)


class Asked:
    """A configuration that notes what is asked of it."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> int:
        self.names.append(name)
        return 0


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What our own loggers wrote: asyncio may log tasks that other tests have left."""
    return [record.message for record in caplog.records if record.name.startswith("holdfast")]


async def two_starts(readings: Readings, deadline_seconds: float) -> None:
    """Before the first engine, and before the second."""
    memory = DeviceMemory(readings)
    await memory.until_returned(deadline_seconds)
    await memory.until_returned(deadline_seconds)


def test_the_first_start_does_not_wait() -> None:
    """There was no engine: what is taken now is what it is compared with."""
    readings = Readings([BEFORE_BYTES])
    asyncio.run(DeviceMemory(readings).until_returned())
    assert readings.taken == 1


def test_a_restart_waits_until_the_memory_is_back(caplog: pytest.LogCaptureFixture) -> None:
    """The driver gives it back after the process has ended; neighbours may take a little."""
    within = BEFORE_BYTES + MARGIN_BYTES
    readings = Readings([BEFORE_BYTES, ENGINE_BYTES, ENGINE_BYTES, within, ENGINE_BYTES])
    asyncio.run(two_starts(readings, 60))
    assert readings.taken == 4
    assert not warnings_in(caplog)


def test_memory_that_stays_away_is_told_and_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the deadline: it may be a neighbour's by now, and vLLM says what it lacks."""
    asyncio.run(two_starts(Readings([BEFORE_BYTES, ENGINE_BYTES]), 0))
    assert "49000 MiB more in use than before the first engine" in caplog.text


@pytest.mark.parametrize("readings", [[None], [BEFORE_BYTES, None], [None, ENGINE_BYTES]])
def test_a_device_of_which_nothing_is_known_is_not_waited_for(
    readings: list[int | None], caplog: pytest.LogCaptureFixture
) -> None:
    """Where NVML does not answer, each start asks it once, and nothing is told."""
    read = Readings(readings)
    asyncio.run(two_starts(read, 60))
    assert read.taken == 2
    assert not warnings_in(caplog)


@pytest.mark.parametrize("hangs_at", [1, 2])
def test_a_driver_that_hangs_is_not_waited_for(
    hangs_at: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor at the end of the server: the thread that asks it cannot be interrupted."""
    answers_after_all = threading.Event()
    readings = Readings([BEFORE_BYTES])

    def read() -> TakenMemory | None:
        taken = readings()
        if readings.taken == hangs_at:
            answers_after_all.wait()
        return taken

    memory = DeviceMemory(read)

    async def start() -> None:
        for number in range(1, hangs_at + 1):
            if number == hangs_at:
                monkeypatch.setattr(device_memory_module, "READ_DEADLINE_SECONDS", 0.01)
            await memory.until_returned()

    asyncio.run(start())
    assert "did not say within" in caplog.text
    assert (memory.baseline_bytes is None) is (hangs_at == 1)
    answers_after_all.set()


def test_the_cpu_has_its_memory_back_when_the_process_is_gone() -> None:
    """On a machine without a GPU nothing is asked."""
    config = Asked()
    asyncio.run(device_memory(config).until_returned())
    assert config.names == []
