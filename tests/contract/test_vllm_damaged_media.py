"""No damaged file of an allowed format ends the process that decodes it: real decoders.

They are native code, and run in the front end. Each test has a process of its own, so that a crash
is a failure of the test and not the end of all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from damaged_media import DONE, KINDS, clips

DEADLINE_SECONDS = 240
SEED, COUNT, SECONDS = 1, 12, 10
"""Longer: `python -m damaged_media KIND SEED COUNT SECONDS` in `tests/support`."""
SUPPORT = Path(__file__).parents[1] / "support"
SERVER = Path(holdfast.__file__).parents[1]


def last_line(*arguments: str) -> str:
    """What a process that decodes said last: `DONE`, or what it died of."""
    path = os.pathsep.join([str(SUPPORT), str(SERVER), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "damaged_media", *arguments],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    [*_, last] = ended.stdout.splitlines() or [""]
    return last if ended.returncode == 0 else f"{last}: {ended.returncode}\n{ended.stderr}"


@pytest.mark.parametrize("kind", KINDS)
def test_no_damaged_file_ends_the_process_that_decodes_it(kind: str) -> None:
    """It is the fault of the client, too, and not a 500."""
    assert last_line(kind, str(SEED), str(COUNT), str(SECONDS)) == DONE


@pytest.mark.parametrize(
    ("kind", "at", "bit"),
    [("MJPG in avi", 31, 7), ("WMV2 in wmv", 196, 3)],
    ids=["before its start", "for ever"],
)
def test_a_clip_with_one_wrong_bit_ends_nothing(
    tmp_path: Path, kind: str, at: int, bit: int
) -> None:
    """It has FFmpeg seek to where there is nothing, or to the same place for ever."""
    clip = bytearray(dict(clips())[kind])
    clip[at] ^= 1 << bit
    file = tmp_path / "clip"
    file.write_bytes(clip)
    assert last_line("video", str(file)) == DONE
