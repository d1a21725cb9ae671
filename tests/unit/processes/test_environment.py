"""What native libraries read once decides which process can be forked from which."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from holdfast.processes.environment import NativeVariables, can_adopt

OPENMP = str(next(Path(torch.__file__).parent.glob("lib/libgomp*")))
BOUND = {"LD_PRELOAD": OPENMP, "OMP_NUM_THREADS": "1", "GOMP_CPU_AFFINITY": "0"}
ARGUMENTS = ("model", "--flag")


@pytest.mark.parametrize(
    ("wanted", "started_with", "can"),
    [
        ({}, {}, True),
        (BOUND, BOUND, True),
        (BOUND | {"HOME": "/a"}, BOUND | {"HOME": "/b"}, True),
        (BOUND, {}, False),
        ({}, BOUND, False),
        (BOUND, BOUND | {"GOMP_CPU_AFFINITY": "1"}, False),
        (BOUND | {"OMP_NUM_THREADS": "2"}, BOUND, False),
        ({"OMP_NUM_THREADS": "2"}, {}, True),
        ({"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "4"}, True),
        ({"KMP_BLOCKTIME": "5"}, {}, False),
        ({"TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}, {}, False),
        ({"TORCHINDUCTOR_CACHE_DIR": "/a"}, {}, True),
    ],
)
def test_a_process_goes_on_with_what_can_be_set_later(
    wanted: dict[str, str], started_with: dict[str, str], can: bool
) -> None:
    """A number of threads can, unless threads are bound; what is preloaded cannot."""
    assert can_adopt(wanted, started_with) is can


def test_what_a_worker_was_started_with_is_known_at_the_next_start(tmp_path: Path) -> None:
    """It is read from the process itself, and only what native libraries read is kept."""
    _keep(tmp_path, ARGUMENTS, BOUND | {"SECRET": "s"})
    assert NativeVariables(tmp_path, ARGUMENTS).known == BOUND
    assert NativeVariables(None, ARGUMENTS).known == {}


def test_a_new_command_line_starts_with_what_the_last_one_had(tmp_path: Path) -> None:
    """A guess, which gives way to what it turns out to need; the other keeps its own."""
    _keep(tmp_path, ARGUMENTS, BOUND)
    assert NativeVariables(tmp_path, ("another",)).known == BOUND
    _keep(tmp_path, ("another",), {})
    assert NativeVariables(tmp_path, ("another",)).known == {}
    assert NativeVariables(tmp_path, ("third",)).known == {}
    assert NativeVariables(tmp_path, ARGUMENTS).known == BOUND


def _keep(directory: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input(0)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(environment),
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.read(1)  # for a moment after its start a process has no environment yet
        NativeVariables(directory, arguments).remember(worker.pid)
        worker.communicate(b"\n", timeout=60)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        b"{" * 2000,
        json.dumps({"LD_PRELOAD": "/bin/true"}).encode(),
        json.dumps({"LD_PRELOAD": f"{OPENMP}:/lib/evil.so"}).encode(),
        json.dumps({"LD_PRELOAD": f"{OPENMP}/../missing.so"}).encode(),
        json.dumps({"LD_LIBRARY_PATH": "/"}).encode(),
        json.dumps({"OMP_NUM_THREADS": 1}).encode(),
        json.dumps({"OMP_NUM_THREADS": "1\n2"}).encode(),
        json.dumps({"OMP_TOOL_LIBRARIES": "/lib/evil.so"}).encode(),
    ],
)
def test_a_file_cannot_have_other_code_loaded(tmp_path: Path, content: bytes) -> None:
    """What it names lies beside the packages of this environment, or the file says nothing."""
    _keep(tmp_path, ARGUMENTS, BOUND)
    for file in tmp_path.iterdir():
        file.write_bytes(content)
    assert NativeVariables(tmp_path, ARGUMENTS).known == {}
