"""No file in the state directory stops a start, or gives it a forecast that is not a number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.atomic_files import MAX_RECORD_BYTES, read_record
from holdfast.lifecycle.start_times import MAX_SECONDS, Forecast
from holdfast.probe import ProbeJournal
from holdfast.processes.environment import NativeVariables

DEADLINE_SECONDS = 60.0
ARGUMENTS = ("model",)
START = """
import sys
from pathlib import Path
from holdfast.processes.environment import NativeVariables
from holdfast.lifecycle.start_times import Forecast
from holdfast.probe import ProbeJournal

directory = Path(sys.argv[1])
forecast = Forecast(directory, ("model",))
forecast.began("start")
known = NativeVariables(directory, ("model",)).known
print(forecast.seconds_left, dict(known), ProbeJournal(directory, "f").forbidden_tokens)
"""


def _link_to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def _link_to_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _deep(path: Path) -> None:
    path.write_text("[" * (MAX_RECORD_BYTES - 1))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Return the files of the times, the native variables and an attempt of the probe."""
    journal = ProbeJournal(tmp_path, "f").path
    assert journal is not None
    forecast, native = Forecast(tmp_path, ARGUMENTS), NativeVariables(tmp_path, ARGUMENTS)
    forecast.began("start")
    forecast.ready()
    native.remember(os.getpid())
    return [*tmp_path.iterdir(), journal]


@pytest.mark.parametrize(
    "put", [os.mkfifo, os.mkdir, _link_to_nothing, _link_to_endless_device, _huge, _deep]
)
def test_a_start_goes_on_whatever_is_in_the_place_of_a_record(
    put: Callable[[Path], None], tmp_path: Path, paths: list[Path]
) -> None:
    """The start neither hangs nor fails, and knows nothing."""
    for path in paths:
        path.unlink(missing_ok=True)
        put(path)
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path)],
        timeout=DEADLINE_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "None {} None\n"), done.stderr


@pytest.mark.parametrize(
    "seconds",
    [
        "1e999",
        "-1e999",
        "NaN",
        "Infinity",
        "-1",
        "9" * 400,
        "9" * 5000,
        '"40"',
        str(10 * MAX_SECONDS),
    ],
)
def test_a_time_that_is_none_is_not_promised(tmp_path: Path, seconds: str) -> None:
    """The time until READY is unknown, and the health routes can say so."""
    forecast = Forecast(tmp_path, ARGUMENTS)
    forecast.began("start")
    forecast.ready()
    (path,) = tmp_path.iterdir()
    path.write_text(f'{{"start": [{seconds}], "recovery": []}}')
    forecast = Forecast(tmp_path, ARGUMENTS)
    forecast.began("start")
    assert forecast.seconds_left is None


@pytest.mark.parametrize("tokens", ["0", "-5", "9" * 400, "1e999"])
def test_an_attempt_of_no_size_forbids_nothing(tmp_path: Path, tokens: str) -> None:
    """Otherwise a damaged record would forbid every context."""
    path = ProbeJournal(tmp_path, "f").path
    assert path is not None
    path.write_text(f'{{"layout": 2, "fingerprint": "f", "context_tokens": {tokens}}}')
    assert ProbeJournal(tmp_path, "f").forbidden_tokens is None


def test_a_record_of_the_largest_size_is_read(tmp_path: Path) -> None:
    """A record one byte longer is not read."""
    path = tmp_path / "record.json"
    path.write_text(json.dumps("x" * (MAX_RECORD_BYTES - 2)))
    assert len(read_record(path)) == MAX_RECORD_BYTES - 2
    path.write_text(json.dumps("x" * (MAX_RECORD_BYTES - 1)))
    with pytest.raises(ValueError, match="too large"):
        read_record(path)
