"""How long until READY: learned from earlier times, and honest when it takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import FakeClock
from holdfast.lifecycle.forecast import REMEMBERED, Forecast

MODEL = ["model", "--flag"]


def _started(directory: Path | None, *seconds: float) -> None:
    """Starts that took so long, each in a process of its own."""
    for took in seconds:
        clock = FakeClock()
        forecast = Forecast(directory, MODEL, clock)
        forecast.began("start")
        clock.now_seconds += took
        forecast.ready()


def test_nothing_is_promised_at_the_very_first_start(tmp_path: Path) -> None:
    """It is not known."""
    forecast = Forecast(tmp_path, MODEL, FakeClock())
    forecast.began("start")
    assert forecast.seconds_left is None


def test_the_next_process_knows_what_the_last_one_took(tmp_path: Path) -> None:
    """From its first second, and less as time passes."""
    _started(tmp_path, 40.0)
    clock = FakeClock()
    forecast = Forecast(tmp_path, MODEL, clock)
    forecast.began("start")
    assert forecast.seconds_left == 40.0
    clock.now_seconds += 30
    assert forecast.seconds_left == 10.0


def test_what_is_overdue_is_promised_for_later(tmp_path: Path) -> None:
    """Never zero, and the more the longer it takes."""
    _started(tmp_path, 10.0)
    clock = FakeClock()
    forecast = Forecast(tmp_path, MODEL, clock)
    forecast.began("start")
    clock.now_seconds += 100
    assert forecast.seconds_left == 25.0


def test_one_slow_start_is_no_rule(tmp_path: Path) -> None:
    """The median of the newest counts."""
    _started(tmp_path, *[40.0] * (REMEMBERED - 1), 400.0)
    forecast = Forecast(tmp_path, MODEL, FakeClock())
    forecast.began("start")
    assert forecast.seconds_left == 40.0


def test_another_command_line_is_another_forecast(tmp_path: Path) -> None:
    """A larger model takes longer."""
    _started(tmp_path, 40.0)
    forecast = Forecast(tmp_path, ["another"], FakeClock())
    forecast.began("start")
    assert forecast.seconds_left is None


def test_a_first_recovery_goes_by_the_guess(tmp_path: Path) -> None:
    """Afterwards by what it took."""
    clock = FakeClock()
    forecast = Forecast(tmp_path, MODEL, clock)
    forecast.began("recovery", guess_seconds=20.0)
    assert forecast.seconds_left == 20.0
    clock.now_seconds += 8
    forecast.ready()
    forecast.began("recovery", guess_seconds=20.0)
    assert forecast.seconds_left == 8.0


def test_a_recovery_that_begins_anew_is_the_same_one(tmp_path: Path) -> None:
    """Clients wait since the first death."""
    clock = FakeClock()
    forecast = Forecast(tmp_path, MODEL, clock)
    forecast.began("recovery", guess_seconds=20.0)
    clock.now_seconds += 5
    forecast.began("recovery", guess_seconds=20.0)
    assert forecast.seconds_left == 15.0


def test_nothing_is_promised_once_it_is_ready(tmp_path: Path) -> None:
    """There is nothing to wait for."""
    forecast = Forecast(tmp_path, MODEL, FakeClock())
    forecast.began("start")
    forecast.ready()
    assert forecast.seconds_left is None


def test_a_broken_file_is_as_none(tmp_path: Path) -> None:
    """It is written anew."""
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
