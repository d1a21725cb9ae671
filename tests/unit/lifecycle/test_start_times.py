"""The time until READY is learned from earlier starts, and grows when a start takes longer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.lifecycle.start_times import REMEMBERED, Forecast, first_guess
from stub_engine import FakeClock

MODEL = ["model", "--flag"]


def _started(directory: Path | None, *seconds: float) -> None:
    """Run starts that took these times, each in its own process."""
    for took in seconds:
        clock = FakeClock()
        forecast = Forecast(directory, MODEL, clock)
        forecast.began("start")
        clock.now_seconds += took
        forecast.ready()


def test_nothing_is_promised_at_the_very_first_start(tmp_path: Path) -> None:
    """The time until READY is unknown before the first start has ended."""
    forecast = Forecast(tmp_path, MODEL, FakeClock())
    forecast.began("start")
    assert forecast.seconds_left is None


def test_the_next_process_knows_what_the_last_one_took(tmp_path: Path) -> None:
    """The forecast is there from the first second, and falls as time passes."""
    _started(tmp_path, 40.0)
    clock = FakeClock()
    forecast = Forecast(tmp_path, MODEL, clock)
    forecast.began("start")
    assert forecast.seconds_left == 40.0
    clock.now_seconds += 30
    assert forecast.seconds_left == 10.0
    clock.now_seconds += 6
    assert forecast.seconds_left == 4.0


def test_what_is_overdue_is_promised_for_later(tmp_path: Path) -> None:
    """The forecast is never zero, and grows with the time that the start takes."""
    _started(tmp_path, 10.0)
    clock = FakeClock()
    forecast = Forecast(tmp_path, MODEL, clock)
    forecast.began("start")
    clock.now_seconds += 100
    assert forecast.seconds_left == 25.0
    assert forecast.expected_in_seconds == -90.0


def test_one_slow_start_does_not_set_the_forecast(tmp_path: Path) -> None:
    """The forecast is the median of the newest times."""
    _started(tmp_path, *[40.0] * (REMEMBERED - 1), 400.0)
    forecast = Forecast(tmp_path, MODEL, FakeClock())
    forecast.began("start")
    assert forecast.seconds_left == 40.0


def test_another_command_line_is_another_forecast(tmp_path: Path) -> None:
    """A larger model takes longer, so other command lines do not count."""
    _started(tmp_path, 40.0)
    forecast = Forecast(tmp_path, ["another"], FakeClock())
    forecast.began("start")
    assert forecast.seconds_left is None


def test_a_first_recovery_goes_by_the_guess(tmp_path: Path) -> None:
    """The guess counts until a recovery has ended, and its time afterwards."""
    clock = FakeClock()
    forecast = Forecast(tmp_path, MODEL, clock)
    forecast.began("recovery", guess_seconds=20.0)
    assert forecast.seconds_left == 20.0
    clock.now_seconds += 8
    forecast.ready()
    forecast.began("recovery", guess_seconds=20.0)
    assert forecast.seconds_left == 8.0


def test_a_recovery_is_not_expected_to_compile_kernels_again() -> None:
    """The first start compiled them while it sized the KV cache; they are cached now."""
    phases = {"import": 5.0, "processes": 4.0, "load": 0.5, "kv_sizing": 19.0, "warmup": 0.5}
    assert first_guess(24.0, phases) == 5.0
    assert first_guess(24.0, {}) == 24.0


def test_a_recovery_that_begins_again_is_the_same_one(tmp_path: Path) -> None:
    """Clients have waited since the first death."""
    clock = FakeClock()
    forecast = Forecast(tmp_path, MODEL, clock)
    forecast.began("recovery", guess_seconds=20.0)
    clock.now_seconds += 5
    forecast.began("recovery", guess_seconds=20.0)
    assert forecast.seconds_left == 15.0


def test_a_wait_does_not_count(tmp_path: Path) -> None:
    """Neither one that was announced nor one that lasted until something came."""
    clock = FakeClock()
    forecast = Forecast(tmp_path, MODEL, clock)
    forecast.began("recovery", guess_seconds=45.0)
    clock.now_seconds += 5
    forecast.delayed(60.0)
    assert forecast.seconds_left == 105.0
    clock.now_seconds += 60
    with forecast.waiting():
        clock.now_seconds += 300
    assert forecast.seconds_left == 45.0
    clock.now_seconds += 40
    forecast.ready()
    forecast.began("recovery")
    assert forecast.seconds_left == 40.0


def test_a_restart_is_forecast_from_the_moment_it_is_asked_for() -> None:
    """What the engine still finishes takes any time, which is not that of a recovery."""
    clock = FakeClock()
    forecast = Forecast(None, MODEL, clock)
    with forecast.finishing(70.0):
        clock.now_seconds += 45
        assert forecast.seconds_left == 70.0
    assert forecast.seconds_left == 70.0
    forecast.began("recovery", guess_seconds=70.0)
    clock.now_seconds += 80
    forecast.ready()
    forecast.began("recovery")
    assert forecast.seconds_left == 80.0


def test_a_restart_that_is_given_up_is_no_recovery() -> None:
    """The same engine serves on, so that nothing is learned of how long the next one takes."""
    clock = FakeClock()
    forecast = Forecast(None, MODEL, clock)

    def give_up() -> None:
        with forecast.finishing(70.0):
            clock.now_seconds += 5
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        give_up()
    assert forecast.seconds_left is None
    forecast.ready()
    forecast.began("recovery")
    assert forecast.seconds_left is None


def test_a_start_counts_with_what_came_before_its_wait(tmp_path: Path) -> None:
    """What is imported before the server waits for its nodes is imported at the next start too."""
    clock = FakeClock()
    forecast = Forecast(tmp_path, MODEL, clock)
    forecast.began("start")
    clock.now_seconds += 10
    with forecast.waiting():
        clock.now_seconds += 3600
    clock.now_seconds += 30
    forecast.ready()
    forecast.began("start")
    assert forecast.seconds_left == 40.0


def test_nothing_is_promised_once_it_is_ready(tmp_path: Path) -> None:
    """Without a start there is nothing to wait for."""
    forecast = Forecast(tmp_path, MODEL, FakeClock())
    forecast.began("start")
    forecast.ready()
    assert forecast.seconds_left is None


def test_a_broken_file_is_as_none(tmp_path: Path) -> None:
    """A broken file is ignored, and written again."""
    _started(tmp_path, 40.0)
    (path,) = tmp_path.iterdir()
    path.write_text('{"start": ["soon"]')
    forecast = Forecast(tmp_path, MODEL, FakeClock())
    forecast.began("start")
    assert forecast.seconds_left is None
    _started(tmp_path, 7.0)
    assert path.read_text() == '{"start": [7.0], "recovery": []}'


def test_without_a_directory_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--learned-dir none`: no file is written, and the next process knows nothing."""
    monkeypatch.chdir(tmp_path)
    _started(None, 40.0)
    forecast = Forecast(None, MODEL, FakeClock())
    forecast.began("start")
    assert forecast.seconds_left is None
    assert list(tmp_path.iterdir()) == []
