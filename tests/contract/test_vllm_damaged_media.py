"""No damaged file of an allowed format ends the process that decodes it: real decoders.

They are native code, and run in the front end. Each case has a process of its own, so that a crash
is the failure of one test and not the end of all; one import of vLLM serves them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from damaged_media import CASE_DEADLINE_SECONDS, DONE, ENDED, KINDS, clips

SEED, COUNT, SECONDS = 1, 12, 10
"""Longer: `python -m damaged_media 'KIND SEED COUNT SECONDS'` in `tests/support`."""
SUPPORT = Path(__file__).parents[1] / "support"
SERVER = Path(holdfast.__file__).parents[1]
DAMAGED = {kind: f"{kind} {SEED} {COUNT} {SECONDS}" for kind in KINDS}
WRONG_BITS = {"before its start": ("MJPG in avi", 31, 7), "for ever": ("WMV2 in wmv", 196, 3)}
"""Of a clip, the byte and the bit; it has FFmpeg seek to where there is nothing, or without end."""

DEADLINE_SECONDS = (len(KINDS) + len(WRONG_BITS)) * CASE_DEADLINE_SECONDS + 60

pytestmark = pytest.mark.timeout(DEADLINE_SECONDS + 60)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the process of each case said last: `DONE`, or what it died of."""
    directory = tmp_path_factory.mktemp("clips")
    cases = {**DAMAGED, **{name: f"video {_clip(directory, name)}" for name in WRONG_BITS}}
    path = os.pathsep.join([str(SUPPORT), str(SERVER), os.environ.get("PYTHONPATH", "")])
    decoded = subprocess.run(
        [sys.executable, "-m", "damaged_media", *cases.values()],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    last, found = "", []
    for line in decoded.stdout.splitlines():
        if line.startswith(ENDED):
            found.append(last if line == f"{ENDED} 0" else f"{last}: {line}")
        last = line
    return dict(zip(cases, found, strict=True))


def _clip(directory: Path, name: str) -> Path:
    kind, at, bit = WRONG_BITS[name]
    clip = bytearray(dict(clips())[kind])
    clip[at] ^= 1 << bit
    file = directory / f"{at}"
    file.write_bytes(clip)
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_no_damaged_file_ends_the_process_that_decodes_it(ends: dict[str, str], kind: str) -> None:
    """It is the fault of the client, too, and not a 500."""
    assert ends[kind] == DONE


@pytest.mark.parametrize("name", WRONG_BITS)
def test_a_clip_with_one_wrong_bit_ends_nothing(ends: dict[str, str], name: str) -> None:
    """One such clip would otherwise end the front end, or keep a thread of it without end."""
    assert ends[name] == DONE
